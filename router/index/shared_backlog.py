"""What is still to be told to the shared index: in order, bounded, cut into slices of bounded work. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from router.index.pages import PAGE_BLOCKS
from router.index.shared_codec import AGAIN, FORGET, KEY_BYTES, RECORD, Seat, operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# So much is offered in one call; the script stops where it has done enough, whatever the pages hold.
SLICE_PAGES = 64
# Of what waits so many entries are looked at for prompts that were sent a moment ago.
LOOKED_AT = 256
PAGE_BYTES = PAGE_BLOCKS * KEY_BYTES


@dataclass(slots=True, eq=False)
class Entry:
    """A chain, and what became of it at a replica. `life` is the incarnation that this router knew then."""

    kind: int
    replica: str
    life: int
    keys: bytes
    prompt_end: int
    done: int = 0
    """Bytes of the keys that were told."""
    base: int = 0
    """The number in the replica's clock that the store gave the chain with its first part."""
    soon_ms: int = 0
    """For how long it counts as there before the replica's events must have told of it."""

    @property
    def pages(self) -> int:
        return -(-(len(self.keys) - self.done) // PAGE_BYTES)


@dataclass(slots=True)
class Part:
    """What one call tells of one entry."""

    entry: Entry
    head: bytes
    keys: bytes


class Backlog:
    """Entries wait here. Beyond `capacity` blocks the oldest are dropped and counted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity * KEY_BYTES
        self._entries: deque[Entry] = deque()
        self._held = 0
        self.dropped_blocks = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> int:
        return self._held // KEY_BYTES

    def records(self, replica: str) -> list[bytes]:
        """The chains of the last prompts that were sent to a replica and are still to be told."""
        return [entry.keys for entry in islice(reversed(self._entries), LOOKED_AT) if _waits(entry, replica)]

    def push(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._held += len(entry.keys)
        while self._held > self._capacity and self._entries:
            self.dropped_blocks += self._pop() // KEY_BYTES

    def _pop(self) -> int:
        size = len(self._entries.popleft().keys)
        self._held -= size
        return size

    def next_slice(self, seat: Callable[[Entry], Seat | None], pages: int = SLICE_PAGES) -> list[Part]:
        """The parts that go first, `pages` pages of work at the most. Entries whose replica has no seat any more, or
        is another incarnation by now, are passed over. The parts stay in the backlog until `told`."""
        parts: list[Part] = []
        while self._entries:
            first = self._entries[0]
            if first.done < len(first.keys) and seat(first) is not None:
                break
            self._pop()
        for entry in self._entries:
            where = seat(entry)
            if where is None or entry.done >= len(entry.keys):
                continue
            begin, total = entry.done, len(entry.keys) // KEY_BYTES
            keys = entry.keys[begin : begin + pages * PAGE_BYTES]
            head = operation(entry.kind, where, entry.base, begin // KEY_BYTES, total, entry.prompt_end, entry.soon_ms)
            parts.append(Part(entry, head, keys))
            pages -= -(-len(keys) // PAGE_BYTES)
            # A long chain goes on only when the store has given it its numbers.
            if pages <= 0 or begin + len(keys) < len(entry.keys):
                break
        return parts

    def told(self, parts: list[Part], done: list[int]) -> list[str]:
        """What the store took of these parts: for each of the first of them its base and how many blocks. Returns the
        replicas whose epoch is over; their entries are given up."""
        stale = []
        for part, base, blocks in zip(parts, done[::2], done[1::2], strict=False):
            entry = part.entry
            entry.done += blocks * KEY_BYTES
            entry.base = base
            if base < 0:
                stale.append(entry.replica)
                entry.done = len(entry.keys)
        self._settle()
        return stale

    def refused(self, parts: list[Part]) -> None:
        """The store would not take them: given up and counted."""
        for part in parts:
            self.dropped_blocks += (len(part.entry.keys) - part.entry.done) // KEY_BYTES
            part.entry.done = len(part.entry.keys)
        self._settle()

    def _settle(self) -> None:
        while self._entries and self._entries[0].done >= len(self._entries[0].keys):
            self._pop()

    def restart(self) -> None:
        """Another connection: what was told in part begins anew, for nobody knows what of it arrived."""
        for entry in self._entries:
            entry.done, entry.base = 0, 0


def _waits(entry: Entry, replica: str) -> bool:
    return entry.replica == replica and entry.kind == RECORD and entry.done < len(entry.keys)


class Recent:
    """The chains told last, so that a store that lost everything can be told them again. Bounded in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[tuple[str, bytes], Entry] = OrderedDict()
        self._held = 0

    def add(self, entry: Entry) -> None:
        """A prompt's entry is replaced by that of the same prompt with its answer."""
        at = (entry.prompt_end + 1) * KEY_BYTES
        name = (entry.replica, entry.keys[at - KEY_BYTES : at])
        before = self._entries.pop(name, None)
        if before is not None:
            self._held -= len(before.keys)
        self._entries[name] = entry
        self._held += len(entry.keys)
        while self._held > self._capacity:
            self._held -= len(self._entries.popitem(last=False)[1].keys)

    def find(self, replica: str, last_key: bytes) -> Entry | None:
        """The entry of the prompt that ends in this block."""
        return self._entries.get((replica, last_key))

    def forget(self, replica: str, last_key: bytes) -> None:
        entry = self._entries.pop((replica, last_key), None)
        if entry is not None:
            self._held -= len(entry.keys)

    def again(self) -> Iterator[Entry]:
        """All of them, oldest first, as entries to be told anew."""
        for entry in self._entries.values():
            if entry.kind != FORGET:
                yield Entry(AGAIN, entry.replica, entry.life, entry.keys, entry.prompt_end)
