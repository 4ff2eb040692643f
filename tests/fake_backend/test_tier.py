"""Blocks that went to CPU memory and came back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend.connector import TierRemoved, TierStored
from fake_backend.engine import Engine
from fake_backend.kv_events import Content, Describer, Encoding
from fake_backend.link import Link
from fake_backend.request import Request
from fake_backend.scheduler import SchedulerConfig
from fake_backend.tier import CpuTier
from fake_backend.timing import StepTime
from tests.fake_backend.raw import ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

ONE_SECOND = StepTime(0.0, 0.0, 0.0, 0.0, 1.0, 0.0, overhead=1.0)


def engine(capacity: int = 100, blocks: int = 6) -> tuple[Engine, CpuTier]:
    tier = CpuTier(capacity, 4, 1.0, Link(8.0, 0.0))
    config = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    return Engine(config, blocks, ONE_SECOND, connector=tier), tier


def request(name: str, prompt: int, answer: int = 1, talk: str = "") -> Request:
    return Request(name, prompt, answer, [hash((talk or name, i)) for i in range((prompt + answer) // 4)])


def run(it: Engine, now: float) -> float:
    """Until nothing is left to do; the time then."""
    for _ in range(500):
        step = it.begin(now)
        if step is not None:
            now = step.ends
            it.end(now)
            continue
        it.end(now)
        event = it.next_event()
        if event is None:
            return now
        now = max(now, event)
    raise AssertionError("never idle")


def test_what_the_gpu_forgot_comes_back_over_the_bus() -> None:
    it, _tier = engine()
    it.add(request("a", 16))
    now = run(it, 0.0)
    it.add(request("b", 20))
    now = run(it, now)
    again = request("c", 17, talk="a")
    assert it.pool.lookup(again.keys, 4) == []
    it.add(again)
    assert it.begin(now) is None
    it.end(now)
    assert it.next_event() == now + 2.0  # 16 tokens of a byte at 8 bytes a second
    step = it.begin(now + 2.0)
    assert step is not None
    assert step.batch.tokens == [1]
    assert (again.cached_tokens, again.external_tokens) == (16, 16)
    assert (it.scheduler.counters.external_queries, it.scheduler.counters.external_hits) == (16 + 20 + 17, 16)


def test_the_last_token_is_never_fetched() -> None:
    it, tier = engine()
    it.add(request("a", 16))
    run(it, 0.0)
    assert tier.match(request("b", 16, talk="a"), 0) == 12
    assert tier.match(request("b", 17, talk="a"), 0) == 16
    assert tier.match(request("b", 17, talk="a"), 8) == 8


def test_only_the_most_recently_used_are_kept() -> None:
    it, tier = engine(capacity=3)
    it.add(a := request("a", 8))
    now = run(it, 0.0)
    it.add(b := request("b", 8))
    run(it, now)
    assert len(tier) == 3
    assert [tier.holds(key) for key in (*a.keys, *b.keys)] == [False, True, True, True]


def test_events_of_the_other_medium() -> None:
    it, _tier = engine(capacity=3)
    it.add(a := request("a", 8))
    step = it.begin(0.0)
    assert step is not None
    assert it.end(1.0).cache_events[1:] == [TierStored(tuple(a.keys))]
    it.add(b := request("b", 8))
    it.begin(1.0)
    assert it.end(2.0).cache_events[1:] == [TierRemoved((a.keys[0],)), TierStored(tuple(b.keys))]
    describer = Describer(Encoding(4), lambda _request: Content([], []))
    (stored,) = describer.describe(TierStored((7,)))
    assert stored == {
        "type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [], "block_size": 0,
        "lora_id": None, "medium": "CPU", "lora_name": None,
    }  # fmt: skip
    assert describer.describe(TierRemoved((7, 8))) == [
        {"type": "BlockRemoved", "block_hashes": [key], "medium": "CPU", "group_idx": 0} for key in (7, 8)
    ]


def test_leaving_while_blocks_come_back_gives_all_of_them_up() -> None:
    it, tier = engine()
    it.add(request("a", 16))
    now = run(it, 0.0)
    it.add(request("b", 20))
    now = run(it, now)
    it.add(again := request("c", 17, talk="a"))
    it.begin(now)
    it.abort(again, now)
    assert it.pool.free_blocks == it.pool.usable
    assert it.next_event() is None
    tier.clear()
    assert len(tier) == 0


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="less than one block"):
        CpuTier(0, 16, 1.0)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 6), st.booleans()), min_size=1, max_size=20
    ),
    capacity=st.integers(1, 12),
    blocks=st.integers(9, 16),
)
def test_no_block_is_lost_between_the_tiers(
    arrivals: list[tuple[int, int, int, bool]], capacity: int, blocks: int
) -> None:
    it, tier = engine(capacity, blocks)
    now = 0.0
    requests: list[Request] = []
    for number, (talk, prompt, answer, leaves) in enumerate(arrivals):
        it.add(one := request(f"r{number}", prompt, answer, talk=f"talk{talk}"))
        requests.append(one)
        step = it.begin(now)
        if leaves:
            it.abort(one, now)
        now = step.ends if step is not None else now + 0.3
        it.end(now)
        assert len(tier) <= capacity + sum(len(each.keys) for each in it.scheduler.deferred)
    now = run(it, now)
    assert it.pool.free_blocks == it.pool.usable
    assert all(each.finish_reason in ("length", "abort") for each in requests)
    assert all((each.cached_tokens or 0) < each.prompt_tokens for each in requests)


async def test_a_replica_with_offloading(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start(
        "--kv-offloading-size", "1", "--num-gpu-blocks-override", "12", "--max-model-len", "128",
        "--enable-prompt-tokens-details",
    )  # fmt: skip

    async def cached(first: int) -> int:
        body = {"prompt": list(range(first, first + 100)), "max_tokens": 2}
        answer: Any = json.loads((await ask(server.port, "POST", "/v1/completions", json.dumps(body).encode())).body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(first) for first in (300, 600, 900, 300)] == [0, 0, 0, 96]
    metrics = (await ask(server.port, "GET", "/metrics")).body.decode()
    assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="Qwen3-0.6B"} 96.0' in metrics
    line = 'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="Qwen3-0.6B",source="host"} 96.0'
    assert line in metrics
