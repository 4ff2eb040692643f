"""KV blocks in CPU memory: what the GPU's pool gave up, kept until a prompt wants it back.

As vLLM's OffloadingConnector does it (``--kv-offloading-size``): every block that fills is copied out behind the
computation, the CPU keeps the most recently used ones, and a prompt whose blocks are no longer on the GPU waits for
them to be copied back over the bus. Its hits are "external" to the pool and counted as such.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fake_backend.connector import Fetched, TierEvent, TierRemoved, TierStored
from fake_backend.link import Link
from fake_backend.pool import CacheEvent, Stored
from fake_backend.request import Request

BUS = (25e9, 0.00005)
"""Bytes/s and seconds: PCIe 4.0 x16 as copies of whole blocks reach it."""


@dataclass(slots=True)
class _Load:
    request: Request
    tokens: int
    keys: tuple[int, ...]


class CpuTier:
    """``capacity`` in blocks. A connector (connector.py) without another replica behind it."""

    def __init__(self, capacity: int, block_size: int, bytes_per_token: float, bus: Link | None = None) -> None:
        if capacity < 1:
            raise ValueError("the memory for offloaded KV holds less than one block")
        self.capacity = capacity
        self._events: list[TierEvent] = []
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._bus = bus or Link(*BUS)
        self._held: OrderedDict[int, None] = OrderedDict()
        self._loads: dict[str, _Load] = {}
        self._loading: dict[int, int] = {}
        """How many loads read a block; it stays until they have."""

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, key: int) -> bool:
        return key in self._held

    def match(self, request: Request, local_tokens: int) -> int:
        """Tokens of the blocks that follow the ``local_tokens`` found on the GPU; never the last token."""
        size = self._block_size
        first, last = local_tokens // size, (request.tokens - 1) // size
        found = 0
        for key in request.keys[first:last]:
            if key not in self._held:
                break
            found += 1
        return found * size

    def start(self, request: Request, local_tokens: int, external_tokens: int, now: float) -> None:
        first = local_tokens // self._block_size
        keys = tuple(request.keys[first : first + external_tokens // self._block_size])
        for key in keys:
            self._held.move_to_end(key)
            self._loading[key] = self._loading.get(key, 0) + 1
        self._loads[request.id] = _Load(request, local_tokens + external_tokens, keys)
        self._bus.start(request.id, external_tokens * self._bytes_per_token, now)

    def arrived(self, now: float) -> list[Fetched]:
        found: list[Fetched] = []
        for name in self._bus.done(now):
            load = self._loads.pop(name)
            self._unpin(load)
            found.append(Fetched(load.request, load.tokens))
        return found

    def finished(self, request: Request, now: float) -> bool:
        load = self._loads.pop(request.id, None)
        if load is not None:
            self._bus.cancel(request.id, now)
            self._unpin(load)
        return False

    def released(self, now: float) -> list[Sequence[int]]:
        return []

    def evicted(self, events: Sequence[CacheEvent], now: float) -> None:
        """Copy out what the step registered."""
        for event in events:
            if isinstance(event, Stored):
                self._store(tuple(event.request.keys[event.first : event.last]))

    def take_events(self) -> list[TierEvent]:
        taken, self._events = self._events, []
        return taken

    def next_event(self) -> float | None:
        return self._bus.next_event()

    def clear(self) -> None:
        """Forget everything that no load is reading."""
        gone = tuple(key for key in self._held if key not in self._loading)
        for key in gone:
            del self._held[key]
        if gone:
            self._events.append(TierRemoved(gone))

    def _store(self, keys: tuple[int, ...]) -> None:
        new: list[int] = []
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
            else:
                self._held[key] = None
                new.append(key)
        removed = self._shrink()
        if removed:
            self._events.append(TierRemoved(removed))
        kept = tuple(key for key in new if key in self._held)
        if kept:
            self._events.append(TierStored(kept))

    def _shrink(self) -> tuple[int, ...]:
        """Make room, least recently used first."""
        removed: list[int] = []
        excess = len(self._held) - self.capacity
        if excess > 0:
            for key in self._held:
                if key not in self._loading:
                    removed.append(key)
                    if len(removed) == excess:
                        break
            for key in removed:
                del self._held[key]
        return tuple(removed)

    def _unpin(self, load: _Load) -> None:
        for key in load.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
