"""Which blocks a replica is presumed to hold, without being told: the engine's own cache rule, replayed.

vLLM (v1/core/block_pool.py) keeps one LRU queue of free blocks, frees a request's blocks tail first, and evicts from
the head of the queue. So the head of a prompt outlives its tail, whatever it shares it with.

Here blocks that follow one another and were used last by the same request make a run, and the order of use is one of
runs: touched last stands last, and of one request's the head stands after its tail. Every ancestor of a block thus
stands behind it, so that what is held is always closed under prefixes and a depth is found by bisection. To use a long
prompt again moves a run or two, not thousands of blocks. A run is divided where a request parts from it, and goes on
with what that one adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from router.index.gallop import leading

if TYPE_CHECKING:
    from collections.abc import Iterable

OPEN: Final = 0
"""The last whole block of a prompt that is not answered yet."""
ENDED: Final = 1
"""A block of one request's answer, from which none went on."""
SHARED: Final = 2
"""Requests went on from here, or several ended here."""

_UNNAMED: Final = 3  # blocks of no known name: they take room and are never found

# A path of more runs than this is made one again. Runs come apart one at a time, so that this is paid for seldom.
_MOST_RUNS = 32


K = TypeVar("K")


class _Run(msgspec.Struct, gc=False, eq=False):
    """Blocks in a row. Of compact parts that the garbage collector need not visit: there may be one for each block. A
    class of our own would cost less to look into once compiled, but be visited where it is not."""

    start: int
    """How many blocks stand before its first, from the root on."""
    keys: tuple[int, ...]
    """Zeros where they have no name; else mostly the very objects that `Residency._held` has, at no further cost."""
    place: int = 0
    """In the order of use; 0 out of it."""
    state: int = SHARED
    """Of its blocks from `turn` on; those before are SHARED."""
    turn: int = 0
    """Of no meaning where all are SHARED."""


class Residency:
    """The presumed cache of one replica. Keys are vLLM's block hashes, their low 64 bits.

    `capacity`: blocks, the engine's num_gpu_blocks - 1 (one is its null block). Memory: about 110 bytes a block, and
    about 200 a run: where most prompts have but one block of their own, three times as much.
    """

    __slots__ = ("_asked", "_depth", "_held", "_oldest", "_order", "_places", "_unnamed", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a replica holds at least one block, not {capacity}")
        self.capacity = capacity
        self._held: dict[int, _Run] = {}
        self._order: dict[int, _Run] = {}  # by place, oldest first
        self._places = 0
        self._oldest = 1  # no run has a place before this one
        self._asked: list[int] = []  # whose depth was asked for last: mostly what is recorded next
        self._depth = 0
        self._unnamed = 0

    def __len__(self) -> int:
        return len(self._held) + self._unnamed

    def depth(self, keys: list[int], guess: int = 0) -> int:
        """How many leading blocks of a chain are held; see `leading`."""
        return self.match(keys, guess)[0]

    def match(self, keys: list[int], guess: int = 0) -> tuple[int, bool]:
        """How many leading blocks of a chain are held, and whether `ends_a_turn` is true of the last of these."""
        held = self._held
        # Many prompts begin alike, and part where the last one did.
        depth = at = leading(keys, held, guess or self._depth)
        ends = False
        # From run to run: where the engine dropped one, what follows may still be thought to be there.
        while at:
            run = held.get(keys[at - 1])
            if run is None:
                depth = at = leading(keys[: at - 1], held)
                ends = False
                continue
            if at == depth:
                ends = _state_at(run, at - 1) == ENDED
            start = run.start
            if start >= at:
                break  # two blocks of one name
            at = start
        self._asked, self._depth = keys, depth
        return depth, ends

    def ends_a_turn(self, key: int) -> bool:
        """Whether one request was answered in this block and nothing went on from it: a conversation waits here."""
        run = self._held.get(key)
        return run is not None and run.state == ENDED and _find(run, key) >= run.turn

    def record(
        self, keys: list[int], *, ended: bool = False, beyond: int = 0, partial: bool = False, guess: int = 0
    ) -> None:
        """A request with these blocks was given to the replica: they are held now, and the most recently used.

        `ended`: it has been answered; the blocks of the answer, as far as they are known, are among them. `beyond`: so
        many full ones of it are not; they take room all the same, and as the tail they are the first to go. `partial`:
        there is a last block that is not full. It is never found again, but takes room until the request is over.
        `guess`: how many of them are likely to be held. O(log n) for what is held, O(n) for what is new.
        """
        if keys is self._asked or not guess:
            guess = self._depth
        room = self.capacity - 1 if partial and self.capacity > 1 else self.capacity
        if len(keys) > room:
            keys = keys[:room]
        unnamed = min(beyond, room - len(keys))
        if unnamed:
            self._unnamed += unnamed
            self._touch(_Run(0, (0,) * unnamed, 0, _UNNAMED))
        if keys:
            self._record(keys, ended, guess)
        self._evict(room)

    def _record(self, keys: list[int], ended: bool, guess: int) -> None:
        held, whole = self._held, len(keys)
        there = leading(keys, held, guess)
        before = _state_at(held[keys[there - 1]], there - 1) if there else SHARED
        path = self._path(keys, there)
        if there < whole:
            if before == SHARED:
                # Others went on from here, or will: a run that went on with these would soon be divided again.
                path.insert(0, self._new(keys, there, whole))
            else:
                new = tuple(keys[there:])
                path[0].keys += new
                _hold(held, new, path[0])
        for run in path:
            if run.state != SHARED:
                run.state = SHARED
            self._touch(run)
        last = path[0]
        if there < whole:
            # Blocks of the answer itself: a next turn whose text tokenizes differently may part from it in its midst.
            last.state = ENDED if ended else OPEN
            last.turn = (there - (before == OPEN) if ended else whole - 1) - last.start
        elif before == (OPEN if ended else ENDED):
            # Two turns that end in one block are two conversations, or too short to tell from one another. And where
            # several prompts wait, none of them may take it back.
            last.state, last.turn = ENDED, whole - 1 - last.start

    def _path(self, keys: list[int], there: int) -> list[_Run]:
        """The runs of these leading blocks, which are held, taken out of the order; all get new places there. The
        deepest first."""
        held = self._held
        path: list[_Run] = []
        end = there
        while end:
            run = held.get(keys[end - 1])
            begin = run.start if run is not None else 0
            if run is not None and not begin < end <= begin + len(run.keys):
                # Two blocks of one name, in different depths. The newer is right.
                self.drop((keys[end - 1],))
                run = None
            if run is None:  # the engine dropped it, and not what follows
                begin = end - 1
                while begin and keys[begin - 1] not in held:
                    begin -= 1
                run = self._new(keys, begin, end)
            else:
                run = self._take(run, end - begin)
            path.append(run)
            end = begin
        if len(path) > _MOST_RUNS:
            for run in path:
                run.place = 0
            return [self._new(keys, 0, there)]
        return path

    def _new(self, keys: list[int], begin: int, end: int) -> _Run:
        new = tuple(keys[begin:end])
        run = _Run(begin, new)
        _hold(self._held, new, run)
        return run

    def _take(self, run: _Run, count: int) -> _Run:
        """Its first blocks as a run of their own, out of the order. What is left keeps its place there."""
        keys, place = run.keys, run.place
        if count == len(keys):
            if place:
                del self._order[place]
            return run
        head, tail = keys[:count], keys[count:]
        left = max(0, run.turn - count)
        # The shorter one is told of its new run.
        if len(head) < len(tail):
            taken = _Run(run.start, head)
            run.start, run.keys, run.turn = run.start + count, tail, left
            _hold(self._held, head, taken)
            return taken
        rest = _Run(run.start + count, tail, place, run.state, left)
        if place:
            self._order[place] = rest
        run.keys, run.place = head, 0
        _hold(self._held, tail, rest)
        return run

    def _touch(self, run: _Run) -> None:
        place = self._places = self._places + 1
        run.place = place
        self._order[place] = run

    def _trim(self, run: _Run, count: int) -> None:
        """Its first so many blocks stay."""
        gone = run.keys[count:]
        run.keys = run.keys[:count]
        if run.state == _UNNAMED:
            self._unnamed -= len(gone)
        else:
            held = self._held
            for key in gone:
                held.pop(key, None)
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
            run = _Run(start, tuple(chain))
            _hold(self._held, run.keys, run)
            self._touch(run)
        self._evict(self.capacity)

    def forget(self, keys: list[int]) -> None:
        """These blocks, the end of a chain and all that its request added, were not computed after all.

        What another request has recorded since, and so waits for, stays: taking it would leave a hole before that one's
        own blocks.
        """
        run = self._held.get(keys[-1]) if keys else None
        if run is None or _last_state(run) != OPEN or run.keys[-1] != keys[-1]:
            return  # it was answered, or others wait here too
        # What another request has used since is another run.
        self._trim(run, max(0, len(run.keys) - len(keys)))
        run.state = SHARED

    def drop(self, keys: Iterable[int]) -> None:
        """The engine says that it holds these no more. What follows in the same run is of no use then."""
        for key in keys:
            run = self._held.get(key)
            if run is not None:
                self._trim(run, _find(run, key))

    def resize(self, capacity: int) -> None:
        """The engine told its pool. The oldest go if it is smaller than was presumed."""
        self.capacity = capacity
        self._evict(capacity)

    def _evict(self, room: int) -> None:
        """The oldest, down to `room` blocks."""
        while (surplus := len(self._held) + self._unnamed - room) > 0 and self._order:
            run = self._order.get(self._oldest)
            if run is None:
                # Not the first one that a look through the dict finds: that passes all that has gone each time.
                self._oldest += 1
            else:
                self._trim(run, max(0, len(run.keys) - surplus))

    def clear(self) -> None:
        self._held.clear()
        self._order.clear()
        self._unnamed = 0


def _state_at(run: _Run, place: int) -> int:
    """Of the block with so many before it, from the root on."""
    state = run.state
    return state if state == SHARED or place - run.start >= run.turn else SHARED


def _last_state(run: _Run) -> int:
    return _state_at(run, run.start + len(run.keys) - 1)


def _hold(held: dict[K, _Run], keys: tuple[K, ...], run: _Run) -> None:
    for key in keys:
        held[key] = run


def _find(run: _Run, key: int) -> int:
    """How many blocks of its run stand before it. From the end on: it is mostly near that."""
    keys = run.keys
    at = len(keys) - 1
    while at >= 0 and keys[at] != key:
        at -= 1
    return at
