"""The client's side: bytes in, one whole request after the other, answers out.

One protocol serves every path and method. It parses with httptools (llhttp, strict), keeps every limit while bytes
arrive, and gives each request to `Door.serve`, whose work for it is called off the moment its client leaves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import httptools

from router.wire import errors
from router.wire.alarms import Alarm, Alarms
from router.wire.errand import Task
from router.wire.http import (
    CODING,
    CROSSES,
    EXPECT,
    HOST,
    LENGTH,
    RANK,
    REQUEST_ID,
    Headers,
    Request,
    closes,
    crossing,
    fate,
    path_of,
)
from router.wire.keys import Keys
from router.wire.known import MOST_DIGITS, KnownRequest, known_request, worth_keeping

if TYPE_CHECKING:
    from router.wire.errors import Refusal
    from router.wire.upstream import Sink

log = logging.getLogger("warmroute.front")

# The most that a client may send ahead of its answers (pipelining).
AHEAD_BYTES: Final = 1024 * 1024
# What framing one chunk may cost besides its data: its size, its line ends, a short extension.
CHUNK_BYTES: Final = 64
# A body slower than this over a minute holds memory for nothing.
MIN_BODY_BYTES_PER_SECOND: Final = 1024
# What HTTP is spoken with here; the parser knows the methods of RTSP and others too.
METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"})
# RFC 9112 3.2: a path, the whole server, or what a proxy is told; that names a host.
TARGET: Final = re.compile(rb"/|\*\Z|https?://[^/?]")
# A slow reader may leave this much unsent before the replica's side is paused; what one more read brings (256 KiB at
# the most) comes on top, and passes through several copies at once.
WRITE_HIGH_BYTES = 64 * 1024
_NO_HEADERS: Final[Headers] = []
# After an early refusal the rest of the request is read and dropped this long, or the client's kernel would
# throw our answer away with the reset that closing on unread bytes causes.
LINGER_SECONDS: Final = 5.0


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
    connections_per_address: int = 0
    """0 sets no bound."""


def _untold(_status: int, _front: Front) -> None:
    pass


def _alarms() -> Alarms:
    return Alarms(asyncio.get_running_loop())


@dataclass(slots=True, eq=False)
class Door:
    """What all client connections share."""

    serve: Callable[[Request, Front, Callable[[Task], None]], Task]
    """Begins to answer a request. The last argument is told of its end."""
    limits: Limits
    refused: Callable[[int, Front], None] = _untold
    """Told the status of what was refused before it was a request, and whose it was."""
    keys: Keys | None = None
    """Those who may enter; None lets in everybody."""
    connections: set[Front] = field(default_factory=set)
    addresses: Counter[str] = field(default_factory=Counter)
    """Open connections by where they come from."""
    held_bytes: int = 0
    closing: bool = False
    alarms: Alarms = field(default_factory=_alarms)

    def connection(self) -> Front:
        return Front(self)

    def drain(self) -> None:
        """From now on each connection closes after the answer it is giving; idle ones close at once."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def cut(self) -> None:
        """End what still runs, with a word where one can be said."""
        for connection in list(self.connections):
            connection.cut()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class Front:
    """One client connection. An `asyncio.Protocol`, but not by inheritance: a class that is compiled inherits from
    compiled ones only."""

    __slots__ = (
        "_ahead",
        "_alarm",
        "_body",
        "_body_since",
        "_body_size",
        "_chunks",
        "_closing",
        "_door",
        "_head_seen",
        "_head_since",
        "_head_size",
        "_headers",
        "_http11",
        "_id",
        "_in_body",
        "_key",
        "_known",
        "_lingering",
        "_method",
        "_overhead",
        "_parser",
        "_parsing",
        "_paused",
        "_progress",
        "_rank",
        "_ready",
        "_refusal",
        "_repeats",
        "_request",
        "_sink",
        "_target",
        "_task",
        "_told",
        "_transport",
        "_unknown",
        "_unsent",
        "_upgraded_body",
        "_valve",
        "finished",
        "gone",
        "loop",
        "peer",
        "sent",
        "started",
    )

    def __init__(self, door: Door) -> None:
        self._door = door
        self.loop = asyncio.get_running_loop()
        """What this connection, and those who are at work for it, run in."""
        self._parser: httptools.HttpRequestParser | None = None
        self._parsing = False  # a request has begun to come
        self._repeats = False  # its head may come again, and mean the same
        self._known: KnownRequest | None = None  # the last head that did
        self._unknown = 0  # heads in a row that were not known
        self._transport: asyncio.Transport | None = None
        self._task: Task | None = None
        self._told: Callable[[Task], None] | None = self._served  # made once, and not for each request
        self._request: Request | None = None
        self._ready: list[Request] = []  # hardly ever more than one, and an empty deque is ten times a list
        self._ahead: bytearray | None = None
        self._target = b""
        self._headers = _NO_HEADERS
        self._key = ""
        self._id = self._rank = b""
        self._body: list[bytes] | None = None
        self._body_size = 0
        self._head_seen = 0  # bytes fed since the last message's end
        self._head_since = self._body_since = 0.0
        self._overhead = 0  # bytes of a message that are no body: its head, chunk sizes, trailers
        self._chunks = 0
        self._head_size = 0  # bytes of the request line and headers that were parsed
        self._in_body = False
        self._http11 = False
        self._method = b""
        self._upgraded_body = False  # there is one, and the parser will not read it
        self._refusal: Refusal | None = None
        self._lingering = False
        self._paused = False
        self._closing = False
        self._unsent = 0
        self._valve: Valve | None = None
        self._sink: Sink | None = None
        self._progress = self.loop.time()
        self._alarm: Alarm | None = None
        self.peer = ""  # where the client is
        self.sent = 0  # bytes of the current answer, its head and framing among them
        self.gone = False
        self.started = False  # the current answer's head has been written
        self.finished = False  # the current answer is whole

    # -- the socket ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._door.connections.add(self)
        limits, addresses = self._door.limits, self._door.addresses
        self.peer = _origin(transport.get_extra_info("peername"))
        addresses[self.peer] += 1
        if len(self._door.connections) > limits.connections:
            self._turn_away(errors.too_many_connections(limits.connections))
            return
        if 0 < limits.connections_per_address < addresses[self.peer]:
            self._turn_away(errors.too_many_from_one(limits.connections_per_address))
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._parser = self._told = None  # each holds the other: not to wait for the garbage collector
        self._door.connections.discard(self)
        if self._door.addresses[self.peer] > 1:
            self._door.addresses[self.peer] -= 1
        else:
            del self._door.addresses[self.peer]
        self._drop_body()
        self._ahead = None
        for request in self._ready:
            self._door.held_bytes -= len(request.body)
        self._ready.clear()
        if self._alarm is not None:
            self._alarm.discard(self)
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
        elif self._task is None and not self._closing and not self._lingering:
            if self._ready:
                self._next()
            elif ahead := self._take_ahead():
                self._feed(ahead)

    def data_received(self, data: bytes) -> None:
        self._progress = self.loop.time()
        if self._lingering or self._closing:
            return
        if self._task is not None or self._ready or self._paused:
            # The client is ahead of its answer. Reading goes on, since only reading shows that it left; so it is broken
            # off with one that is too far ahead.
            self._add_ahead(data)
            return
        self._feed(data)

    def _add_ahead(self, data: bytes) -> None:
        if self._ahead is None:
            self._ahead = bytearray()
        self._ahead += data
        if len(self._ahead) > AHEAD_BYTES:
            self.abort()

    def _take_ahead(self) -> bytes:
        if self._ahead is None:
            return b""
        ahead, self._ahead = bytes(self._ahead), None
        return ahead

    def _feed(self, data: bytes) -> None:
        whole = not self._parsing and not self._head_seen  # a request begins with it
        known = self._known
        if known is not None and whole and (at := known.body_at(data)) >= 0 and self._again(known, data[at:]):
            return
        upgrade = False
        self._overhead += len(data)
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            if self._upgraded_body:
                self._ignore_upgrade(data[found.args[0] :])
                return
            # An Upgrade may be ignored (RFC 9110 7.8), but what follows on this connection is not HTTP to us.
            upgrade = True
            if self._ready and self._ready[-1].upgrade:
                self._add_ahead(data[found.args[0] :])
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if self._refusal is None:
                self._refusal = errors.bad_request(str(error) or type(error).__name__)
        if self._in_body:
            self._bound_head(self._overhead - CHUNK_BYTES * self._chunks)
        elif not self._ready:
            if not self._head_seen:
                self._head_since = self._progress
            # Headers that never end are seen here only: the parser keeps them to itself until they do.
            self._head_seen += len(data)
            self._bound_head(self._head_seen)
        if upgrade and self._ready and self._refusal is None:
            self._ready[-1].keep_alive = False
        if self._ready and self._task is None:
            if whole and self._repeats and not self._parsing:
                self._known = self._remember(data, self._ready[-1])
            self._next()
        elif self._refusal is not None:
            self._turn_away(self._refusal)

    def _remember(self, data: bytes, request: Request) -> KnownRequest | None:
        """The head of a request that may come again, whatever its length."""
        limits, keys = self._door.limits, self._door.keys
        self._unknown += 1
        if not worth_keeping(self._unknown):
            return None
        if not request.keep_alive or self._head_size + MOST_DIGITS > limits.header_bytes:
            return None
        return known_request(data, request, limits, keys)

    def _again(self, known: KnownRequest, body: bytes) -> bool:
        """Serve a request with a known head. False where it would not be judged as the one before it was."""
        door, size = self._door, len(body)
        limits = door.limits
        if (
            not known.holds(limits, door.keys)
            or size > limits.body_bytes
            or door.held_bytes + size > limits.buffered_bytes
        ):
            return False
        door.held_bytes += size
        self._unknown = 0
        self._begin(known.request(body))
        return True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request once more that offers another protocol and has a body, as Java's clients send them: the parser
        takes that for the other protocol's."""
        assert self._parser is not None
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (self._method, self._target, version)]
        lines += [b"%s: %s\r\n" % header for header in self._headers if header[0].lower() != b"upgrade"]
        self._upgraded_body = False
        self._parser = None
        self._feed(b"".join(lines) + b"\r\n" + rest)

    # -- httptools' callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._parsing = True
        self._target = b""
        self._id = self._rank = b""
        self._headers = []
        self._drop_body()
        self._in_body = False
        self._head_seen = self._head_size = self._chunks = 0
        self._overhead = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_size += len(url)
        if self._head_size > self._door.limits.header_bytes:
            self._bound_head(self._head_size)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: nothing here needs it, and merging it into the headers is unsafe (RFC 9110 6.5.1)
        headers, limits = self._headers, self._door.limits
        headers.append((name, value))
        self._head_size += len(name) + len(value)
        if self._head_size > limits.header_bytes:
            self._bound_head(self._head_size)
        if len(headers) > limits.header_count and self._refusal is None:
            self._refusal = errors.headers_too_large(f"{limits.header_count} lines", "max_headers")

    def _bound_head(self, size: int) -> None:
        limit = self._door.limits.header_bytes
        if size > limit and self._refusal is None:
            self._refusal = errors.headers_too_large(f"{limit} bytes", "max_header_bytes")

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._repeats = False
        limits, parser = self._door.limits, self._parser
        assert parser is not None
        hosts = lengths = 0
        expects = False
        codings = []
        for name, value in self._headers:
            what = fate(name)
            if what == CROSSES:
                continue
            if what == HOST:
                hosts += 1
            elif what == LENGTH:
                lengths = int(value)  # llhttp has proven it to be digits
            elif what == EXPECT and value.lower() == b"100-continue":
                expects = True
            elif what == REQUEST_ID:
                self._id = self._id or value
            elif what == RANK:
                self._rank = self._rank or value
            elif what == CODING:
                codings.append(value.strip().lower())
        if self._refusal is not None:
            return
        method = self._method = parser.get_method()
        if (lengths or codings) and parser.should_upgrade() and method != b"CONNECT":
            self._upgraded_body = True
            return
        self._body_since = self._progress
        if self._door.keys is not None and not self._admitted(self._door.keys):
            self._refusal = errors.unauthorized()
            return
        version = parser.get_http_version()
        self._http11 = version == "1.1"
        if version not in ("1.0", "1.1"):
            self._refusal = errors.bad_request("the version is neither 1.0 nor 1.1")
        elif hosts > 1 or (hosts == 0 and version == "1.1"):
            self._refusal = errors.bad_request("exactly one Host header is needed")
        elif codings and (codings != [b"chunked"] or version == "1.0"):
            # Other codings would reach the replica unnamed; HTTP/1.0 knows none (RFC 9112 6.1).
            self._refusal = errors.bad_request("of Transfer-Encoding only `chunked` is served, in HTTP/1.1")
        elif method not in METHODS:
            self._refusal = errors.bad_request(f"{method.decode('latin-1')} is not served here")
        elif not self._target.startswith(b"/") and not TARGET.match(self._target):
            self._refusal = errors.bad_request("the target is no path")
        elif lengths > limits.body_bytes:
            self._refusal = errors.body_too_large(limits.body_bytes)
        elif self._door.held_bytes + lengths > limits.buffered_bytes:
            self._refusal = errors.out_of_memory(limits.buffered_bytes)
        elif not expects:
            self._repeats = self._http11 and not codings
        elif self._http11 and self._transport is not None and self._task is None and not self._ready:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _admitted(self, keys: Keys) -> bool:
        """Judged before the body has come: strangers hold no memory."""
        admitted = keys.admit(self._method, self._target, self._headers)
        if admitted is not None:
            self._key, self._headers = admitted
        return admitted is not None

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, piece: bytes) -> None:
        if self._refusal is not None:
            return
        limits = self._door.limits
        self._overhead -= len(piece)
        self._body_size += len(piece)
        self._door.held_bytes += len(piece)
        if self._body is None:
            self._body = [piece]
        else:
            self._body.append(piece)
        if self._body_size > limits.body_bytes:
            self._refusal = errors.body_too_large(limits.body_bytes)
        elif self._door.held_bytes > limits.buffered_bytes:
            self._refusal = errors.out_of_memory(limits.buffered_bytes)
        if self._refusal is not None:
            self._drop_body()

    def on_message_complete(self) -> None:
        self._parsing = False
        if self._refusal is not None or self._upgraded_body:
            return
        parser = self._parser
        assert parser is not None
        target = self._target
        if not target.startswith((b"/", b"*")):
            # Absolute form (RFC 9112 3.2.2): what a client says to a proxy. Path and query are what counts here.
            rest = target.partition(b"://")[2]
            cut = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
            target = rest[cut:] if rest[cut : cut + 1] == b"/" else b"/" + rest[cut:]
        pieces = self._body
        body = b"" if pieces is None else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._ready.append(
            Request(
                method=self._method,
                target=target,
                path=path_of(target),
                lines=crossing(self._headers),
                body=body,
                http11=self._http11,
                # Of HTTP/1.0 with both words the parser heeds the other one (RFC 9112 9.3).
                keep_alive=parser.should_keep_alive() and (self._http11 or not closes(self._headers)),
                key=self._key,
                id=self._id,
                rank=self._rank,
                upgrade=self._upgrade(parser) if parser.should_upgrade() else b"",
            )
        )
        self._headers = _NO_HEADERS
        self._body = None
        self._body_size = 0  # the bytes stay counted in held_bytes until the request's answer is given
        self._in_body = False
        self._head_seen = 0

    def _upgrade(self, parser: httptools.HttpRequestParser) -> bytes:
        """The protocol asked for, if it is WebSocket (RFC 6455 4.1). Others are not passed on: HTTP/2 spoken through us
        (`h2c`) would be requests that nobody here has looked at."""
        asked = b", ".join(value for name, value in self._headers if name.lower() == b"upgrade")
        plain = self._method == b"GET" and not self._body_size
        return asked if self._http11 and plain and asked.strip().lower() == b"websocket" else b""

    def _drop_body(self) -> None:
        self._door.held_bytes -= self._body_size
        self._body = None
        self._body_size = 0

    # -- one request after the other ----------------------------------------------------------------------------

    def _next(self) -> None:
        """Serve the next request that has arrived, unless the client has yet to read what it was sent before."""
        if self._paused:
            return  # resume_writing goes on
        self._begin(self._ready.pop(0))

    def _begin(self, request: Request) -> None:
        assert self._told is not None
        self._request = request
        self.started = self.finished = False
        self.sent = 0
        self._task = self._door.serve(request, self, self._told)

    def _served(self, task: Task) -> None:
        request = self._request
        assert request is not None
        self._door.held_bytes -= len(request.body)
        self._task = None
        if task.cancelled:
            if not self._closing:
                self.abort()
        elif (error := task.error) is not None:
            method = request.method.decode("latin-1")
            log.error("request failed inside the router: %s %r", method, request.path, exc_info=error)
            if not self.started:
                self.refuse(errors.Refusal(500, "InternalServerError", "The router failed; its log says how."))
        self._request = None
        self._valve = None
        self._sink = None
        if not self.gone and not task.cancelled:
            self._after_answer(request)

    def _after_answer(self, request: Request) -> None:
        assert self._transport is not None
        self._progress = self.loop.time()
        if not self.finished:
            self.abort()  # an answer was begun and nobody could finish it: only a broken connection says so honestly
        elif not request.keep_alive or self._door.closing:
            self._close()
        elif self._ready:
            self._next()
        elif self._refusal is not None:
            self._turn_away(self._refusal)
        elif not self._paused and (ahead := self._take_ahead()):
            self._feed(ahead)

    def close_if_idle(self) -> None:
        """Close, unless a request is arriving or being answered."""
        if self._task is None and not self._ready and not self._head_seen and not self._in_body:
            self._close()

    def _close(self) -> None:
        """Close once the client has read what it was sent; `check_time` sees to it that it does."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _turn_away(self, refusal: Refusal) -> None:
        """Refuse what could not become a request, and end the connection."""
        assert self._transport is not None
        self._lingering = True
        self._door.refused(refusal.status, self)
        self._drop_body()
        self._transport.write(refusal.response(close=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self._transport.abort)

    # -- the answer ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Of the request that is arriving, as far as it has come; without its query."""
        return path_of(self._target)

    @property
    def stalled(self) -> bool:
        """The client does not read what it was sent."""
        return self._paused

    @property
    def keep_alive(self) -> bool:
        """Whether the connection goes on after the current answer; an answer's head must say so if not."""
        return self._request is not None and self._request.keep_alive and not self._door.closing

    def begin(
        self,
        valve: Valve | None = None,
        sink: Sink | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        """From here on there is an answer. `valve` is stopped while the client does not read; `sink` is what passes the
        answer on, and can end it before its end. `lasting`: it is likely to take long."""
        assert not self.started
        self.started = True
        if lasting and not self._parsing:
            # Nothing is parsed meanwhile, and to make them anew is cheaper than to hold them.
            self._parser = self._known = None
        self._valve = valve
        self._sink = sink
        if self._paused and valve is not None:
            valve.pause_reading()

    def adjourn(self) -> None:
        """What fed the answer has ended, and it may go on from elsewhere."""
        if self._valve is not None:
            self._valve.resume_reading()
            self._valve = None

    def go_on(self, valve: Valve, sink: Sink) -> None:
        """The answer goes on from another connection."""
        assert self.started
        self._valve = valve
        self._sink = sink
        if self._paused:
            valve.pause_reading()

    def leave_http(self) -> tuple[asyncio.Transport, bytes]:
        """Another protocol is spoken from here on: the connection, and what the client has said in it. No answer of
        HTTP follows; the connection ends with the request's task, or the task with the connection."""
        assert self._transport is not None
        self.begin()
        self.finish(close=True)
        return self._transport, self._take_ahead()

    def write(self, data: bytes) -> None:
        if not self.gone and self._transport is not None:
            self.sent += len(data)
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
        self.write(
            refusal.response(close=close, head_only=head_only, request_id=b"" if request is None else request.id)
        )
        self.finish()

    def cut(self) -> None:
        """Our time is up: a request without an answer is refused, an answer is broken off, and the connection ends."""
        if self._task is None or self.finished or self.gone:
            self.abort()
        elif self.started:
            self.abort() if self._sink is None else self._sink.shut(errors.cut_stream())
        else:
            assert self._request is not None
            self._request.keep_alive = False
            self.refuse(errors.shutting_down())
            self._close()
            self._task.cancel()

    def abort(self) -> None:
        """Break the connection: the client sees an error, not an end."""
        if self._transport is not None:
            self._transport.abort()

    # -- time ---------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        limits = self._door.limits
        period = min(5.0, limits.header_seconds, limits.body_seconds, limits.idle_seconds)
        self._alarm = self.alarms.after(period, self)

    @property
    def alarms(self) -> Alarms:
        """What calls this connection, and those who are at work for it, at their times."""
        return self._door.alarms

    def check_time(self) -> None:
        """Once in a while, whatever the connection does, so that a request sets no alarm of its own."""
        if self._transport is None or self._lingering or self.gone:
            return
        if self._task is None and not self._judge_time():
            return
        self._arm()

    def _judge_time(self) -> bool:
        """Whether the connection may go on as it is; it is ended here otherwise."""
        assert self._transport is not None
        limits = self._door.limits
        now = self.loop.time()
        unsent = self._transport.get_write_buffer_size()
        if unsent:
            # It has an answer to read. As long as it reads it may take its time.
            if unsent != self._unsent:
                self._unsent, self._progress = unsent, now
            if now - self._progress >= limits.idle_seconds:
                self.abort()
                return False
        elif self._closing:
            return True
        elif self._in_body:
            arriving = now - self._body_since
            slow = arriving >= 60.0 and self._body_size < MIN_BODY_BYTES_PER_SECOND * arriving
            if slow or now - self._progress >= limits.body_seconds:
                self._turn_away(errors.too_slow("body", limits.body_seconds, "body_timeout_seconds"))
                return False
        elif self._head_seen:
            # For the whole of them: a byte now and then is no progress.
            if now - self._head_since >= limits.header_seconds:
                self._turn_away(errors.too_slow("headers", limits.header_seconds, "header_timeout_seconds"))
                return False
        elif now - self._progress >= limits.idle_seconds:
            self._close()
        return True


def _origin(peer: Any) -> str:
    """What counts as one address: an IPv6 network, of which one client has as many addresses as it likes; all that come
    over a unix socket together."""
    host = peer[0] if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
