"""Which blocks a replica is presumed to hold, without being told: the engine's own cache rule, replayed.

vLLM (v1/core/block_pool.py) keeps one LRU queue of free blocks, frees a request's blocks tail first, and evicts from
the head of the queue. So the head of a prompt outlives its tail, whatever it shares it with.

How it is kept, by runs of blocks, is in runs.py, and in native.c where that is compiled.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from router.index.runs import Runs
from router.prompt.blocks import bare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Held(Protocol):
    """`Runs`, in either language."""

    def __len__(self) -> int: ...
    def match(self, keys: array[int], /) -> tuple[int, bool]: ...
    def record(self, keys: array[int], room: int, ended: bool, beyond: int, /) -> None: ...
    def add(self, start: int, keys: array[int], /) -> None: ...
    def runs(self) -> list[tuple[int, list[int], int, int]]: ...
    def forget(self, keys: array[int], /) -> None: ...
    def drop(self, keys: array[int], /) -> None: ...
    def evict(self, room: int, /) -> None: ...
    def clear(self) -> None: ...


_Kept: Callable[[], Held]
try:
    from router.index.native import Runs as _Kept
except ImportError:  # it is not compiled
    _Kept = Runs


class Residency:
    """The presumed cache of one replica. Keys are vLLM's block hashes, their low 64 bits.

    `capacity`: blocks, the engine's num_gpu_blocks - 1 (one is its null block). Memory: 8 bytes a block, and about
    400 a run (100 in C): as much for each block where most prompts have but one of their own.
    """

    __slots__ = ("_held", "capacity")

    def __init__(self, capacity: int, held: Held | None = None) -> None:
        """`held`: what keeps it, empty. Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"a replica holds at least one block, not {capacity}")
        self.capacity = capacity
        self._held = _Kept() if held is None else held

    def __len__(self) -> int:
        return len(self._held)

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a chain are held."""
        return self.match(keys)[0]

    def match(self, keys: Sequence[int]) -> tuple[int, bool]:
        """How many leading blocks of a chain are held; and whether one request was answered in the last of these and
        nothing went on from it: a conversation waits here. O(runs log n)."""
        return self._held.match(bare(keys))

    def record(self, keys: Sequence[int], *, ended: bool = False, beyond: int = 0, partial: bool = False) -> None:
        """A request with these blocks was given to the replica: they are held now, and the most recently used.

        `ended`: it has been answered; the blocks of the answer, as far as they are known, are among them. `beyond`: so
        many full ones of it are not; they take room all the same, and as the tail they are the first to go. `partial`:
        there is a last block that is not full. It is never found again, but takes room until the request is over.
        O(runs) for what is held, O(n) for what is new.
        """
        room = self.capacity - 1 if partial and self.capacity > 1 else self.capacity
        self._held.record(bare(keys), room, ended, min(beyond, room))

    def presume(self, links: Iterable[tuple[int, int | None]]) -> None:
        """These blocks, each with its parent and after it, are all that is held, and older than whatever comes."""
        self._held.clear()
        depths: dict[int, int] = {}
        tails: dict[int | None, list[int]] = {}
        chains: list[tuple[int, list[int]]] = []
        for key, parent in links:
            depth = 0 if parent is None else depths.get(parent, -1) + 1
            if parent is not None and not depth:
                continue  # nothing leads to it
            depths[key] = depth
            chain = tails.pop(parent, None)
            if chain is None:
                chain = []
                chains.append((depth, chain))
            chain.append(key)
            tails[key] = chain
        for start, chain in reversed(chains):
            self._held.add(start, array("Q", chain))
        self._held.evict(self.capacity)

    def forget(self, keys: Sequence[int]) -> None:
        """These blocks, the end of a chain and all that its request added, were not computed after all.

        What another request has recorded since, and so waits for, stays: taking it would leave a hole before that one's
        own blocks.
        """
        self._held.forget(bare(keys))

    def drop(self, keys: Iterable[int]) -> None:
        """The engine says that it holds these no more."""
        self._held.drop(array("Q", keys))

    def resize(self, capacity: int) -> None:
        """The engine told its pool. The oldest go if it is smaller than was presumed."""
        self.capacity = capacity
        self._held.evict(capacity)

    def clear(self) -> None:
        self._held.clear()
