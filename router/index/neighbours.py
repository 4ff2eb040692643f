"""What the workers of one router tell each other, over unix sockets: who was sent what, and how busy they are.

Each worker keeps the whole index by itself, and what the others record in theirs it records too, a moment later. So a
decision asks nobody. Between machines this would not do (`router.index.shared`): there messages get lost, clocks
differ, and routers that come late have to learn what is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, cast

import msgspec

from router.index.abridging import Abridger
from router.index.neighbour_index import NeighbourIndex
from router.index.news import Load, News, Record, decoded, encoded
from router.index.shared_codec import Others, Outside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from router.index.shared import Busy

log = logging.getLogger("warmroute.neighbours")

# What happens within this time is told together: a message costs as much as a tenth of a request, and load that is this
# old costs less than 2 % of TTFT.
TELL_SECONDS = 0.004
# A load counts this long without being told again: what a worker leaves that dies.
LEASE_SECONDS = 2.0
RETRY_SECONDS = 0.2
# A neighbour that does not read is told no more than this ahead; what it misses it will not know.
MAX_UNREAD_BYTES = 8 * 1024 * 1024
# Longer than any message; who sends more is no worker.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
SIZE_BYTES = 4


class Neighbours:
    """One worker's part. `loads` is read whenever they are told, `heard` is given the others' whenever these are."""

    def __init__(
        self,
        directory: Path,
        number: int,
        workers: int,
        *,
        loads: Callable[[float], Iterable[Busy]],
        heard: Callable[[Mapping[str, Others]], None],
    ) -> None:
        self.index = NeighbourIndex(self)
        """The index that tells and is told."""
        self.untold = 0
        """Messages that found no room at a neighbour who does not read."""
        self._directory = directory
        self._number = number
        self._others = [each for each in range(1, workers + 1) if each != number]
        self._loads = loads
        self._heard = heard
        self._records: list[Record] = []
        self._abridger = Abridger()
        self._links: dict[int, asyncio.WriteTransport] = {}
        self._told: dict[int, tuple[float, list[Load]]] = {}
        self._summed = Outside()
        self._summed_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._encode = msgspec.msgpack.Encoder(enc_hook=encoded).encode
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: set[_Reader] = set()
        self._clock = asyncio.get_running_loop().time

    async def start(self) -> None:
        path = _path(self._directory, self._number)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Reader(self), path)
        self._tasks = [asyncio.create_task(self._reach(each)) for each in self._others]
        self._tasks.append(asyncio.create_task(self._remind()))

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in (*self._links.values(), *(each.transport for each in self._readers)):
            transport.close()
        if self._server is not None:
            self._server.close()

    # -- what is asked ------------------------------------------------------------------------------------------

    async def consult(self, asks: Sequence[tuple[Sequence[int], Sequence[str]]]) -> Outside:
        """The others' load. What they know of chains is in the index already."""
        return self.at_hand()

    def at_hand(self) -> Outside:
        """The same, for whom cannot wait: nobody has to be asked. No older than what is told is anyhow."""
        now = self._clock()
        if now >= self._summed_until:
            self._sum(now)
        return self._summed

    def _sum(self, now: float) -> None:
        self._summed = Outside({}, self.elsewhere())
        self._summed_until = now + TELL_SECONDS

    def elsewhere(self) -> dict[str, Others]:
        """What all other workers have at each replica, at this moment."""
        now = self._clock()
        found: dict[str, Others] = {}
        for told_at, loads in self._told.values():
            if now - told_at > LEASE_SECONDS:
                continue
            passed = (now - told_at) * 1000
            for load in loads:
                before = found.get(load.replica)
                waiting = max(0.0, load.waiting_ms - min(passed, load.head_ms))
                if before is None:
                    found[load.replica] = Others(load.in_flight, load.decoding, waiting, load.routed)
                else:
                    found[load.replica] = Others(
                        before.in_flight + load.in_flight,
                        before.decoding + load.decoding,
                        before.waiting_ms + waiting,
                        before.routed + load.routed,
                    )
        return found

    # -- what is told -------------------------------------------------------------------------------------------

    def load_changed(self) -> None:
        """Something was booked, reached its first token or ended."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self._tell)

    def tell(self, record: Record) -> None:
        if self._links:
            self._records.append(record)
            self.load_changed()

    def left(self, replica: str) -> None:
        """A replica is no longer in the settings; there is nothing to be undone here."""

    def _tell(self) -> None:
        self._timer = None
        records, self._records = self._records, []
        loads = [
            Load(
                busy.name, busy.load.in_flight, busy.load.decoding, busy.load.waiting_ms, busy.head_ms, busy.load.routed
            )
            for busy in self._loads(self._clock())
        ]
        self._abridger.shorten(records)
        said = self._encode(News(self._number, loads, records))
        pieces = (len(said).to_bytes(SIZE_BYTES, "big"), said)
        for transport in self._links.values():
            if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self.untold += 1
                self._abridger.clear()  # it does not know what this one says
            else:
                transport.writelines(pieces)

    async def _reach(self, number: int) -> None:
        """Keep a connection to one neighbour, for what is told to it."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                ended: asyncio.Future[None] = loop.create_future()
                transport, _ = await loop.create_unix_connection(
                    functools.partial(_Writer, ended), _path(self._directory, number)
                )
                self._links[number] = transport
                self._abridger.clear()  # it does not know what others were told
                self.load_changed()
                try:
                    await ended
                finally:
                    del self._links[number]
                    self._told.pop(number, None)  # it has nothing in flight any more
                    self._summed_until = 0.0
            await asyncio.sleep(RETRY_SECONDS)

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            self.load_changed()

    # -- what is heard ------------------------------------------------------------------------------------------

    def hear(self, news: News) -> None:
        now = self._clock()
        self._told[news.worker] = (now, news.loads)
        for record in news.records:
            self.index.hear(record)
        self._sum(now)
        self._heard(self._summed.loads)

    def joined(self, reader: _Reader) -> None:
        self._readers.add(reader)

    def parted(self, reader: _Reader) -> None:
        self._readers.discard(reader)


class _Reader(asyncio.Protocol):
    """What one neighbour tells us."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._decode = msgspec.msgpack.Decoder(News, dec_hook=decoded).decode
        self._abridger = Abridger()
        self._unread = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._neighbours.joined(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= SIZE_BYTES:
            end = SIZE_BYTES + int.from_bytes(self._unread[:SIZE_BYTES], "big")
            if end > MAX_MESSAGE_BYTES:
                self.transport.abort()
                return
            if len(self._unread) < end:
                return
            said = bytes(self._unread[SIZE_BYTES:end])
            del self._unread[:end]
            try:
                news = self._decode(said)
            except msgspec.MsgspecError:
                self.transport.abort()
                return
            if not self._abridger.restore(news.records):
                self.transport.abort()  # connected again it is told whole records
                return
            self._neighbours.hear(news)

    def connection_lost(self, exc: Exception | None) -> None:
        self._neighbours.parted(self)


class _Writer(asyncio.Protocol):
    """What we tell one neighbour: it says nothing on this connection, and its end is ours."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def _path(directory: Path, number: int) -> str:
    return str(directory / f"{number}.news")
