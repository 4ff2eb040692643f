"""Two connections that have become one: after a switch of protocols (RFC 9110 7.8) bytes go both ways, unread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# What one side said last, as a WebSocket's closing frame, is given this long to reach the other one.
LAST_WORDS_SECONDS = 0.5


class Tunnel:
    """Passes bytes on, with backpressure both ways, until either side ends or neither has said anything for a while."""

    def __init__(
        self, client: asyncio.Transport, replica: asyncio.Transport, *, idle_seconds: float, heard: Callable[[], None]
    ) -> None:
        """`heard` is told of each piece that comes from the replica. Both transports belong to the tunnel from now on;
        the protocols that they had are told of their end."""
        self._loop = asyncio.get_running_loop()
        self._idle = idle_seconds
        self._last = self._loop.time()
        self._replica = replica
        self.over: asyncio.Future[str] = self._loop.create_future()
        """Why it ended, where the client did not end it."""
        client.set_protocol(_End(self, client, replica, lambda: None))
        replica.set_protocol(_End(self, replica, client, heard))
        self._timer = self._loop.call_later(idle_seconds, self._check_time)

    def said(self) -> None:
        self._last = self._loop.time()

    def end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)

    def close(self) -> None:
        """The replica's side ends, too; the client's is its owner's to end."""
        self._timer.cancel()
        self._replica.close()
        self._loop.call_later(LAST_WORDS_SECONDS, self._replica.abort)

    def _check_time(self) -> None:
        quiet = self._loop.time() - self._last
        if quiet < self._idle:
            self._timer = self._loop.call_later(self._idle - quiet, self._check_time)
        else:
            self.end(f"neither side said anything for {self._idle:g} s (idle_timeout_seconds)")


class _End(asyncio.Protocol):
    """One side: what it says goes to the other one, and it is not read while that one does not read."""

    def __init__(
        self, tunnel: Tunnel, side: asyncio.Transport, other: asyncio.Transport, heard: Callable[[], None]
    ) -> None:
        self._tunnel = tunnel
        self._before = side.get_protocol()
        self._other = other
        self._heard = heard

    def data_received(self, data: bytes) -> None:
        self._tunnel.said()
        self._heard()
        self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.end("it ended the connection")
        self._before.connection_lost(exc)
