"""Counted blocks and exact depths, beside a model that does it the slow way."""

from __future__ import annotations

import collections
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.held import Held


class Naive:
    def __init__(self) -> None:
        self.copies: collections.Counter[int] = collections.Counter()

    def depth(self, keys: list[int]) -> int:
        depth = 0
        while depth < len(keys) and self.copies[keys[depth]]:
            depth += 1
        return depth


def test_a_block_stored_twice_goes_when_it_was_removed_twice() -> None:
    held = Held()
    held.store([1, 2], None)
    held.store([1, 2], None)
    assert (held.blocks, len(held)) == (4, 2)
    assert held.remove(2) is False
    assert held.depth([1, 2]) == 2
    assert held.remove(2) is True
    assert held.depth([1, 2]) == 1
    assert held.remove(2) is False
    assert held.blocks == 2


def test_a_hole_ends_the_depth_wherever_bisection_looks() -> None:
    keys = list(range(1, 101))
    for hole in (1, 2, 50, 63, 64, 99, 100):
        held = Held()
        held.store(keys, None)
        assert held.remove(hole)
        assert held.depth(keys) == hole - 1
        held.store([hole], hole - 1 or None)
        assert held.depth(keys) == 100


def test_blocks_without_their_parents_make_no_depth() -> None:
    held = Held()
    held.store([3, 4], 2)
    assert held.depth([1, 2, 3, 4]) == 0
    held.store([1], None)
    assert held.depth([1, 2, 3, 4]) == 1
    held.store([2], 1)
    assert held.depth([1, 2, 3, 4]) == 4


def test_parents_come_before_their_children() -> None:
    held = Held()
    held.store([1, 2, 3], None)
    held.store([4], 2)
    assert list(held.links()) == [(1, None), (2, 1), (3, 2), (4, 2)]


# A tree of chains: node -> parent. Keys are large, as hashes are.
TREE = {0: None} | {node: (node - 1) // 2 for node in range(1, 31)}


def key(node: int | None) -> int | None:
    return None if node is None else (node + 1) << 60 | 7


def chain(node: int | None) -> list[int]:
    keys: list[int] = []
    while node is not None:
        keys.insert(0, key(node) or 0)
        node = TREE[node]
    return keys


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 30)), max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_order_of_events_equals_the_naive_model(steps: list[tuple[str, int]]) -> None:
    held, naive = Held(), Naive()
    for what, node in steps:
        name = key(node) or 0
        if what == "store":
            held.store([name], key(TREE[node]))
            naive.copies[name] += 1
        elif what == "remove":
            assert held.remove(name) is (naive.copies[name] == 1)
            naive.copies[name] = max(0, naive.copies[name] - 1)
        elif node == 0:
            held.clear()
            naive.copies.clear()
        for leaf in range(15, 31):
            assert held.depth(chain(leaf)) == naive.depth(chain(leaf))
    assert held.blocks == sum(naive.copies.values())
    assert len(held) == sum(1 for copies in naive.copies.values() if copies)


def test_long_chains_with_random_holes_equal_the_naive_model() -> None:
    draw = random.Random(5)
    keys = [draw.getrandbits(64) for _ in range(500)]
    for _ in range(50):
        held, naive = Held(), Naive()
        held.store(keys, None)
        naive.copies.update(keys)
        for gone in draw.sample(keys, draw.randint(0, 4)):
            held.remove(gone)
            naive.copies[gone] -= 1
        assert held.depth(keys) == naive.depth(keys)
