"""Which blocks a replica is presumed to hold, without being told: the engine's own cache rule, replayed.

vLLM (v1/core/block_pool.py) keeps one LRU queue of free blocks, frees a request's blocks tail first, and evicts from
the head of the queue. So the head of a prompt outlives its tail, whatever it shares it with. Here the same order is
kept in one dict: touched last stands last, and within one request the head stands after its tail. Every ancestor of a
block thus stands behind it, so that what is held is always closed under prefixes and a depth is found by bisection.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Residency:
    """The presumed cache of one replica. Keys are vLLM's block hashes, their low 64 bits.

    `capacity`: blocks, the engine's num_gpu_blocks - 1 (one is its null block). Memory: about 100 bytes a block.
    """

    __slots__ = ("_continued", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a replica holds at least one block, not {capacity}")
        self.capacity = capacity
        # key -> whether some request went on from this block. Oldest first.
        self._continued: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._continued)

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a chain are held. Gallops, then bisects: O(log n) look-ups."""
        held = self._continued
        low, high = 0, len(keys)  # keys[:low] are held; keys[high] is not, where there is one
        step = 1
        while low + step <= high and keys[low + step - 1] in held:
            low += step
            step *= 2
        high = min(high, low + step - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def is_leaf(self, key: int) -> bool:
        """Whether this held block is where some earlier request ended, and none went on from it."""
        return self._continued.get(key) is False

    def record(self, keys: Sequence[int]) -> None:
        """A request with these blocks was given to the replica: they are held now, and the most recently used."""
        held = self._continued
        keys = keys[: self.capacity]
        if not keys:
            return
        held[keys[-1]] = held.pop(keys[-1], False)
        for key in keys[-2::-1]:
            held.pop(key, None)
            held[key] = True
        surplus = len(held) - self.capacity
        if surplus > 0:
            for key in list(islice(held, surplus)):
                del held[key]

    def forget(self, keys: Sequence[int]) -> None:
        """These blocks, a suffix of a chain, were not computed after all."""
        for key in keys:
            self._continued.pop(key, None)

    def resize(self, capacity: int) -> None:
        """The engine told its pool. The oldest go if it is smaller than was presumed."""
        self.capacity = capacity
        surplus = len(self._continued) - capacity
        if surplus > 0:
            for key in list(islice(self._continued, surplus)):
                del self._continued[key]

    def clear(self) -> None:
        self._continued.clear()
