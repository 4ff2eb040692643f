from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.memory import Index, Match
from router.index.residency import Residency


def linear_depth(residency: Residency, keys: list[int]) -> int:
    depth = 0
    while depth < len(keys) and residency.depth(keys[: depth + 1]) == depth + 1:
        depth += 1
    return depth


def test_the_tail_goes_first_and_a_shared_head_last() -> None:
    cache = Residency(6)
    cache.record([1, 2, 3, 4])
    cache.record([1, 2, 5, 6])
    assert (cache.depth([1, 2, 3, 4]), cache.depth([1, 2, 5, 6]), len(cache)) == (4, 4, 6)
    cache.record([7])
    assert cache.depth([1, 2, 3, 4]) == 3  # 4 was the oldest tail
    cache.record([8, 9])
    assert cache.depth([1, 2, 3, 4]) == 2
    assert cache.depth([1, 2, 5, 6]) == 3
    assert len(cache) == 6


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    cache = Residency(3)
    cache.record([1, 2, 3, 4, 5])
    assert cache.depth([1, 2, 3, 4, 5]) == 3
    assert len(cache) == 3


def test_a_turn_is_gone_on_with_once() -> None:
    cache = Residency(100)
    cache.record([1, 2])
    assert not cache.ends_a_turn(2)  # not answered yet: whoever matches here shares the prompt, not its past
    cache.record([1, 2, 3], ended=True)
    assert cache.ends_a_turn(3)
    assert not cache.ends_a_turn(1)
    cache.record([1, 2, 3, 4])
    assert not cache.ends_a_turn(3)
    cache.record([1, 2, 3, 4], ended=True)
    cache.record([1, 2, 3, 4], ended=True)
    assert not cache.ends_a_turn(4)  # two ended here


def test_a_turn_may_part_from_the_answer_in_its_midst() -> None:
    cache = Residency(100)
    cache.record([1, 2])
    cache.record([1, 2, 3, 4, 5], ended=True)
    assert [cache.ends_a_turn(key) for key in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    cache.record([1, 2, 3, 9])
    assert [cache.ends_a_turn(key) for key in (1, 2, 3, 4, 5)] == [False, False, False, True, True]


def test_forget_and_resize() -> None:
    cache = Residency(100)
    cache.record([1, 2, 3, 4])
    cache.forget([3, 4])
    assert cache.depth([1, 2, 3, 4]) == 2
    cache.record([5, 6])
    cache.resize(3)
    assert (len(cache), cache.depth([1, 2]), cache.depth([5, 6])) == (3, 1, 2)
    with pytest.raises(ValueError):
        Residency(0)


paths = st.lists(st.integers(0, 2), min_size=0, max_size=12)


def keys_of(path: list[int]) -> list[int]:
    """Prefix-chained keys, as hashes are: equal keys are equal prefixes."""
    keys, key = [], 1
    for step in path:
        key = key * 3 + step + 1
        keys.append(key)
    return keys


@given(st.integers(1, 30), st.lists(st.tuples(paths, st.booleans()), max_size=60), paths)
def test_what_is_held_is_closed_under_prefixes_and_bounded(
    capacity: int, requests: list[tuple[list[int], bool]], probe: list[int]
) -> None:
    cache = Residency(capacity)
    for path, ended in requests:
        cache.record(keys_of(path), ended=ended)
        assert len(cache) <= capacity
        assert cache.depth(keys_of(path)) == min(len(path), capacity)
    held = cache._held
    for key in held:
        parent = (key - 1) // 3
        assert parent <= 1 or parent in held
    # Galloping finds what walking finds.
    keys = keys_of(probe)
    walked = next((i for i, key in enumerate(keys) if key not in held), len(keys))
    assert cache.depth(keys) == walked


def test_what_a_sibling_recorded_since_is_not_forgotten() -> None:
    cache = Residency(100)
    cache.record([1, 2, 3, 4])
    cache.record([1, 2, 3, 9, 10])
    cache.forget([3, 4])  # the first was refused: only its own tail goes
    assert (cache.depth([1, 2, 3, 4]), cache.depth([1, 2, 3, 9, 10])) == (3, 5)
    cache.forget([9, 10])
    assert cache.depth([1, 2, 3, 9, 10]) == 3
    cache.forget([])
    cache.forget([77])
    assert len(cache) == 3


@settings(max_examples=400)
@given(
    st.lists(st.tuples(paths, st.sampled_from(["record", "answer", "forget"]), st.integers(0, 9)), max_size=40), paths
)
def test_forgetting_leaves_no_hole(steps: list[tuple[list[int], str, int]], probe: list[int]) -> None:
    cache = Residency(1000)
    added: list[list[int]] = []
    for path, what, which in steps:
        keys = keys_of(path)
        if what == "forget" and added:
            cache.forget(added.pop(which % len(added)))
        else:
            added.append(keys[cache.depth(keys) :])
            cache.record(keys, ended=what == "answer")
    held = cache._held
    for key in held:
        parent = (key - 1) // 3
        assert parent <= 1 or parent in held
    keys = keys_of(probe)
    assert cache.depth(keys) == next((i for i, key in enumerate(keys) if key not in held), len(keys))


def test_the_index_knows_replicas_by_name() -> None:
    index = Index()
    index.record("nobody", [1])
    assert index.match("nobody", [1]) == Match(0, False)
    index.size("a", 10)
    index.size("b", 10)
    index.record("a", [1, 2, 3])
    index.record("a", [1, 2, 3], ended=True)
    assert index.match("a", [1, 2, 3, 4]) == Match(3, True)
    assert index.match("a", [1, 2, 9]) == Match(2, False)
    assert index.match("b", [1, 2, 3]) == Match(0, False)
    assert index.match("a", []) == Match(0, False)
    index.restart("a")
    assert (index.match("a", [1, 2, 3]), index.blocks("a"), "a" in index) == (Match(0, False), 0, True)
    index.remove("a")
    assert "a" not in index


def test_5000_distinct_prompts_stay_within_the_pool() -> None:
    index = Index()
    index.size("a", 1000)
    for i in range(5000):
        index.record("a", range(i * 1000, i * 1000 + 50))
    assert index.blocks("a") == 1000


def test_a_block_that_is_not_full_takes_room_while_the_request_runs() -> None:
    cache = Residency(4)
    cache.record([1, 2, 3, 4])
    assert cache.depth([1, 2, 3, 4]) == 4
    cache.record([1, 2, 3, 4], partial=True)
    assert cache.depth([1, 2, 3, 4]) == 3
    cache.record([5], partial=True)
    assert (cache.depth([1, 2, 3]), cache.depth([5]), len(cache)) == (2, 1, 3)


def test_blocks_of_no_known_name_take_room_and_are_never_found() -> None:
    cache = Residency(6)
    cache.record([1, 2, 3])
    cache.record([7, 8], ended=True, beyond=2)
    assert len(cache) == 6  # 3 was the oldest tail
    assert (cache.depth([1, 2, 3]), cache.depth([7, 8])) == (2, 2)
    cache.record([9, 10, 11])
    # 2 and 1 went, and of the answer that nobody can name the tail.
    assert (cache.depth([1, 2]), cache.depth([7, 8]), len(cache)) == (0, 2, 6)
    cache.record([], beyond=100)
    assert len(cache) == 6
    assert cache.depth([9]) == 0
