from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_backend.pool import BlockPool, Cleared, PoolExhaustedError, Removed, Stored
from fake_backend.request import Request


def sequence(pool: BlockPool, keys: list[int], *, unhashed: int = 0) -> Request:
    """A request that holds its blocks, all but the last ``unhashed`` under their keys."""
    request = Request("r", prompt_tokens=1, answer_tokens=1, keys=keys)
    request.blocks = pool.allocate(len(keys))
    pool.register(request, len(keys) - unhashed)
    return request


def test_block_zero_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert pool.usable == 3
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(PoolExhaustedError):
        pool.allocate(1)


def test_a_pool_of_one_block_has_nothing_to_give() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_tail_goes_before_head() -> None:
    pool = BlockPool(4, record=True)
    first = sequence(pool, [10, 11, 12])
    pool.release(first.blocks)
    assert pool.lookup([10, 11, 12], 3) == [1, 2, 3]
    assert pool.allocate(1) == [3]
    assert pool.lookup([10, 11, 12], 3) == [1, 2]
    assert pool.events == [Stored(first, 0, 3), Removed(12)]


def test_blocks_without_content_are_reused_first_tail_before_head() -> None:
    pool = BlockPool(8)
    request = sequence(pool, [10, 11, 12, 13], unhashed=2)
    pool.release(request.blocks)
    # 3 and 4 hold nothing, then come 5..7 that nobody ever used, then what holds a prefix, tail first.
    assert pool.allocate(7) == [4, 3, 5, 6, 7, 2, 1]


def test_a_hit_protects_from_eviction_until_released() -> None:
    pool = BlockPool(3)
    pool.release(sequence(pool, [10, 11]).blocks)
    hit = pool.lookup([10], 1)
    assert pool.evictable(hit) == 1
    pool.touch(hit)
    assert pool.evictable(hit) == 0
    assert pool.allocate(1) == [2]
    with pytest.raises(PoolExhaustedError):
        pool.allocate(1)
    assert pool.lookup([10, 11], 2) == [1]


def test_the_same_content_twice() -> None:
    pool = BlockPool(6, record=True)
    first, second = sequence(pool, [10]), sequence(pool, [10])
    assert (first.blocks, second.blocks) == ([1], [2])
    assert pool.lookup([10], 1) == [1]
    assert pool.cached_keys == 1
    pool.release(first.blocks)
    assert pool.allocate(4) == [3, 4, 5, 1]
    assert pool.lookup([10], 1) == [2]
    assert [event for event in pool.events if isinstance(event, Removed)] == [Removed(10)]


def test_lookup_stops_at_the_first_gap() -> None:
    pool = BlockPool(8)
    sequence(pool, [10])
    sequence(pool, [12])
    assert pool.lookup([10, 11, 12], 3) == [1]


def test_clear_is_refused_while_anything_is_in_use() -> None:
    pool = BlockPool(4, record=True)
    request = sequence(pool, [10])
    assert not pool.clear()
    pool.release(request.blocks)
    assert pool.clear()
    assert pool.lookup([10], 1) == []
    assert pool.events[-1] == Cleared()


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(4, caching=False)
    request = sequence(pool, [10, 11])
    pool.release(request.blocks)
    assert pool.lookup([10, 11], 2) == []
    assert pool.allocate(3) == [2, 1, 3]


@given(
    size=st.integers(2, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(("start", "end", "clear")), st.lists(st.integers(0, 6), max_size=6)), max_size=60
    ),
)
def test_no_block_is_lost_or_owned_twice(size: int, steps: list[tuple[str, list[int]]]) -> None:
    """Whatever is started and ended, every block is either free or referenced as often as it is held."""
    pool = BlockPool(size)
    live: list[Request] = []
    for act, keys in steps:
        if act == "start":
            chain = [hash((tuple(keys[: i + 1]),)) for i in range(len(keys))]
            hit = pool.lookup(chain, max(0, len(chain) - 1))
            assert all(pool.holds(key) for key in chain[: len(hit)])
            if len(chain) - len(hit) > pool.free_blocks - pool.evictable(hit):
                continue
            request = Request("r", 1, 1, chain)
            pool.touch(hit)
            request.registered = len(hit)
            request.blocks = hit + pool.allocate(len(chain) - len(hit))
            pool.register(request, len(chain))
            assert len(set(request.blocks)) == len(request.blocks)
            live.append(request)
        elif act == "end" and live:
            pool.release(live.pop(len(keys) % len(live)).blocks)
        elif act == "clear":
            assert pool.clear() == (not any(request.blocks for request in live))
        held = [block for request in live for block in request.blocks]
        assert 0 not in held
        assert len(set(held)) + pool.free_blocks == pool.usable
        assert pool.cached_keys <= pool.usable
    for request in live:
        pool.release(request.blocks)
    assert sorted(pool.allocate(pool.usable)) == list(range(1, size))
