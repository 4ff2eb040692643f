"""Presumed blocks by runs of them, in the order of use: the rule of `Residency`, with the time it takes in mind.

Blocks that follow one another and were used last by the same request make a run, and the order of use is one of runs:
touched last stands last, and of one request's the head stands after its tail. Every ancestor of a block thus stands
behind it, so that what is held is always closed under prefixes. Runs are found by their first blocks, each behind the
one before it, and how far a prompt goes along with one by bisection: a block's hash names all that stands before it. To
use a long prompt again moves a run or two, not thousands of blocks. A run is divided where a request parts from it, and
goes on with what that one adds.

native.c says the same in C. What one of the two does, the other has to do.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from router.index.gallop import common

OPEN: Final = 0
"""The last whole block of a prompt that is not answered yet."""
ENDED: Final = 1
"""A block of one request's answer, from which none went on."""
SHARED: Final = 2
"""Requests went on from here, or several ended here."""

UNNAMED: Final = 3
"""Blocks of no known name: they take room and are never found."""

MOST_RUNS: Final = 32
"""A path of more runs than this is made one again. Runs come apart one at a time, so that this is paid for seldom."""

_ZEROS: Final = array("Q", bytes(8 * 256))


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


class Runs:
    """What one replica holds. Keys are arrays of unsigned 64-bit integers ("Q"); they are copied."""

    __slots__ = ("_heads", "_most", "_named", "_oldest", "_open", "_order", "_places", "_unnamed", "_where")

    def __init__(self, most: int = MOST_RUNS) -> None:
        """`most`: runs in the path of a prompt."""
        self._most = most
        self._heads: dict[int, _Run] = {}  # by their first blocks
        self._open: dict[int, _Run] = {}  # those that end in an OPEN block, by that
        self._where: dict[int, _Run] | None = None  # by each block, once some were dropped
        self._order: dict[int, _Run] = {}  # by place, oldest first
        self._places = 0
        self._oldest = 1  # no run has a place before this one
        self._named = 0
        self._unnamed = 0

    def __len__(self) -> int:
        """How many blocks are held."""
        return self._named + self._unnamed

    def match(self, keys: array[int]) -> tuple[int, bool]:
        """How many leading blocks of a chain are held; and whether the last of these is ENDED."""
        heads, whole = self._heads, len(keys)
        at, ends = 0, False
        while at < whole:
            run = heads.get(keys[at])
            if run is None or run.start != at:
                break
            at += common(run.keys, keys, at)
            ends = _state_at(run, at - 1) == ENDED
        return at, ends

    def record(self, keys: array[int], room: int, ended: bool, beyond: int) -> None:
        """See `Residency.record`. `room`: blocks, in all; at least one."""
        if len(keys) > room:
            keys = keys[:room]
        unnamed = min(beyond, room - len(keys))
        if unnamed > 0:
            self._unnamed += unnamed
            self._touch(_Run(0, _zeros(unnamed), 0, UNNAMED))
        if keys:
            self._record(keys, ended)
        self.evict(room)

    def add(self, start: int, keys: array[int]) -> None:
        """These blocks, of which none is held, stand behind `start` others, and were used last. Not to be empty."""
        run = self._new(start, keys[:])
        self._named += len(keys)
        self._touch(run)
        if self._where is not None:
            self._find_in(run, run.keys)

    def runs(self) -> list[tuple[int, list[int], int, int]]:
        """All of them, oldest first: start, keys (zeros where they have no name), state, turn."""
        return [(run.start, run.keys.tolist(), run.state, run.turn) for run in self._order.values()]

    def _record(self, keys: array[int], ended: bool) -> None:
        whole = len(keys)
        path = self._path(keys)
        there, before = 0, SHARED
        if path:
            there = path[-1].start + len(path[-1].keys)
            before = _state_at(path[-1], there - 1)
        for run in path:
            self._share(run)
        if len(path) > self._most:
            path = [self._joined(path)]
        if there < whole:
            new = keys[there:]
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

    def _path(self, keys: array[int]) -> list[_Run]:
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
        if run.state == UNNAMED:
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

    def forget(self, keys: array[int]) -> None:
        """See `Residency.forget`."""
        run = self._open.get(keys[-1]) if keys else None
        if run is None:
            return  # it was answered, or others wait here too
        # What another request has used since is another run.
        self._trim(run, max(0, len(run.keys) - len(keys)))
        run.state = SHARED

    def drop(self, keys: array[int]) -> None:
        """These are held no more. What follows in the same run is of no use then."""
        if self._where is None:
            self._where = {}
            for run in self._order.values():
                if run.state != UNNAMED:
                    self._find_in(run, run.keys)
        self._lose(keys)

    def _lose(self, keys: array[int]) -> None:
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

    def evict(self, room: int) -> None:
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
