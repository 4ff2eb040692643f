"""The client's side: bytes in, one whole request after the other, answers out.

One protocol serves every path and method. It parses with httptools (llhttp, strict), keeps every limit while bytes
arrive, and gives each request to `Door.serve` as a task that is cancelled the moment its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from router.wire import errors
from router.wire.http import Headers, Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router.wire.errors import Refusal

log = logging.getLogger("warmroute.front")

# Bytes kept of requests that a client sends ahead of its answers (pipelining) before we stop reading from it.
AHEAD_BYTES = 64 * 1024
# A slow reader may leave this much unsent before the replica's side is paused (uvloop's own default is 64 KiB).
WRITE_HIGH_BYTES = 256 * 1024
# After an early refusal the rest of the request is read and dropped this long, or the client's kernel would
# throw our answer away with the reset that closing on unread bytes causes.
LINGER_SECONDS = 5.0


class Valve(Protocol):
    """The reading side of the connection that feeds us, to be stopped while our client does not read."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all of them together, may make us hold. Bytes and seconds."""

    header_bytes: int
    header_count: int
    body_bytes: int
    buffered_bytes: int
    connections: int
    header_seconds: float
    body_seconds: float
    idle_seconds: float


@dataclass(slots=True, eq=False)
class Door:
    """What all client connections share."""

    serve: Callable[[Request, Front], Awaitable[None]]
    limits: Limits
    connections: set[Front] = field(default_factory=set)
    held_bytes: int = 0
    closing: bool = False

    def connection(self) -> Front:
        return Front(self)

    def drain(self) -> None:
        """From now on each connection closes after the answer it is giving; idle ones close at once."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class Front(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_ahead",
        "_body",
        "_body_size",
        "_door",
        "_head_seen",
        "_head_since",
        "_head_size",
        "_headers",
        "_in_body",
        "_lingering",
        "_loop",
        "_parser",
        "_paused",
        "_progress",
        "_reading_paused",
        "_ready",
        "_refusal",
        "_request",
        "_target",
        "_task",
        "_tick",
        "_transport",
        "_valve",
        "finished",
        "gone",
        "started",
    )

    def __init__(self, door: Door) -> None:
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self._ready: deque[Request] = deque()
        self._ahead = bytearray()
        self._target = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_size = 0
        self._head_seen = 0  # bytes fed since the last message's end
        self._head_since = 0.0
        self._head_size = 0  # bytes of the request line and headers that were parsed
        self._in_body = False
        self._refusal: Refusal | None = None
        self._lingering = False
        self._paused = False
        self._reading_paused = False
        self._valve: Valve | None = None
        self._progress = self._loop.time()
        self._tick: asyncio.TimerHandle | None = None
        self.gone = False
        self.started = False  # the current answer's head has been written
        self.finished = False  # the current answer is whole

    # -- the socket ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._door.connections.add(self)
        limit = self._door.limits.connections
        if len(self._door.connections) > limit:
            self._turn_away(errors.too_many_connections(limit))
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._door.connections.discard(self)
        self._drop_body()
        for request in self._ready:
            self._door.held_bytes -= len(request.body)
        self._ready.clear()
        if self._tick is not None:
            self._tick.cancel()
        if self._valve is not None:
            # Whoever reads from the replica must see the end of this, not sleep on.
            self._valve.resume_reading()
            self._valve = None
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        # A client that shuts its writing side has left, as far as the engines' own servers are concerned too.
        return False

    def pause_writing(self) -> None:
        self._paused = True
        if self._valve is not None:
            self._valve.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._valve is not None:
            self._valve.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._progress = self._loop.time()
        if self._lingering:
            return
        if self._task is not None:
            # The client is ahead of its answer. Reading goes on, since only reading shows that it left.
            self._ahead += data
            if len(self._ahead) > AHEAD_BYTES and not self._reading_paused and self._transport is not None:
                self._reading_paused = True
                self._transport.pause_reading()
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        upgrade = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An Upgrade may be ignored (RFC 9110 7.8), but what follows on this connection is not HTTP to us.
            upgrade = True
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if self._refusal is None:
                self._refusal = errors.bad_request(str(error) or type(error).__name__)
        if not self._in_body and not self._ready:
            if not self._head_seen:
                self._head_since = self._progress
            # Headers that never end are seen here only: the parser keeps them to itself until they do.
            self._head_seen += len(data)
            self._bound_head(self._head_seen)
        if upgrade and self._ready:
            self._ready[-1].keep_alive = False
        if self._ready and self._task is None:
            self._next()
        elif self._refusal is not None:
            self._turn_away(self._refusal)

    # -- httptools' callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._drop_body()
        self._in_body = False
        self._head_seen = self._head_size = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_size += len(url)
        self._bound_head(self._head_size)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: nothing here needs it, and merging it into the headers is unsafe (RFC 9110 6.5.1)
        self._headers.append((name, value))
        self._head_size += len(name) + len(value)
        self._bound_head(self._head_size)
        if len(self._headers) > self._door.limits.header_count and self._refusal is None:
            self._refusal = errors.headers_too_large(f"{self._door.limits.header_count} lines", "max_headers")

    def _bound_head(self, size: int) -> None:
        limit = self._door.limits.header_bytes
        if size > limit and self._refusal is None:
            self._refusal = errors.headers_too_large(f"{limit} bytes", "max_header_bytes")

    def on_headers_complete(self) -> None:
        self._in_body = True
        limits = self._door.limits
        hosts = lengths = 0
        expects = False
        for name, value in self._headers:
            lower = name.lower()
            if lower == b"host":
                hosts += 1
            elif lower == b"content-length":
                lengths = int(value)  # llhttp has proven it to be digits
            elif lower == b"expect" and value.lower() == b"100-continue":
                expects = True
        if self._refusal is not None:
            return
        if hosts > 1 or (hosts == 0 and self._parser.get_http_version() == "1.1"):
            self._refusal = errors.bad_request("exactly one Host header is needed")
        elif self._parser.get_method() == b"CONNECT":
            self._refusal = errors.bad_request("CONNECT is not served here")
        elif lengths > limits.body_bytes:
            self._refusal = errors.body_too_large(limits.body_bytes)
        elif self._door.held_bytes + lengths > limits.buffered_bytes:
            self._refusal = errors.out_of_memory(limits.buffered_bytes)
        elif expects and self._transport is not None and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._refusal is not None:
            return
        limits = self._door.limits
        self._body_size += len(piece)
        self._door.held_bytes += len(piece)
        self._body.append(piece)
        if self._body_size > limits.body_bytes:
            self._refusal = errors.body_too_large(limits.body_bytes)
        elif self._door.held_bytes > limits.buffered_bytes:
            self._refusal = errors.out_of_memory(limits.buffered_bytes)
        if self._refusal is not None:
            self._drop_body()

    def on_message_complete(self) -> None:
        if self._refusal is not None:
            return
        target = self._target
        if not target.startswith((b"/", b"*")):
            # Absolute form (RFC 9112 3.2.2): what a client says to a proxy. Path and query are what counts here.
            target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._ready.append(
            Request(
                method=self._parser.get_method(),
                target=target,
                headers=self._headers,
                body=body,
                http11=self._parser.get_http_version() == "1.1",
                keep_alive=self._parser.should_keep_alive(),
            )
        )
        self._body = []
        self._body_size = 0  # the bytes stay counted in held_bytes until the request's answer is given
        self._in_body = False
        self._head_seen = 0

    def _drop_body(self) -> None:
        self._door.held_bytes -= self._body_size
        self._body = []
        self._body_size = 0

    # -- one request after the other ----------------------------------------------------------------------------

    def _next(self) -> None:
        self._request = self._ready.popleft()
        self.started = self.finished = False
        self._task = self._loop.create_task(self._serve(self._request))

    async def _serve(self, request: Request) -> None:
        try:
            await self._door.serve(request, self)
        except asyncio.CancelledError:
            if not self.gone:
                self.abort()
            return
        except Exception:
            log.exception("request failed inside the router: %s %r", request.method.decode("latin-1"), request.path)
            if not self.started:
                self.refuse(errors.Refusal(500, "InternalServerError", "The router failed; its log says how."))
        finally:
            self._door.held_bytes -= len(request.body)
            self._task = None
            self._request = None
            self._valve = None
        if not self.gone:
            self._after_answer(request)

    def _after_answer(self, request: Request) -> None:
        assert self._transport is not None
        if not self.finished:
            self.abort()  # an answer was begun and nobody could finish it: only a broken connection says so honestly
        elif not request.keep_alive or self._door.closing:
            self._transport.close()
        elif self._ready:
            self._next()
        else:
            self._progress = self._loop.time()
            if self._refusal is not None:
                self._turn_away(self._refusal)
                return
            ahead, self._ahead = bytes(self._ahead), bytearray()
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
            if ahead:
                self._feed(ahead)

    def close_if_idle(self) -> None:
        if self._task is None and self._transport is not None:
            self._transport.close()

    def _turn_away(self, refusal: Refusal) -> None:
        """Refuse what could not become a request, and end the connection."""
        assert self._transport is not None
        self._lingering = True
        self._drop_body()
        self._transport.write(refusal.response(close=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(LINGER_SECONDS, self._transport.close)

    # -- the answer ---------------------------------------------------------------------------------------------

    @property
    def stalled(self) -> bool:
        """The client does not read what it was sent."""
        return self._paused

    @property
    def keep_alive(self) -> bool:
        """Whether the connection goes on after the current answer; an answer's head must say so if not."""
        return self._request is not None and self._request.keep_alive and not self._door.closing

    def begin(self, valve: Valve | None = None) -> None:
        """From here on there is an answer. `valve` is stopped while the client does not read."""
        assert not self.started
        self.started = True
        self._valve = valve
        if self._paused and valve is not None:
            valve.pause_reading()

    def write(self, data: bytes) -> None:
        if not self.gone and self._transport is not None:
            self._transport.write(data)

    def finish(self, *, close: bool = False) -> None:
        """The answer is whole. `close`: the connection ends with it, whatever its head said."""
        self.finished = True
        if self._valve is not None:
            self._valve.resume_reading()  # what feeds us may be at work for another client next
            self._valve = None
        if close and self._request is not None:
            self._request.keep_alive = False

    def refuse(self, refusal: Refusal) -> None:
        """Give an answer of the router's own instead of a replica's."""
        request = self._request
        close = not self.keep_alive
        head_only = request is not None and request.method == b"HEAD"
        self.begin()
        self.write(refusal.response(close=close, head_only=head_only))
        self.finish()

    def abort(self) -> None:
        """Break the connection: the client sees an error, not an end."""
        if self._transport is not None:
            self._transport.abort()

    # -- time ---------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        limits = self._door.limits
        period = min(5.0, limits.header_seconds, limits.body_seconds, limits.idle_seconds)
        self._tick = self._loop.call_later(period, self._check_time)

    def _check_time(self) -> None:
        """One lazy timer a connection, so that a request costs no timer of its own."""
        if self._transport is None or self._lingering:
            return
        if self._task is None:
            limits = self._door.limits
            quiet = self._loop.time() - self._progress
            if self._in_body:
                if quiet >= limits.body_seconds:
                    self._turn_away(errors.too_slow("body", limits.body_seconds, "body_timeout_seconds"))
                    return
            elif self._head_seen:
                # For the whole of them: a byte now and then is no progress.
                if self._loop.time() - self._head_since >= limits.header_seconds:
                    self._turn_away(errors.too_slow("headers", limits.header_seconds, "header_timeout_seconds"))
                    return
            elif quiet >= limits.idle_seconds:
                self._transport.close()
                return
        self._arm()
