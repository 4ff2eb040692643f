"""Memory with a bound in bytes: what was used last stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

V = TypeVar("V")

ENTRY_BYTES: Final = 200
"""What an entry costs beside its value: its key, its place in the dict, the pair that holds value and weight."""


Key: TypeAlias = "int | bytes"


class Bounded(Generic[V]):
    """Values by digests. Safe to use from several threads: the lock is held for microseconds.

    `limit`: bytes, entries' own cost included; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.written = 0
        """Bytes that were ever put here."""
        self._entries: OrderedDict[Key, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> V | None:
        """The value, which counts as used now."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:  # each is one step for other threads, so that no lock is needed
            self._entries.move_to_end(key)
        except KeyError:
            return entry[0]  # it had to go in between
        return entry[0]

    def put(self, key: Key, value: V, weight: int) -> None:
        """Keep a value of `weight` bytes, in place of what the key had."""
        self.put_all([(key, value, weight)])

    def put_all(self, entries: Iterable[tuple[Key, V, int]], used: Iterable[Key] = ()) -> None:
        """Keep several values; then the keys in `used` count as used, the last one the latest. One step for others."""
        held = self._entries
        with self._lock:
            for key, value, weight in entries:
                old = held.pop(key, None)
                if old is not None:
                    self.held -= old[1]
                weight += ENTRY_BYTES
                held[key] = (value, weight)
                self.held += weight
                self.written += weight
            to_end = held.move_to_end
            for key in used:
                if key in held:
                    to_end(key)
            while self.held > self.limit:
                _, (_, weight) = held.popitem(last=False)
                self.held -= weight
