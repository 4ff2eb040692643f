"""Which blocks a replica is presumed to hold, without being told: the engine's own cache rule, replayed.

vLLM (v1/core/block_pool.py) keeps one LRU queue of free blocks, frees a request's blocks tail first, and evicts from
the head of the queue. So the head of a prompt outlives its tail, whatever it shares it with.

Here blocks that follow one another and were used last by the same request make a run, and the order of use is one of
runs: touched last stands last, and of one request's the head stands after its tail. Every ancestor of a block thus
stands behind it, so that what is held is always closed under prefixes. Runs are found by their first blocks, each
behind the one before it, and how far a prompt goes along with one by bisection: a block's hash names all that stands
before it. To use a long prompt again moves a run or two, not thousands of blocks. A run is divided where a request
parts from it, and goes on with what that one adds.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from router.index.gallop import common

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OPEN: Final = 0
"""The last whole block of a prompt that is not answered yet."""
ENDED: Final = 1
"""A block of one request's answer, from which none went on."""
SHARED: Final = 2
"""Requests went on from here, or several ended here."""

_UNNAMED: Final = 3  # blocks of no known name: they take room and are never found
_ZEROS: Final = array("Q", bytes(8 * 256))

# A path of more runs than this is made one again. Runs come apart one at a time, so that this is paid for seldom.
_MOST_RUNS = 32


class _Run(msgspec.Struct, gc=False, eq=False):
    """Blocks in a row. Of compact parts that the garbage collector need not visit: there may be one for each block. A
    class of our own would cost less to look into once compiled, but be visited where it is not."""

    start: int
    """How many blocks stand before its first, from the root on."""
    keys: array[int]
    """Zeros where they have no name. Never empty while the run is in its order."""
    place: int = 0
    """In the order of use; 0 out of it."""
    state: int = SHARED
    """Of its blocks from `turn` on; those before are SHARED."""
    turn: int = 0
    """Of no meaning where all are SHARED."""


class Residency:
    """The presumed cache of one replica. Keys are vLLM's block hashes, their low 64 bits.

    `capacity`: blocks, the engine's num_gpu_blocks - 1 (one is its null block). Memory: 8 bytes a block, and about
    400 a run: as much for each block where most prompts have but one of their own.
    """

    __slots__ = ("_heads", "_named", "_oldest", "_open", "_order", "_places", "_unnamed", "_where", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a replica holds at least one block, not {capacity}")
        self.capacity = capacity
        self._heads: dict[int, _Run] = {}  # by their first blocks
        self._open: dict[int, _Run] = {}  # those that end in an OPEN block, by that
        self._where: dict[int, _Run] | None = None  # by each block, once an engine has named some that it dropped
        self._order: dict[int, _Run] = {}  # by place, oldest first
        self._places = 0
        self._oldest = 1  # no run has a place before this one
        self._named = 0
        self._unnamed = 0

    def __len__(self) -> int:
        return self._named + self._unnamed

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading blocks of a chain are held."""
        return self.match(keys)[0]

    def match(self, keys: Sequence[int]) -> tuple[int, bool]:
        """How many leading blocks of a chain are held; and whether one request was answered in the last of these and
        nothing went on from it: a conversation waits here."""
        heads, whole = self._heads, len(keys)
        at, ends = 0, False
        while at < whole:
            run = heads.get(keys[at])
            if run is None or run.start != at:
                break
            at += common(run.keys, keys, at)
            ends = _state_at(run, at - 1) == ENDED
        return at, ends

    def record(self, keys: Sequence[int], *, ended: bool = False, beyond: int = 0, partial: bool = False) -> None:
        """A request with these blocks was given to the replica: they are held now, and the most recently used.

        `ended`: it has been answered; the blocks of the answer, as far as they are known, are among them. `beyond`: so
        many full ones of it are not; they take room all the same, and as the tail they are the first to go. `partial`:
        there is a last block that is not full. It is never found again, but takes room until the request is over.
        O(runs) for what is held, O(n) for what is new.
        """
        room = self.capacity - 1 if partial and self.capacity > 1 else self.capacity
        if len(keys) > room:
            keys = keys[:room]
        unnamed = min(beyond, room - len(keys))
        if unnamed:
            self._unnamed += unnamed
            self._touch(_Run(0, _zeros(unnamed), 0, _UNNAMED))
        if keys:
            self._record(keys, ended)
        self._evict(room)

    def _record(self, keys: Sequence[int], ended: bool) -> None:
        whole = len(keys)
        path = self._path(keys)
        there, before = 0, SHARED
        if path:
            there = path[-1].start + len(path[-1].keys)
            before = _state_at(path[-1], there - 1)
        for run in path:
            self._share(run)
        if len(path) > _MOST_RUNS:
            path = [self._joined(path)]
        if there < whole:
            new = array("Q", keys[there:])
            if before == SHARED:
                # Others went on from here, or will: a run that went on with these would soon be divided again.
                path.append(self._new(there, new))
            else:
                path[-1].keys += new
            self._named += len(new)
            if self._where is not None:
                # Where the engine dropped some of what it holds again now, others may still be thought to follow.
                self._lose(new)
                self._find_in(path[-1], new)
        for run in reversed(path):
            self._touch(run)
        last = path[-1]
        if there < whole:
            # Blocks of the answer itself: a next turn whose text tokenizes differently may part from it in its midst.
            last.turn = (there - (before == OPEN) if ended else whole - 1) - last.start
            last.state = ENDED if ended else OPEN
            if not ended:
                self._open[keys[-1]] = last
        elif before == (OPEN if ended else ENDED):
            # Two turns that end in one block are two conversations, or too short to tell from one another. And where
            # several prompts wait, none of them may take it back.
            last.state, last.turn = ENDED, whole - 1 - last.start

    def _path(self, keys: Sequence[int]) -> list[_Run]:
        """The runs of those leading blocks that are held, taken out of the order; all get new places there. The deepest
        last."""
        heads, whole = self._heads, len(keys)
        path: list[_Run] = []
        at = 0
        while at < whole:
            run = heads.get(keys[at])
            if run is None or run.start != at:
                break
            there = common(run.keys, keys, at)
            if there < len(run.keys):
                self._part(run, there)
            else:
                self._order.pop(run.place, None)
            run.place = 0
            path.append(run)
            at += there
        return path

    def _new(self, start: int, keys: array[int]) -> _Run:
        run = _Run(start, keys)
        self._heads[keys[0]] = run
        return run

    def _part(self, run: _Run, count: int) -> None:
        """Its first blocks are a run of their own from now on. The others keep its place."""
        rest = self._new(run.start + count, run.keys[count:])
        rest.state, rest.turn, rest.place = run.state, max(0, run.turn - count), run.place
        if self._open.get(rest.keys[-1]) is run:
            self._open[rest.keys[-1]] = rest
        if self._where is not None:
            self._find_in(rest, rest.keys)
        self._order[run.place] = rest
        del run.keys[count:]

    def _joined(self, path: list[_Run]) -> _Run:
        """One run in place of these, which go on one another."""
        first, more = path[0], path[1:]
        for run in more:
            if self._heads.get(run.keys[0]) is run:
                del self._heads[run.keys[0]]
            first.keys += run.keys
            if self._where is not None:
                self._find_in(first, run.keys)
        return first

    def _share(self, run: _Run) -> None:
        self._close(run)
        run.state = SHARED

    def _close(self, run: _Run) -> None:
        """No prompt waits at its end any more."""
        if run.state == OPEN and self._open.get(run.keys[-1]) is run:
            del self._open[run.keys[-1]]

    def _touch(self, run: _Run) -> None:
        place = self._places = self._places + 1
        run.place = place
        self._order[place] = run

    def _trim(self, run: _Run, count: int) -> None:
        """Its first so many blocks stay."""
        keys = run.keys
        if run.state == _UNNAMED:
            self._unnamed -= len(keys) - count
        else:
            self._named -= len(keys) - count
            self._close(run)
            if not count and self._heads.get(keys[0]) is run:
                del self._heads[keys[0]]
            if self._where is not None:
                for key in keys[count:]:
                    if self._where.get(key) is run:
                        del self._where[key]
        del keys[count:]
        if not count:
            self._order.pop(run.place, None)
            run.place = 0

    def presume(self, links: Iterable[tuple[int, int | None]]) -> None:
        """These blocks, each with its parent and after it, are all that is held, and older than whatever comes."""
        self.clear()
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
            self._named += len(chain)
            self._touch(self._new(start, array("Q", chain)))
        self._evict(self.capacity)

    def forget(self, keys: Sequence[int]) -> None:
        """These blocks, the end of a chain and all that its request added, were not computed after all.

        What another request has recorded since, and so waits for, stays: taking it would leave a hole before that one's
        own blocks.
        """
        run = self._open.get(keys[-1]) if keys else None
        if run is None:
            return  # it was answered, or others wait here too
        # What another request has used since is another run.
        self._trim(run, max(0, len(run.keys) - len(keys)))
        run.state = SHARED

    def drop(self, keys: Iterable[int]) -> None:
        """The engine says that it holds these no more. What follows in the same run is of no use then."""
        if self._where is None:
            self._where = {}
            for run in self._order.values():
                if run.state != _UNNAMED:
                    self._find_in(run, run.keys)
        self._lose(keys)

    def _lose(self, keys: Iterable[int]) -> None:
        """Whatever is in the order ends before any of these."""
        where = self._where
        assert where is not None
        for key in keys:
            if (run := where.get(key)) is not None and run.place:
                self._trim(run, _place(run, key))

    def _find_in(self, run: _Run, keys: array[int]) -> None:
        """These blocks are to be found in this run."""
        where = self._where
        assert where is not None
        for key in keys:
            where[key] = run

    def resize(self, capacity: int) -> None:
        """The engine told its pool. The oldest go if it is smaller than was presumed."""
        self.capacity = capacity
        self._evict(capacity)

    def _evict(self, room: int) -> None:
        """The oldest, down to `room` blocks."""
        while (surplus := self._named + self._unnamed - room) > 0 and self._order:
            run = self._order.get(self._oldest)
            if run is None:
                # Not the first one that a look through the dict finds: that passes all that has gone each time.
                self._oldest += 1
            else:
                self._trim(run, max(0, len(run.keys) - surplus))

    def clear(self) -> None:
        self._heads.clear()
        self._open.clear()
        self._where = None
        self._order.clear()
        self._named = self._unnamed = 0


def _zeros(count: int) -> array[int]:
    """As many, of one's own."""
    return _ZEROS[:count] if count <= len(_ZEROS) else array("Q", bytes(8 * count))


def _state_at(run: _Run, place: int) -> int:
    """Of the block with so many before it, from the root on."""
    state = run.state
    return state if state == SHARED or place - run.start >= run.turn else SHARED


def _place(run: _Run, key: int) -> int:
    """How many blocks of its run stand before it. From the end on: it is mostly near that."""
    keys = run.keys
    at = len(keys) - 1
    while at >= 0 and keys[at] != key:
        at -= 1
    return at
