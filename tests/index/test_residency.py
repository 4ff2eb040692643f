from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.announcement import BLOCK_BYTES
from router.index import runs
from router.index.memory import Index, Match
from router.index.residency import Held, Residency
from router.index.runs import ENDED, OPEN, UNNAMED, Runs
from tests.native import compiled

Kept = Callable[..., Held]


@pytest.fixture(scope="module", params=["runs.py", "native.c"])
def kept(request: pytest.FixtureRequest) -> Kept:
    """What makes an empty one."""
    return Runs if request.param == "runs.py" else request.getfixturevalue("native")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    source = Path(runs.__file__).with_name("native.c")
    directory = tmp_path_factory.mktemp("native")
    return compiled("router.index.native", source, directory).Runs  # type: ignore[no-any-return]


def linear_depth(residency: Residency, keys: list[int]) -> int:
    depth = 0
    while depth < len(keys) and residency.depth(keys[: depth + 1]) == depth + 1:
        depth += 1
    return depth


def test_the_tail_goes_first_and_a_shared_head_last(kept: Kept) -> None:
    cache = Residency(6, kept())
    cache.record([1, 2, 3, 4])
    cache.record([1, 2, 5, 6])
    assert (cache.depth([1, 2, 3, 4]), cache.depth([1, 2, 5, 6]), len(cache)) == (4, 4, 6)
    cache.record([7])
    assert cache.depth([1, 2, 3, 4]) == 3  # 4 was the oldest tail
    cache.record([8, 9])
    assert cache.depth([1, 2, 3, 4]) == 2
    assert cache.depth([1, 2, 5, 6]) == 3
    assert len(cache) == 6


def test_a_prompt_longer_than_the_pool_keeps_its_head(kept: Kept) -> None:
    cache = Residency(3, kept())
    cache.record([1, 2, 3, 4, 5])
    assert cache.depth([1, 2, 3, 4, 5]) == 3
    assert len(cache) == 3


def test_a_turn_is_gone_on_with_once(kept: Kept) -> None:
    cache = Residency(100, kept())
    cache.record([1, 2])
    assert cache.match([1, 2]) == (2, False)  # not answered yet: who matches here shares the prompt, not its past
    cache.record([1, 2, 3], ended=True)
    assert cache.match([1, 2, 3]) == (3, True)
    assert cache.match([1]) == (1, False)
    cache.record([1, 2, 3, 4])
    assert cache.match([1, 2, 3]) == (3, False)
    cache.record([1, 2, 3, 4], ended=True)
    cache.record([1, 2, 3, 4], ended=True)
    assert cache.match([1, 2, 3, 4]) == (4, False)  # two ended here


def test_a_turn_may_part_from_the_answer_in_its_midst(kept: Kept) -> None:
    cache = Residency(100, kept())
    cache.record([1, 2])
    cache.record([1, 2, 3, 4, 5], ended=True)
    assert held(cache) == {1: False, 2: True, 3: True, 4: True, 5: True}
    cache.record([1, 2, 3, 9])
    assert held(cache) == {1: False, 2: False, 3: False, 4: True, 5: True, 9: False}


def test_forget_and_resize(kept: Kept) -> None:
    cache = Residency(100, kept())
    cache.record([1, 2, 3, 4])
    cache.forget([3, 4])
    assert cache.depth([1, 2, 3, 4]) == 2
    cache.record([5, 6])
    cache.resize(3)
    assert (len(cache), cache.depth([1, 2]), cache.depth([5, 6])) == (3, 1, 2)
    with pytest.raises(ValueError):
        Residency(0)


def held(cache: Residency) -> dict[int, bool]:
    """All blocks, and of which a conversation waits there."""
    return {
        key: state == ENDED and place >= turn
        for _, keys, state, turn in cache._held.runs()
        for place, key in enumerate(keys)
        if key
    }


def consistent(cache: Residency) -> None:
    """What is kept beside the order of runs says the same as that."""
    told = cache._held.runs()
    named = [key for _, keys, state, _ in told if state != UNNAMED for key in keys]
    assert all(keys for _, keys, _, _ in told)
    assert len(named) == len(set(named))
    assert len(cache) == sum(len(keys) for _, keys, _, _ in told)
    kept = cache._held
    if not isinstance(kept, Runs):
        return  # to be the same as these is tested beside
    assert kept._named == len(named)
    there = [run for run in kept._order.values() if run.state != UNNAMED]
    assert {run.keys[0]: id(run) for run in there} == {key: id(run) for key, run in kept._heads.items()}
    ends = {run.keys[-1]: id(run) for run in there if run.state == OPEN and len(run.keys) > run.turn}
    assert {key: id(run) for key, run in kept._open.items()} == ends
    if kept._where is not None:
        assert {key: id(run) for key, run in kept._where.items()} == {key: id(run) for run in there for key in run.keys}


class Naive:
    """The same rule, block by block: what is used goes to the end of one queue, its tail before its head."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: dict[int, str] = {}  # how requests ended here or went on; the oldest first
        self.unnamed = 0
        self.records: dict[int, int] = {}  # which one used a block last
        self.count = 0

    def record(self, keys: list[int], ended: bool, beyond: int, partial: bool) -> None:
        self.count += 1
        room = max(1, self.capacity - partial)
        keys = keys[:room]
        for _ in range(min(beyond, room - len(keys))):
            self.unnamed -= 1
            self.queue[self.unnamed] = "shared"
        for place in range(len(keys) - 1, -1, -1):
            before = self.queue.pop(keys[place], "new")
            if ended:
                state = "ended" if before in ("new", "open") else "shared"
            elif place == len(keys) - 1:
                state = {"new": "open", "ended": "ended"}.get(before, "shared")
            else:
                state = "shared"
            self.queue[keys[place]] = state
            self.records[keys[place]] = self.count
        self.resize(room)

    def forget(self, keys: list[int]) -> None:
        if keys and self.queue.get(keys[-1]) == "open":
            last = self.records[keys[-1]]
            for key in reversed(keys):
                if self.records[key] != last:
                    break
                self.queue.pop(key, None)

    def resize(self, room: int) -> None:
        while len(self.queue) > room:
            del self.queue[next(iter(self.queue))]


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
    kept: Kept, capacity: int, requests: list[tuple[list[int], bool]], probe: list[int]
) -> None:
    cache = Residency(capacity, kept())
    for path, ended in requests:
        cache.record(keys_of(path), ended=ended)
        assert len(cache) <= capacity
        assert cache.depth(keys_of(path)) == min(len(path), capacity)
    there = held(cache)
    for key in there:
        parent = (key - 1) // 3
        assert parent <= 1 or parent in there
    keys = keys_of(probe)
    assert cache.depth(keys) == next((i for i, key in enumerate(keys) if key not in there), len(keys))
    consistent(cache)


steps = st.tuples(
    st.sampled_from(["record", "record", "answer", "answer", "forget", "resize"]),
    paths,
    st.integers(0, 3),
    st.booleans(),
)


@pytest.mark.parametrize("most_runs", [1, 32])
@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.lists(steps, max_size=60))
def test_runs_keep_the_order_that_blocks_have_one_by_one(
    kept: Kept, most_runs: int, capacity: int, steps: list[tuple[str, list[int], int, bool]]
) -> None:
    cache, naive = Residency(capacity, kept(most_runs)), Naive(capacity)
    waiting: dict[int, list[int]] = {}  # what the last prompt that ends in a block has added
    for what, path, number, partial in steps:
        keys = keys_of(path)
        if what == "forget":
            added = waiting.pop(keys[-1], []) if keys else []
            cache.forget(added)
            naive.forget(added)
        elif what == "resize":
            cache.resize(capacity + number)
            naive.capacity = capacity + number
            naive.resize(naive.capacity)
        else:
            if keys:
                waiting[keys[-1]] = keys[cache.depth(keys) :]
            cache.record(keys, ended=what == "answer", beyond=number, partial=partial)
            naive.record(keys, what == "answer", number, partial)
        assert len(cache) == len(naive.queue)
        there = held(cache)
        assert there == {key: state == "ended" for key, state in naive.queue.items() if key > 0}
        depth = next((i for i, key in enumerate(keys) if key not in there), len(keys))
        assert cache.match(keys) == (depth, depth > 0 and there[keys[depth - 1]])
        consistent(cache)


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=9), st.sampled_from(["record", "answer", "forget", "drop"]))
    ),
)
def test_names_that_are_no_hashes_do_no_harm(kept: Kept, capacity: int, steps: list[tuple[list[int], str]]) -> None:
    # One name in several depths, or twice in one chain, and holes wherever the engine says.
    cache = Residency(capacity, kept())
    for keys, what in steps:
        if what in ("record", "answer"):
            cache.record(keys, ended=what == "answer")
        elif what == "forget":
            cache.forget(keys)
        else:
            cache.drop(keys)
        assert len(cache) <= capacity
        cache.match(keys)
    cache.record(list(range(100, 100 + capacity)))
    assert held(cache).keys() == set(range(100, 100 + capacity))
    consistent(cache)


@settings(max_examples=400)
@given(
    st.integers(4, 30),
    st.lists(st.tuples(paths, st.sampled_from(["record", "record", "answer", "drop"]), st.integers(0, 9)), max_size=60),
)
def test_what_the_engine_drops_is_not_found(kept: Kept, capacity: int, steps: list[tuple[list[int], str, int]]) -> None:
    cache = Residency(capacity, kept())
    for path, what, which in steps:
        keys = keys_of(path)
        if what == "drop":
            gone = keys[which:]
            cache.drop(gone)
            assert not held(cache).keys() & set(gone)
            assert cache.depth(keys) <= which
        else:
            cache.record(keys, ended=what == "answer")
            assert cache.depth(keys) == min(len(keys), capacity)
        assert len(cache) <= capacity
        consistent(cache)


names = st.lists(st.integers(0, 9), max_size=9)


@settings(max_examples=600, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 25),
    st.lists(
        st.tuples(
            st.sampled_from(["record", "record", "answer", "forget", "drop", "add", "evict", "clear"]),
            st.one_of(paths.map(keys_of), names),
            st.integers(0, 3),
        ),
        max_size=60,
    ),
)
def test_in_c_it_is_the_same_step_by_step(
    native: Kept, most: int, room: int, steps: list[tuple[str, list[int], int]]
) -> None:
    ours, theirs = Runs(most), native(most)
    for what, path, number in steps:
        keys = array("Q", path)
        for each in (ours, theirs):
            if what in ("record", "answer"):
                each.record(keys, room, what == "answer", number)
            elif what == "forget":
                each.forget(keys[number:])
            elif what == "drop":
                each.drop(keys[number:])
            elif what == "add":
                if keys and each.match(keys)[0] == 0:
                    each.add(number, keys)
            elif what == "evict":
                each.evict(room - number)
            elif number == 0:
                each.clear()
        assert theirs.runs() == ours.runs()
        assert (len(theirs), theirs.match(keys)) == (len(ours), ours.match(keys))


def test_in_c_it_takes_arrays_of_keys_alone(native: Kept) -> None:
    held, keys = native(), array("Q", [1])
    for wrong in ([1], b"12345678", array("q", [1]), array("I", [1]), 1):
        with pytest.raises((TypeError, BufferError)):
            held.match(wrong)  # type: ignore[arg-type]
    for arguments in ((keys, 0, False, 0), (keys, 1, False), (keys, 1, False, 0, 0)):
        with pytest.raises((TypeError, ValueError)):
            held.record(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        held.add(0, array("Q"))
    with pytest.raises(ValueError, match="at least one"):
        native(0)
    assert (len(held), held.runs()) == (0, [])


def test_what_the_engine_dropped_is_held_again_when_it_is_used_again(kept: Kept) -> None:
    cache = Residency(100, kept())
    cache.record([1, 2, 3, 4, 5])
    cache.record([1, 2, 8, 9])
    cache.drop([4])
    assert (cache.depth([1, 2, 3, 4, 5]), len(cache)) == (3, 5)  # 5 is of no use
    cache.drop([2])
    assert (cache.depth([1, 2]), cache.depth([1, 2, 8, 9]), cache.depth([1, 2, 3])) == (1, 1, 1)
    cache.record([1, 2, 3, 4])
    assert held(cache).keys() == {1, 2, 3, 4, 8, 9}
    assert cache.depth([1, 2, 8, 9]) == 4  # nothing was said of these two
    consistent(cache)


def test_a_few_runs_are_all_that_is_kept_of_long_conversations(kept: Kept) -> None:
    cache = Residency(100_000, kept())
    system = list(range(1, 200))
    for turn in range(1, 20):
        for conversation in range(1, 11):
            begin = conversation * 10_000
            keys = system + list(range(begin, begin + turn * 100))
            cache.record(keys)
            cache.record([*keys, begin + turn * 100], ended=True)
    assert len(cache._held.runs()) <= 12


def test_what_is_presumed_goes_first_its_tails_before_its_heads(kept: Kept) -> None:
    cache = Residency(8, kept())
    # 1 - 2 - 3 - 4, and 5 from 2 on; nothing leads to 77.
    cache.presume([(1, None), (2, 1), (3, 2), (4, 3), (5, 2), (77, 76)])
    assert (len(cache), cache.depth([1, 2, 3, 4]), cache.depth([1, 2, 5])) == (5, 4, 3)
    cache.record([6, 7, 8, 9, 10])
    assert (cache.depth([1, 2, 5]), cache.depth([1, 2, 3, 4])) == (2, 3)
    cache.record([1, 2, 11])
    assert (cache.depth([1, 2, 11]), cache.depth([1, 2, 3]), cache.depth([6, 7, 8, 9, 10])) == (3, 2, 5)


def test_what_a_sibling_recorded_since_is_not_forgotten(kept: Kept) -> None:
    cache = Residency(100, kept())
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
def test_forgetting_leaves_no_hole(kept: Kept, steps: list[tuple[list[int], str, int]], probe: list[int]) -> None:
    cache = Residency(1000, kept())
    added: list[list[int]] = []
    for path, what, which in steps:
        keys = keys_of(path)
        if what == "forget" and added:
            cache.forget(added.pop(which % len(added)))
        else:
            added.append(keys[cache.depth(keys) :])
            cache.record(keys, ended=what == "answer")
    there = held(cache)
    for key in there:
        parent = (key - 1) // 3
        assert parent <= 1 or parent in there
    keys = keys_of(probe)
    assert cache.depth(keys) == next((i for i, key in enumerate(keys) if key not in there), len(keys))
    consistent(cache)


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
        index.record("a", list(range(i * 1000, i * 1000 + 50)))
    assert index.blocks("a") == 1000


def test_a_block_that_is_not_full_takes_room_while_the_request_runs(kept: Kept) -> None:
    cache = Residency(4, kept())
    cache.record([1, 2, 3, 4])
    assert cache.depth([1, 2, 3, 4]) == 4
    cache.record([1, 2, 3, 4], partial=True)
    assert cache.depth([1, 2, 3, 4]) == 3
    cache.record([5], partial=True)
    assert (cache.depth([1, 2, 3]), cache.depth([5]), len(cache)) == (2, 1, 3)


def test_blocks_of_no_known_name_take_room_and_are_never_found(kept: Kept) -> None:
    cache = Residency(6, kept())
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


@pytest.mark.parametrize("own", [1, 8, 200])
@pytest.mark.parametrize("ended", [False, True])
def test_no_block_takes_more_than_is_told_at_the_start(kept: Kept, own: int, ended: bool) -> None:
    chance, blocks = Random(own), 20_000
    tracemalloc.start()
    try:
        cache = Residency(blocks, kept())
        for _ in range(3 * blocks // own):
            keys = array("Q", [7, *(chance.getrandbits(64) for _ in range(own))])
            cache.record(keys)
            if ended:
                cache.record(keys, ended=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache) == blocks
    assert most <= BLOCK_BYTES * blocks
