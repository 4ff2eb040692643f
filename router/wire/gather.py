"""One request whose answer is for the router itself, not for the client: gathered whole, and bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from router.wire.attempts import STALE_SECONDS
from router.wire.http import request_head
from router.wire.upstream import BrokenError, Sink

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.wire.errors import Refusal
    from router.wire.http import Head, Headers, Request
    from router.wire.upstream import Pool, Upstream

# Block ids and token ids of a prompt of a million tokens take less than half of it.
MAX_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Gathered:
    """A whole answer."""

    status: int
    body: bytes


class Gather(Sink):
    """A `Sink` that keeps what comes."""

    def __init__(self, max_bytes: int) -> None:
        self.answer: asyncio.Future[Gathered] = asyncio.get_running_loop().create_future()
        self._max = max_bytes
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def head(self, head: Head) -> None:
        self._status = head.status

    def body(self, piece: bytes, framed: bytes = b"") -> None:
        self._size += len(piece)
        if self._size <= self._max:
            self._pieces.append(piece)

    def flush(self) -> None:
        if self._size > self._max:
            self.broken(BrokenError(f"its answer is longer than {self._max} bytes"))

    def complete(self) -> None:
        if self._size > self._max:
            self.flush()
        elif not self.answer.done():
            self.answer.set_result(Gathered(self._status, b"".join(self._pieces)))

    def parted(self) -> None:
        pass

    def broken(self, why: BrokenError) -> None:
        if not self.answer.done():
            self.answer.set_exception(why)

    def shut(self, refusal: Refusal) -> None:
        self.broken(BrokenError(refusal.message))

    def lost(self, why: str) -> None:
        self.broken(BrokenError(why))


async def gather(
    pool: Pool,
    request: Request,
    body: bytes,
    *,
    added: Headers,
    seconds: float,
    unread: Callable[[Gathered], None] | None = None,
) -> Gathered:
    """Send `request` with another body, and wait for the whole answer.

    Raises BrokenError where there is none, TimeoutError where it does not come in time, ExhaustedError where this
    process has no connection left. Whatever ends it early, the replica is left at once, so that it stops working for
    nobody. `unread` is given an answer that was whole in the very moment in which the caller was cancelled.
    """
    head = request_head(request, len(body), pool.authority, pool.base, added)
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(seconds):
        connection = pool.take_idle(clock()) or await pool.connect()
        while True:
            try:
                return await _exchange(connection, head, body, unread)
            except BrokenError:
                # One that was closed while idle shows it when it is used again; a fresh one settles it.
                stale = connection.reused and not connection.answered
                if not stale or clock() - connection.sent_at >= STALE_SECONDS:
                    raise
            connection = await pool.connect()


async def _exchange(
    connection: Upstream, head: bytes, body: bytes, unread: Callable[[Gathered], None] | None
) -> Gathered:
    sink = Gather(MAX_BYTES)
    connection.send(head, body, sink, asyncio.get_running_loop().time(), head_only=False)
    try:
        return await asyncio.shield(sink.answer)
    except asyncio.CancelledError:
        if not sink.answer.done():
            connection.leave(sink)
            sink.answer.cancel()
        elif unread is not None and sink.answer.exception() is None:
            unread(sink.answer.result())
        raise
    except BrokenError:
        connection.leave(sink)
        raise
