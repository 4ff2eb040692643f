"""The blocks that an engine says it holds in one KV cache group, counted, and how deep a chain they make. No I/O.

The same block may be stored twice and is then held until it was removed twice (vLLM does not merge equal blocks).

A depth is found by bisection, which is right only while every block's parent is held too. Engines free tails first, so
that this is nearly always so; but nothing promises it. So each block knows its parent, and a block that is missing
though children of it are held is kept in a set of holes: while that is empty, bisection is exact; else the leading
blocks are checked against it.

Most blocks have one child. Only those with none (a leaf for each chain) or several are listed apart, which keeps a
block at about 100 bytes.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from router.index.gallop import leading

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Held:
    """Blocks by key. `blocks`: with every copy counted."""

    __slots__ = ("_copies", "_forks", "_holes", "_leaves", "_parents", "blocks")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.blocks = 0
        self._parents: dict[int, int | None] = {}
        self._copies: dict[int, int] = {}  # of those held more than once
        self._leaves: dict[int, int] = {}  # held, no child held. To itself: the one object that stands for this number
        self._forks: dict[int, int] = {}  # held, more than one child held: how many
        self._holes: dict[int, int] = {}  # not held, but so many children of it are

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: int) -> bool:
        return key in self._parents

    def links(self) -> Iterable[tuple[int, int | None]]:
        """Each block and its parent, which comes before it, as long as it was stored first."""
        return self._parents.items()

    def store(self, keys: Iterable[int], parent: int | None) -> None:
        """A chain of blocks that goes on from `parent`; None: from the root."""
        parents, leaves = self._parents, self._leaves
        for key in keys:
            self.blocks += 1
            if key in parents:
                self._copies[key] = self._copies.get(key, 1) + 1
            else:
                if parent is not None:
                    parent = leaves.get(parent, parent)
                    self._gain(parent)
                parents[key] = parent
                children = self._holes.pop(key, 0)
                if not children:
                    leaves[key] = key
                elif children > 1:
                    self._forks[key] = children
            parent = key

    def remove(self, key: int) -> bool:
        """One copy of a block. Whether that was the last one."""
        copies = self._copies.get(key)
        if copies is not None:
            self.blocks -= 1
            if copies == 2:
                del self._copies[key]
            else:
                self._copies[key] = copies - 1
            return False
        if key not in self._parents:
            return False
        self.blocks -= 1
        parent = self._parents.pop(key)
        if self._leaves.pop(key, None) is None:
            self._holes[key] = self._forks.pop(key, 1)
        if parent is not None:
            self._lose(parent)
        return True

    def _gain(self, parent: int) -> None:
        """A child of `parent` is held from now on."""
        if self._leaves.pop(parent, None) is not None:
            return
        if parent in self._parents:
            self._forks[parent] = self._forks.get(parent, 1) + 1
        else:
            self._holes[parent] = self._holes.get(parent, 0) + 1

    def _lose(self, parent: int) -> None:
        if parent not in self._parents:
            self._count_down(self._holes, parent, 0)
        elif parent in self._forks:
            self._count_down(self._forks, parent, 1)
        else:
            self._leaves[parent] = parent

    @staticmethod
    def _count_down(counts: dict[int, int], key: int, unlisted: int) -> None:
        left = counts[key] - 1
        if left == unlisted:
            del counts[key]
        else:
            counts[key] = left

    def run(self, keys: Sequence[int]) -> int:
        """How many leading keys are held, one by one: for a few."""
        parents = self._parents
        for place, key in enumerate(keys):
            if key not in parents:
                return place
        return len(keys)

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a chain are held, exactly. O(log n) look-ups while there is no hole."""
        parents = self._parents
        low = leading(keys, parents)
        if self._holes and low:
            found = keys[:low]
            if not self._holes.keys().isdisjoint(found):
                return sum(1 for _ in takewhile(parents.__contains__, found))
        return low
