"""Which blocks a replica is presumed to hold, without being told: the engine's own cache rule, replayed.

vLLM (v1/core/block_pool.py) keeps one LRU queue of free blocks, frees a request's blocks tail first, and evicts from
the head of the queue. So the head of a prompt outlives its tail, whatever it shares it with. Here the same order is
kept in one dict: touched last stands last, and within one request the head stands after its tail. Every ancestor of a
block thus stands behind it, so that what is held is always closed under prefixes and a depth is found by bisection.
"""

from __future__ import annotations

from itertools import islice, repeat
from typing import TYPE_CHECKING

from router.index.gallop import leading

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


OPEN = 0
"""The last whole block of a prompt that is not answered yet."""
ENDED = 1
"""A block of one request's answer, from which none went on."""
SHARED = 2
"""Requests went on from here, or several ended here."""


class Residency:
    """The presumed cache of one replica. Keys are vLLM's block hashes, their low 64 bits.

    `capacity`: blocks, the engine's num_gpu_blocks - 1 (one is its null block). Memory: about 100 bytes a block.
    """

    __slots__ = ("_held", "_records", "_unnamed", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a replica holds at least one block, not {capacity}")
        self.capacity = capacity
        # key -> how requests ended here or went on (the low two bits), and the record that touched it last (the rest).
        # Oldest first.
        self._held: dict[int, int] = {}
        self._records = 0
        self._unnamed = 0  # the last of the numbers that stand for blocks of no known name: below all hashes

    def __len__(self) -> int:
        return len(self._held)

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a chain are held. Gallops, then bisects: O(log n) look-ups."""
        return leading(keys, self._held)

    def ends_a_turn(self, key: int) -> bool:
        """Whether one request was answered in this block and nothing went on from it: a conversation waits here."""
        return self._held.get(key, OPEN) & 3 == ENDED

    def record(self, keys: Sequence[int], *, ended: bool = False, beyond: int = 0, partial: bool = False) -> None:
        """A request with these blocks was given to the replica: they are held now, and the most recently used.

        `ended`: it has been answered; the blocks of the answer, as far as they are known, are among them. `beyond`: so
        many full ones of it are not; they take room all the same, and as the tail they are the first to go. `partial`:
        there is a last block that is not full. It is never found again, but takes room until the request is over.
        """
        held = self._held
        self._records += 1
        stamp = self._records << 2
        room = max(1, self.capacity - partial)
        keys = keys[:room]
        for _ in range(min(beyond, room - len(keys))):
            self._unnamed -= 1
            held[self._unnamed] = stamp | SHARED
        if not keys:
            self._evict(room)
            return
        before = held.pop(keys[-1], None)
        state = OPEN if before is None else before & 3
        if before is not None and state == OPEN and not ended:
            state = SHARED  # several wait here, and none of them may take it back
        if ended:
            # Two turns that end in one block are two conversations, or too short to tell from one another.
            state = ENDED if state == OPEN else SHARED
        held[keys[-1]] = stamp | state
        # Thousands of them for a long prompt, and so without a loop of Python's: out they go, and in again at the end.
        others = keys[-2::-1]
        states = list(map(held.pop, others, repeat(OPEN)))
        held.update(zip(others, repeat(stamp | SHARED)))
        if ended:
            # Blocks of the answer itself: a next turn whose text tokenizes differently may part from it in its midst.
            held.update([(key, stamp | ENDED) for key, state in zip(others, states, strict=True) if state & 3 == OPEN])
        self._evict(room)

    def presume(self, keys: Iterable[int]) -> None:
        """These blocks, children before their parents, are held too, and older than all that is."""
        older = dict.fromkeys(keys, SHARED)
        for key in self._held:
            older.pop(key, None)
        self._held = older | self._held
        self.resize(self.capacity)

    def forget(self, keys: Sequence[int]) -> None:
        """These blocks, the end of a chain and all that its request added, were not computed after all.

        What another request has recorded since, and so waits for, stays: taking it would leave a hole before that one's
        own blocks.
        """
        held = self._held
        if not keys or held.get(keys[-1], OPEN) & 3 != OPEN:  # it was answered, or others wait here too
            return
        stamp = held.get(keys[-1], -1) >> 2
        for key in reversed(keys):
            if held.get(key, stamp << 2) >> 2 != stamp:
                break
            held.pop(key, None)

    def drop(self, keys: Iterable[int]) -> None:
        """The engine says that it holds these no more."""
        for key in keys:
            self._held.pop(key, None)

    def resize(self, capacity: int) -> None:
        """The engine told its pool. The oldest go if it is smaller than was presumed."""
        self.capacity = capacity
        self._evict(capacity)

    def _evict(self, room: int) -> None:
        """The oldest, down to `room` blocks."""
        surplus = len(self._held) - room
        if surplus > 0:
            for key in list(islice(self._held, surplus)):
                del self._held[key]

    def clear(self) -> None:
        self._held.clear()
