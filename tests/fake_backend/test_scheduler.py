from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend.engine import Engine, Outcome
from fake_backend.pool import Stored
from fake_backend.request import Request, State
from fake_backend.scheduler import SchedulerConfig
from fake_backend.timing import StepTime

ONE_SECOND = StepTime(0.0, 0.0, 0.0, 0.0, 1.0, 0.0, overhead=1.0)


def engine(blocks: int = 100, *, caching: bool = True, **config: object) -> Engine:
    chosen = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 400} | config
    return Engine(SchedulerConfig(**chosen), blocks, ONE_SECOND, caching=caching, record_events=True)  # type: ignore[arg-type]


def request(name: str, prompt: int, answer: int = 1, *, seed: str | None = None, **more: object) -> Request:
    """``seed`` names what the tokens say; requests of the same seed share their prefix."""
    keys = [hash((seed or name, i)) for i in range((prompt + answer) // 4)]
    return Request(name, prompt, answer, keys, **more)  # type: ignore[arg-type]


class Run:
    """An engine with a clock of its own: every step takes one second."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 0.0
        self.batches: list[dict[str, int]] = []

    def step(self) -> Outcome | None:
        step = self.engine.begin(self.now)
        if step is None:
            return None
        self.batches.append({r.id: n for r, n in zip(step.batch.requests, step.batch.tokens, strict=True)})
        self.now = step.ends
        return self.engine.end(self.now)

    def drain(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if self.step() is None:
                self.engine.end(self.now)
                return
        raise AssertionError("the engine never became idle")


def test_prompts_are_chunked_to_the_budget_and_decodes_go_first() -> None:
    run = Run(engine())
    run.engine.add(request("a", 10, 5))
    run.engine.add(request("b", 20, 2))
    run.drain()
    assert run.batches == [
        {"a": 10, "b": 6},
        {"a": 1, "b": 14},
        {"a": 1, "b": 1},
        {"a": 1},
        {"a": 1},
    ]


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    run = Run(engine())
    first, again, longer = request("a", 8), request("b", 8, seed="a"), request("c", 9, seed="a")
    for each in (first, again, longer):
        run.engine.add(each)
        run.drain()
    assert [each.cached_tokens for each in (first, again, longer)] == [0, 4, 8]
    assert (run.engine.scheduler.counters.prefix_queries, run.engine.scheduler.counters.prefix_hits) == (25, 12)


def test_two_equal_prompts_in_one_step_share_blocks() -> None:
    run = Run(engine(max_num_batched_tokens=64))
    run.engine.add(request("a", 12))
    twin = request("b", 12, seed="a")
    run.engine.add(twin)
    run.step()
    assert twin.cached_tokens == 8
    assert run.batches == [{"a": 12, "b": 4}]


def test_generated_tokens_enter_the_cache_but_the_last_one_does_not() -> None:
    run = Run(engine())
    run.engine.add(request("a", 6, 6))  # 12 tokens, of which the last is sampled but never computed
    run.drain()
    run.engine.add(follow := request("b", 20, seed="a"))
    run.drain()
    assert follow.cached_tokens == 8


def test_the_answer_that_goes_one_further_fills_the_block() -> None:
    run = Run(engine())
    run.engine.add(request("a", 6, 7))
    run.drain()
    run.engine.add(follow := request("b", 20, seed="a"))
    run.drain()
    assert follow.cached_tokens == 12


def test_a_prompt_that_does_not_fit_holds_back_all_behind_it() -> None:
    run = Run(engine(blocks=6, max_num_batched_tokens=64))  # 5 usable
    run.engine.add(request("a", 8, 8))  # 2 blocks, 4 in the end
    run.engine.add(request("b", 16, 1))  # 4 blocks
    run.engine.add(request("c", 2, 1))  # would fit
    run.step()
    assert run.batches == [{"a": 8}]
    assert len(run.engine.scheduler.waiting) == 2


def test_without_reservation_a_prompt_starts_with_what_there_is() -> None:
    run = Run(engine(blocks=6, reserve_full_prompt=False))
    run.engine.add(request("a", 20, 1))
    run.engine.add(request("b", 8, 1))
    run.step()
    assert run.batches == [{"a": 16}]
    run.step()
    assert run.batches[-1] == {"a": 4}


def test_the_last_admitted_is_preempted_and_computed_again_from_the_front() -> None:
    run = Run(engine(blocks=6, max_num_batched_tokens=64))  # 5 usable
    a, b, c = request("a", 7, 9), request("b", 8, 4), request("c", 4, 1)
    for each in (a, b, c):
        run.engine.add(each)
    run.step()
    # a and b hold 2 blocks each, c one. The next tokens need new blocks: c finished, b takes the free one.
    assert run.batches == [{"a": 7, "b": 8, "c": 4}]
    while not b.preemptions:
        run.step()
    assert a.preemptions == 0
    assert b.state is State.PREEMPTED
    assert next(iter(run.engine.scheduler.waiting)) is b
    assert run.engine.scheduler.counters.preemptions == 1
    run.drain()
    assert (a.generated, b.generated) == (9, 4)
    assert run.engine.pool.free_blocks == 5


def test_readmission_is_no_query_of_the_prefix_cache() -> None:
    run = Run(engine(blocks=6, max_num_batched_tokens=64))
    a, b = request("a", 7, 9), request("b", 8, 8)
    run.engine.add(a)
    run.engine.add(b)
    run.drain()
    assert a.preemptions + b.preemptions > 0
    assert run.engine.scheduler.counters.prefix_queries == 15


def test_priority_decides_who_goes_first_and_who_has_to_go() -> None:
    run = Run(engine(policy="priority", max_num_seqs=1))
    for name, priority in (("late", 5), ("soon", -1), ("middle", 0)):
        run.engine.add(request(name, 4, 1, priority=priority, arrival=0.0))
    run.drain()
    assert [list(batch) for batch in run.batches] == [["soon"], ["middle"], ["late"]]


def test_priority_preempts_the_least_important() -> None:
    run = Run(engine(blocks=6, policy="priority", max_num_batched_tokens=64))
    a, b = request("a", 8, 8, priority=9), request("b", 8, 8, priority=0)
    run.engine.add(a)
    run.step()
    run.engine.add(b)
    run.drain()
    assert (a.preemptions > 0, b.preemptions) == (True, 0)
    assert (a.generated, b.generated) == (8, 8)


def test_long_prefills_are_capped_only_in_company() -> None:
    alone = Run(engine(long_prefill_token_threshold=4))
    alone.engine.add(request("a", 12, 1))
    alone.drain()
    assert alone.batches == [{"a": 12}]
    company = Run(engine(long_prefill_token_threshold=4))
    company.engine.add(request("a", 12, 1))
    company.engine.add(request("b", 6, 1))
    company.step()
    assert company.batches == [{"a": 4, "b": 4}]


def test_without_chunking_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    run = Run(engine(chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16))
    run.engine.add(request("a", 10, 1))
    run.engine.add(request("b", 10, 1))
    run.drain()
    assert run.batches == [{"a": 10}, {"b": 10}]


def test_chunking_off_needs_a_budget_for_the_longest_prompt() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        engine(chunked_prefill=False, max_num_batched_tokens=16, max_model_len=17)


def test_too_many_adapters_wait_without_blocking_others() -> None:
    run = Run(engine(max_loras=1, max_num_batched_tokens=64))
    for name, lora in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        run.engine.add(request(name, 4, 2, lora=lora))
    run.step()
    assert list(run.batches[0]) == ["a", "c", "d"]
    assert [each.id for each in run.engine.scheduler.deferred] == ["b"]
    run.drain()
    assert run.batches[2] == {"b": 4}


def test_an_abort_in_a_step_takes_effect_when_it_ends() -> None:
    run = Run(engine())
    leaving = request("a", 8, 50)
    run.engine.add(leaving)
    run.step()
    step = run.engine.begin(run.now)
    assert step is not None
    run.engine.abort(leaving, run.now)
    assert leaving.state is State.RUNNING
    outcome = run.engine.end(step.ends)
    assert outcome.finished == [leaving]
    assert (leaving.finish_reason, leaving.generated) == ("abort", 2)
    assert run.engine.pool.free_blocks == 99


def test_an_abort_between_steps_is_immediate_and_reported_with_the_next_outcome() -> None:
    run = Run(engine())
    waiting = request("a", 8, 50)
    run.engine.add(waiting)
    run.engine.abort(waiting, run.now)
    assert len(run.engine.scheduler) == 0
    assert run.engine.end(run.now).finished == [waiting]


def test_requests_that_may_not_read_the_cache_still_fill_it() -> None:
    run = Run(engine())
    run.engine.add(blind := request("a", 8, reads_cache=False))
    run.drain()
    run.engine.add(again := request("b", 8, seed="a", reads_cache=False))
    run.drain()
    run.engine.add(reader := request("c", 8, seed="a"))
    run.drain()
    assert (blind.cached_tokens, again.cached_tokens, reader.cached_tokens) == (0, 0, 4)
    assert run.engine.scheduler.counters.prefix_queries == 8


def test_blocks_are_registered_when_scheduled() -> None:
    run = Run(engine())
    run.engine.add(it := request("a", 8, 3))
    step = run.engine.begin(0.0)
    assert step is not None
    assert run.engine.pool.events == [Stored(it, 0, 2)]


def test_reset_needs_an_engine_at_rest() -> None:
    run = Run(engine())
    run.engine.add(request("a", 8, 3))
    run.step()
    assert not run.engine.reset_prefix_cache()
    assert run.engine.reset_prefix_cache(preempt=True)
    run.drain()
    assert run.engine.reset_prefix_cache()


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),  # conversation
        st.integers(1, 30),  # prompt
        st.integers(1, 20),  # answer
        st.integers(0, 4),  # steps before it arrives
        st.integers(-2, 2),  # priority
        st.sampled_from((None, None, 3, 7)),  # steps after which its client leaves
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=ARRIVALS,
    blocks=st.integers(14, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    policy=st.sampled_from(("fcfs", "priority")),
    reserve=st.booleans(),
    threshold=st.sampled_from((0, 3)),
)
def test_limits_hold_whatever_arrives_and_leaves(
    arrivals: list[tuple[int, int, int, int, int, int | None]],
    blocks: int,
    seqs: int,
    budget: int,
    policy: str,
    reserve: bool,
    threshold: int,
) -> None:
    run = Run(
        engine(
            blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy, reserve_full_prompt=reserve,
            long_prefill_token_threshold=threshold,
        )
    )  # fmt: skip
    pool, scheduler = run.engine.pool, run.engine.scheduler
    stored: set[int] = set()
    live: dict[Request, int | None] = {}
    finished: list[Request] = []

    def one_step() -> bool:
        before = dict.fromkeys(stored)
        step = run.engine.begin(run.now)
        stored.update(
            key
            for event in pool.events
            if isinstance(event, Stored)
            for key in event.request.keys[event.first : event.last]
        )
        if step is not None:
            assert sum(step.batch.tokens) <= budget
            assert len(scheduler.running) <= seqs
            assert len(set(step.batch.requests)) == len(step.batch.requests)
            run.now = step.ends
            for each, tokens in zip(step.batch.requests, step.batch.tokens, strict=True):
                assert tokens > 0
                assert each.computed <= each.tokens
                assert len(each.blocks) == -(-each.computed // 4)
                hit = (each.cached_tokens or 0) // 4
                assert hit * 4 < each.prompt_tokens
                assert all(key in before or key in stored for key in each.keys[:hit])
        finished.extend(run.engine.end(run.now).finished)
        held = [block for each in live for block in each.blocks]
        assert len(set(held)) + pool.free_blocks == pool.usable
        assert all(not each.blocks for each in finished)
        return step is not None

    for number, (talk, prompt, answer, delay, priority, patience) in enumerate(arrivals):
        for _ in range(delay):
            one_step()
            for each, left in list(live.items()):
                if left is not None:
                    live[each] = left - 1
                    if left <= 1:
                        run.engine.abort(each, run.now)
        it = request(f"r{number}", prompt, answer, seed=f"talk{talk}", priority=priority, arrival=run.now)
        live[it] = patience
        run.engine.add(it)
    for _ in range(3000):
        if not one_step() and not len(scheduler):
            break
    assert len(finished) == len(live)
    assert len(set(finished)) == len(live)
    assert pool.free_blocks == pool.usable
    assert all(each.generated == each.answer_tokens for each in finished if each.finish_reason == "length")
