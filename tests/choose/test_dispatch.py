"""What a decision books, what an outcome teaches, what a restart makes void. On a clock of our own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.choose.cost import DECODE_WEIGHT
from router.choose.dispatch import Dispatch, Placement
from router.choose.policies import policy
from router.config import Address
from router.fleet.rates import Rates
from router.fleet.replica import Replica, State
from router.fleet.scrape import CacheConfig, Metrics
from router.index.memory import Index
from router.prompt.blocks import Chain, Hasher

HASHER = Hasher("sha256")


def prompt(seed: int, tokens: int = 1000) -> Chain:
    return HASHER.chain([seed, *range(tokens - 1)], 16)


class Bench:
    """Replicas a, b, ... of 4096 blocks of 16 tokens, and a dispatch over them."""

    def __init__(self, names: str = "a") -> None:
        self.index, self.rates = Index(), Rates(8000)
        self.dispatch = Dispatch(self.index, self.rates, policy("cost", tie_band_ms=10))
        self.replicas = [Replica(name, Address(name, 1, False, ""), state=State.READY) for name in names]
        for replica in self.replicas:
            replica.metrics = Metrics(cache=CacheConfig(16, 4097))
            self.index.size(replica.name, 4096)

    def place(
        self,
        now: float,
        chains: Sequence[Chain],
        *,
        tokens: list[int] | None = None,
        answer_tokens: int = 0,
        sequences: int = 1,
    ) -> Placement:
        return self.dispatch.place(
            now,
            self.replicas,
            [chains] * len(self.replicas),
            tokens if tokens is not None else [chain.length for chain in chains],
            answer_tokens=answer_tokens,
            visible=True,
            sequences=sequences,
        )

    def depth(self, chain: Chain, name: str = "a") -> int:
        return self.index.match(name, chain.keys).depth


def test_a_decision_is_booked_at_once() -> None:
    bench = Bench()
    placement = bench.place(0.0, [prompt(1)], answer_tokens=30, sequences=3)
    load = bench.replicas[0].load
    prefill_ms = bench.rates.prefill_ms(1000, 0)
    assert (load.in_flight, load.decoding, load.waiting_ms(0.0)) == (3, 0, pytest.approx(prefill_ms))
    assert load.routed(0.0) == pytest.approx(prefill_ms / 0.125 + 30 * DECODE_WEIGHT)
    assert bench.depth(prompt(1)) == 1000 // 16
    bench.dispatch.first_token(0.1, placement)
    assert (load.in_flight, load.decoding, load.waiting_ms(0.1)) == (3, 3, 0.0)
    bench.dispatch.end(0.2, placement)
    bench.dispatch.end(0.2, placement)
    assert (load.in_flight, load.decoding) == (0, 0)


def test_what_strangers_have_queued_is_waited_for() -> None:
    bench = Bench("ab")
    for now in (1.0, 2.0):
        bench.replicas[0].scraped(Metrics(running=4.0, waiting=3.0, cache=CacheConfig(16, 4097)), now)
    decision = bench.dispatch.weigh(2.0, bench.replicas, [[prompt(1)]] * len(bench.replicas), [1000])
    assert bench.place(2.0, [prompt(1)]).replica.name == "b"
    (candidate, idle), (price, _) = decision.candidates, decision.prices
    assert candidate.waiting_ms == pytest.approx(3 * bench.rates.prefill_ms(1000, 0))
    assert (candidate.decoding, candidate.in_flight) == (4, 7)
    assert price.waiting_ms == candidate.waiting_ms
    assert idle.waiting_ms == 0.0


def test_a_first_token_teaches_the_rate() -> None:
    bench, alone = Bench(), Rates(8000)
    first = bench.place(0.0, [prompt(1)])
    bench.dispatch.first_token(0.5, first)
    alone.observe("a", tokens=1000, cached=0, queued_ms=0.0, ttft_ms=500.0)
    assert bench.rates.token_ms == pytest.approx(alone.token_ms)
    assert bench.rates.token_ms > 0.125
    bench.dispatch.end(0.6, first)
    # What was cached is taken off, and what waited says nothing.
    longer = HASHER.chain([1, *range(2999)], 16)
    second, third = bench.place(1.0, [longer]), bench.place(1.0, [prompt(2, 3000)])
    assert second.hit == 1000 // 16 * 16
    assert third.waiting_ms > 0
    bench.dispatch.first_token(2.0, second)
    alone.observe("a", tokens=3000, cached=1000 // 16 * 16, queued_ms=0.0, ttft_ms=1000.0)
    assert bench.rates.token_ms == pytest.approx(alone.token_ms)
    bench.dispatch.first_token(9.0, third)
    assert bench.rates.token_ms == pytest.approx(alone.token_ms)


@pytest.mark.parametrize("read", [True, False], ids=["two prompts", "unread"])
def test_what_is_not_one_known_prompt_teaches_nothing(read: bool) -> None:
    bench = Bench()
    placement = bench.place(0.0, [prompt(1), prompt(2)]) if read else bench.place(0.0, [], tokens=[2000])
    bench.dispatch.first_token(5.0, placement)
    assert bench.rates.token_ms == pytest.approx(0.125)
    assert bench.replicas[0].load.decoding == 1


def test_an_answer_extends_what_is_held_and_ends_a_turn() -> None:
    bench = Bench()
    chain = prompt(1)
    placement = bench.place(0.0, [chain])
    assert not bench.index.match("a", chain.keys).continues
    whole = chain.extend(list(range(100)))
    bench.dispatch.answered(placement, [whole])
    match = bench.index.match("a", whole.keys)
    assert (match.depth, match.continues) == (1100 // 16, True)


def test_what_was_not_computed_is_withdrawn_and_what_was_there_before_stays() -> None:
    bench = Bench()
    held, longer = prompt(1, 320), HASHER.chain([1, *range(999)], 16)
    assert longer.keys[:20] == held.keys
    bench.dispatch.end(0.0, bench.place(0.0, [held]))
    before = bench.replicas[0].load.routed(10.0)
    placement = bench.place(10.0, [longer], answer_tokens=50)
    assert bench.depth(longer) == 62
    bench.dispatch.withdraw(10.0, placement)
    assert bench.depth(longer) == 20
    assert bench.replicas[0].load.routed(10.0) == pytest.approx(before)


@pytest.mark.parametrize(
    ("leaves_at", "first_token_at", "kept"), [(0.01, None, False), (9.0, None, True), (0.01, 0.005, True)]
)
def test_a_client_that_leaves_takes_with_it_what_was_not_computed_yet(
    leaves_at: float, first_token_at: float | None, kept: bool
) -> None:
    bench = Bench()
    placement = bench.place(0.0, [prompt(1)])
    if first_token_at is not None:
        bench.dispatch.first_token(first_token_at, placement)
    bench.dispatch.left(leaves_at, placement)
    assert bench.depth(prompt(1)) == (62 if kept else 0)


def test_a_client_that_leaves_while_it_is_queued_was_not_computed() -> None:
    bench = Bench()
    bench.place(0.0, [prompt(9, 60_000)])
    placement = bench.place(0.0, [prompt(1)])
    # Its own prefill would be long over; the one before it is not.
    bench.dispatch.left(1.0, placement)
    assert bench.depth(prompt(1)) == 0


def test_outcomes_of_another_process_change_nothing() -> None:
    bench = Bench()
    chain = prompt(1)
    old_failed, old_answered = bench.place(0.0, [chain]), bench.place(0.0, [chain])
    bench.replicas[0].restarted()
    bench.index.restart("a")
    bench.dispatch.answered(old_answered, [chain])
    assert bench.depth(chain) == 0
    bench.place(1.0, [chain])
    assert bench.replicas[0].load.in_flight == 1
    bench.dispatch.withdraw(2.0, old_failed)
    assert bench.depth(chain) == 62
    for placement in (old_answered, old_failed):
        bench.dispatch.end(2.0, placement)
    assert bench.replicas[0].load.in_flight == 1


def test_a_replica_that_caches_nothing_promises_nothing() -> None:
    bench = Bench()
    bench.replicas[0].metrics = Metrics(cache=CacheConfig(16, 4097, prefix_caching=False))
    for _ in range(2):
        assert bench.place(0.0, [prompt(1)]).hit == 0


def test_hits_end_at_the_alignment() -> None:
    bench = Bench()
    bench.replicas[0].metrics = Metrics(cache=CacheConfig(16, 4097, pool_block_size=528, alignment=528))
    bench.place(0.0, [prompt(1)])
    assert bench.place(0.0, [prompt(1)]).hit == 528


def test_a_prompts_last_token_is_always_computed() -> None:
    bench = Bench()
    bench.place(0.0, [prompt(1, 320)])
    assert bench.place(0.0, [prompt(1, 320)]).hit == 320 - 16


def test_weighing_changes_nothing() -> None:
    bench = Bench("ab")
    decision = bench.dispatch.weigh(0.0, bench.replicas, [[prompt(1)]] * len(bench.replicas), [1000])
    assert [candidate.name for candidate in decision.candidates] == ["a", "b"]
    assert all(replica.load.in_flight == 0 for replica in bench.replicas)
    assert all(replica.load.routed(0.0) == 0.0 for replica in bench.replicas)
    assert all(bench.depth(prompt(1), name) == 0 for name in "ab")
