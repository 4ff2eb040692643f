"""The real front, attempt and upstream between a client and a replica that are lists of bytes: no sockets, so that
hundreds of thousands of exchanges take minutes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from router.config import Address
from router.wire.attempts import Attempt, Observer, Patience
from router.wire.errand import Errand, Task
from router.wire.front import Door, Front, Limits
from router.wire.http import Request
from router.wire.upstream import Pool

LIMITS = Limits(
    header_bytes=4096,
    header_count=40,
    body_bytes=1 << 20,
    buffered_bytes=1 << 22,
    connections=100,
    header_seconds=30.0,
    body_seconds=30.0,
    idle_seconds=30.0,
)
# Turns of the event loop in which everything that can happen without a timer has happened.
TURNS = 200


class Wire:
    """A transport that keeps what is written to it. `heard` is told of each write."""

    def __init__(self, protocol: Any, heard: Callable[[], None] | None = None) -> None:
        self.protocol = protocol
        self.written = bytearray()
        self.closing = False
        self.aborted = False
        self.lost = False
        self._heard = heard
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        assert not self.lost
        if not self.closing:
            self.written += data
            if self._heard is not None:
                self._loop.call_soon(self._heard)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def end(self, error: Exception | None = None) -> None:
        if not self.closing:
            self.closing = True
            self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        self.lost = True
        self.protocol.connection_lost(error)

    def close(self) -> None:
        self.end()

    def abort(self) -> None:
        self.aborted = self.aborted or not self.closing
        self.end()

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Dialer:
    """What a pool takes for its event loop: connections that it opens are wires that end at `replica`."""

    def __init__(self, replica: Callable[[Wire], None]) -> None:
        self._replica = replica
        self.wires: list[Wire] = []
        self.time = asyncio.get_running_loop().time

    async def create_connection(self, protocol: Callable[[], Any], *_: Any, **__: Any) -> tuple[Wire, Any]:
        connection = protocol()
        wire = Wire(connection)
        wire._heard = lambda: self._replica(wire)
        self.wires.append(wire)
        connection.connection_made(wire)
        return wire, connection


def stage_pool(replica: Callable[[Wire], None]) -> tuple[Pool, list[Wire]]:
    """A pool whose connections end at `replica`, and these."""
    pool, dialer = Pool(Address("127.0.0.1", 80, False, ""), connect_seconds=1.0, idle_seconds=60.0), Dialer(replica)
    pool._loop = dialer  # type: ignore[assignment]
    return pool, dialer.wires


def errands(
    serve: Callable[[Request, Front], Coroutine[Any, Any, None]],
) -> Callable[[Request, Front, Callable[[Task], None]], Task]:
    """What a door takes, of coroutines."""

    def begin(request: Request, client: Front, ended: Callable[[Task], None]) -> Task:
        errand = Errand(asyncio.get_running_loop(), serve(request, client), ended)
        errand.begin()
        return errand

    return begin


class Stage:
    """One client connection and one replica. `failures` are what the event loop would have logged."""

    def __init__(self, replica: Callable[[Wire], None]) -> None:
        self.failures: list[str] = []
        self.pool, self.wires = stage_pool(replica)
        self.door = Door(errands(self._serve), LIMITS)
        self.front = Front(self.door)
        self.client = Wire(self.front)
        self.front.connection_made(self.client)  # type: ignore[arg-type]
        self.served = 0

    async def _serve(self, request: Request, client: Front) -> None:
        self.served += 1
        outcome = await Attempt(client, request, Observer(), Patience(60.0, 60.0)).run(self.pool, request.body)
        if not client.started:
            client.refuse(_unreached(outcome.why))

    async def play(self, data: bytes, cuts: list[int]) -> None:
        """The client sends this, in pieces; then everything happens that can."""
        for piece in pieces(data, cuts):
            if self.client.closing:
                break
            self.front.data_received(piece)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if not self.busy:
                break
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def busy(self) -> bool:
        return self.front._task is not None

    async def leave(self) -> None:
        """The client goes; nothing may be left of it."""
        self.client.end()
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.front._task is None
        assert not self.door.connections
        assert self.door.held_bytes == 0
        self.pool.close_idle(older_than=0.0)
        for wire in self.wires:
            wire.end()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not self.pool._idle


def _unreached(why: str) -> Any:
    from router.wire import errors

    return errors.unreachable(["replica"], why)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The bytes, cut at these places."""
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)] or [data]
