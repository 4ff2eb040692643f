"""The replica's side: a pool of connections to each, and the parser of what comes back."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, cast

import httptools

from router.names import Name
from router.wire.http import CODING, LENGTH, Head, Headers, fate
from router.wire.known import KnownAnswer, counted, known_answer, worth_keeping

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.config import Address
    from router.wire.errors import Refusal

# A replica's own limit on header bytes is far below; beyond this it is not an HTTP server.
MAX_HEAD_BYTES: Final = 256 * 1024
_NO_HEADERS: Final[Headers] = []
# RFC 9112 4. The parser lets control characters pass here.
REASON: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
# What framing one chunk may cost besides its data.
CHUNK_BYTES: Final = 64
# A request and a body of so few bytes are written as one: to write two pieces costs more than to copy those.
_COPIED_BYTES: Final = 16 * 1024
# How sizes of chunks are written, which costs three times as much as to look it up.
_MOST_SIZE_LINES: Final = 4096
_SIZE_LINES: Final[dict[int, bytes]] = {}


class BrokenError(Exception):
    """The connection to a replica ended, or said something that is not HTTP, before its answer was whole."""


class ExhaustedError(Exception):
    """The process may not open another connection: no replica's fault."""


class Sink(ABC):
    """Where one answer goes. After `complete` (which flushes) or `broken` no call follows, but `parted`."""

    __slots__ = ()

    @abstractmethod
    def head(self, head: Head) -> None: ...

    @abstractmethod
    def body(self, piece: bytes, framed: bytes = b"") -> None:
        """A piece of the answer's body. `framed`: the same as one chunk, if it came as one."""

    @abstractmethod
    def flush(self) -> None:
        """All that one packet brought has been given, and the answer goes on."""

    @abstractmethod
    def complete(self) -> None: ...

    @abstractmethod
    def broken(self, why: BrokenError) -> None: ...

    @abstractmethod
    def lost(self, why: str) -> None:
        """The replica gives no sign of life. What becomes of the exchange is the sink's to decide."""

    @abstractmethod
    def parted(self) -> None:
        """After `complete`: the connection can be at work for another."""

    @abstractmethod
    def shut(self, refusal: Refusal) -> None:
        """The router itself has to end the answer before its end. `refusal` says why."""

    def switched(self, _head: Head, _rest: bytes) -> bool:
        """The replica speaks another protocol from here on, and `rest` is what it has said in it. Whether that was
        asked for: then the connection's transport is the sink's now."""
        return False


class Upstream:
    """One connection to a replica; one exchange at a time. An `asyncio.Protocol`, but not by inheritance: a class that
    is compiled inherits from compiled ones only."""

    __slots__ = (
        "_at_chunk",
        "_complete",
        "_head",
        "_head_only",
        "_head_seen",
        "_headed",
        "_headers",
        "_keep_alive",
        "_loop",
        "_nonsense",
        "_overhead",
        "_parser",
        "_paused",
        "_pool",
        "_reason",
        "_sink",
        "_surplus",
        "_switched",
        "_until_close",
        "answered",
        "heard_at",
        "idle_since",
        "reused",
        "sent_at",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._headed = False  # the answer's head has been passed on
        self._head: Head | None = None  # an answer's that may repeat itself
        self._at_chunk = False  # a chunk of the answer's body has ended, and no other one has begun
        self._headers = _NO_HEADERS
        self._reason = b""
        self._head_only = False
        self._head_seen = 0
        self._complete = False
        self._surplus = False
        self._switched: Sink | None = None  # whose connection this is now
        self._until_close = False
        self._keep_alive = False
        self._nonsense = ""  # what of the answer's head makes none
        self._overhead = 0  # bytes of the answer since its head that are no body: chunk sizes, trailers
        self._paused = False
        self.reused = False
        self.answered = False  # at least one byte of the current answer has come
        self.heard_at = 0.0  # when the last of it came
        self.idle_since = 0.0
        self.sent_at = 0.0

    # -- use ----------------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, sink: Sink, now: float, *, head_only: bool) -> None:
        """Send a request; its answer goes to `sink`. `now`: by the loop. `head_only`: the answer to HEAD has no
        body."""
        assert self.transport is not None
        assert self._sink is None
        self._sink = sink
        self._head_only = head_only
        self._headed = False
        self._head_seen = 0
        self._complete = self._surplus = self._until_close = self._keep_alive = self._at_chunk = False
        self._nonsense = ""
        self._overhead = 0
        self.answered = False
        self.sent_at = now
        if len(body) > _COPIED_BYTES:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head + body)

    def leave(self, sink: Sink) -> None:
        """Give up the exchange of `sink`: closing is the only way to tell a replica that nobody waits for its answer.
        Where the exchange has ended, the connection may be at work for another one by now, and is left alone."""
        if self._sink is not sink and self._switched is not sink:
            return
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    def drop(self) -> None:
        """Nobody waits for it any more. Where that comes about in the moment that it opens, uvloop closes the transport
        and does not say so."""
        if self.transport is not None:
            self.transport.abort()
        self._parser = None
        self._pool.forget(self)

    def lost(self, why: str) -> None:
        """The replica gives no sign of life."""
        sink = self._sink or self._switched
        if sink is not None:
            sink.lost(why)

    def pause_reading(self) -> None:
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # -- the socket ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance
        self.transport = transport
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            # Bytes that answer no request: this is no connection to send another one on.
            if self.transport is not None:
                self.transport.abort()
            return
        self.answered = True
        self.heard_at = self._loop.time()
        whole = not self._headed and not self._head_seen  # an answer begins with it
        if whole:
            known = self._pool.known
            if known is not None and not self._head_only and (at := known.body_at(data)) >= 0:
                self._pool.unknown = 0
                self._whole(sink, known.head(len(data) - at), data[at:])
                return
        elif self._at_chunk and (piece := _one_chunk(data)):
            sink.body(piece, data)
            if self._sink is not None:
                sink.flush()
            return
        if not self._headed:
            self._head_seen += len(data)
        else:
            self._overhead += len(data)
        self._at_chunk = False
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._switch(sink, data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if not self._complete:
                self._fail(f"its answer is not valid HTTP: {error}")
                return
            self._surplus = True
        if self._nonsense:
            self._fail(f"its answer's {self._nonsense} makes no sense")
            return
        if (self._head_seen if not self._headed else self._overhead) > MAX_HEAD_BYTES:
            part = "headers" if not self._headed else "trailers"
            self._fail(f"its answer's {part} exceed {MAX_HEAD_BYTES} bytes")
            return
        if self._sink is None:
            return
        if self._complete:
            head, self._head = self._head, None
            if whole and head is not None and self._keep_alive and not self._surplus:
                self._pool.learn(data, head)
            self._end()
        else:
            # What stands behind a chunk is the next one's size, as far as it has come.
            self._at_chunk = self._at_chunk and data.endswith(b"\r\n")
            sink.flush()

    def _whole(self, sink: Sink, head: Head, body: bytes) -> None:
        """A whole answer whose head is known."""
        self._headed = self._complete = self._keep_alive = True
        sink.head(head)
        if body and self._sink is not None:
            sink.body(body)
        if self._sink is not None:
            self._end()

    def _switch(self, sink: Sink, rest: bytes) -> None:
        """It says that it speaks another protocol from here on."""
        self._sink, self._switched = None, sink
        assert self._parser is not None
        if not sink.switched(Head(self._parser.get_status_code(), self._reason, self._headers), rest):
            self._sink, self._switched = sink, None
            self._fail("it switched protocols unasked")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._parser = None  # each holds the other: not to wait for the garbage collector
        if self._sink is None:
            return
        if self._until_close and exc is None:
            self._end()
        elif not self._headed:
            self._fail("it closed the connection without an answer" if exc is None else _name(exc))
        else:
            self._fail("it closed the connection in the middle of its answer" if exc is None else _name(exc))

    def _fail(self, why: str) -> None:
        sink, self._sink = self._sink, None
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.broken(BrokenError(why))

    def _end(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.complete()  # its last write may pause us: only then may the connection be passed on
        unsent = self.transport is not None and self.transport.get_write_buffer_size() > 0
        if self._head_only or self._until_close or self._surplus or unsent or not self._keep_alive:
            # It answered before it had read the whole request: the rest would stand before the next one.
            # After HEAD the parser waits for a body that never comes; a new connection is cheaper than a second parser.
            if self.transport is not None:
                self.transport.close()
        else:
            self.resume_reading()
            self._pool.give_back(self, self.heard_at)
        if sink is not None:
            sink.parted()

    # -- httptools' callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = []
        self._reason = b""
        if self._complete:
            self._surplus = True

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:
            self._headers.append((name, value))
        elif not self._complete and fate(name) in (LENGTH, CODING):
            self._nonsense = "trailers"  # framing told when all is said: where the answer ends is a matter of taste

    def on_headers_complete(self) -> None:
        if self._complete or self._nonsense:
            return
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if 100 <= status < 200:
            return  # interim (RFC 9110 15.2): the answer proper follows
        head = Head(status, self._reason, self._headers)
        codings = head.codings
        if not 200 <= status < 600 or (self._reason != b"OK" and not REASON.fullmatch(self._reason)):
            self._nonsense = "status"
            return
        if codings and (codings != [b"chunked"] or parser.get_http_version() == "1.0"):
            # Other codings would reach the client unnamed; HTTP/1.0 knows none (RFC 9112 6.1).
            self._nonsense = "Transfer-Encoding"
            return
        self._headed = True
        self._head = head if status == 200 and codings is None else None
        self._headers, self._reason = _NO_HEADERS, b""
        if not head.bodiless and not self._head_only:
            self._until_close = not (head.length or codings)
        if self._sink is not None:
            self._sink.head(head)
        if self._head_only:
            self._complete = True

    def on_chunk_header(self) -> None:
        self._at_chunk = False

    def on_chunk_complete(self) -> None:
        self._at_chunk = True

    def on_body(self, piece: bytes) -> None:
        # With its framing: to be told of each chunk's beginning would take a callback more.
        self._overhead = max(0, self._overhead - len(piece) - CHUNK_BYTES)
        if self._sink is not None and self._headed and not self._complete:
            self._sink.body(piece)

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            assert self._parser is not None
            self._keep_alive = self._parser.should_keep_alive()  # the parser knows it only here


class Pool:
    """Connections to one replica. Most recently used first, so that idle ones age and are closed."""

    def __init__(
        self, address: Address, *, connect_seconds: float, idle_seconds: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self.authority = address.authority.encode("latin-1")
        self.base = address.base.encode("latin-1")
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._tls = tls if tls is not None else (ssl.create_default_context() if address.tls else None)
        self._idle: list[Upstream] = []  # the one that was used last is the last
        self.known: KnownAnswer | None = None
        """What its last answer began with, where that may come again."""
        self.unknown = 0
        """Heads in a row that were not known."""
        self.open: set[Upstream] = set()
        """All connections there are, idle ones among them."""
        self._loop = asyncio.get_running_loop()
        self._name = Name(address.host, address.port)

    async def connect(self) -> Upstream:
        """A new connection. Raises `BrokenError` where there is none to be had, `ExhaustedError` where this process may
        not open another."""
        where, made, connection = "", False, Upstream(self)
        try:
            async with asyncio.timeout(self._connect_seconds):
                where = await self._name.resolve()
                await self._loop.create_connection(
                    cast("Callable[[], asyncio.Protocol]", lambda: connection),
                    where,
                    self.address.port,
                    ssl=self._tls,
                    server_hostname=self.address.host if self._tls is not None else None,
                )
            made = True
        except TimeoutError:
            self._name.doubt(where)
            raise BrokenError(f"no connection within {self._connect_seconds:g} s (connect_timeout_seconds)") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ExhaustedError from None
            self._name.doubt(where)
            raise BrokenError(_name(error)) from None
        finally:
            if not made:
                connection.drop()
        return connection

    def take_idle(self, now: float) -> Upstream | None:
        """A kept connection, if there is one that may be used again. `now`: by the loop."""
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if now - connection.idle_since >= self._idle_seconds:
                connection.transport.abort()
                continue
            connection.reused = True
            return connection
        return None

    def give_back(self, connection: Upstream, since: float) -> None:
        """Keep a connection that has been idle since then."""
        if connection.transport is None or connection.transport.is_closing():
            return
        connection.idle_since = since
        self._idle.append(connection)

    def learn(self, data: bytes, head: Head) -> None:
        """`data`: a whole answer with this head, which was parsed."""
        self.unknown += 1
        self.known = known_answer(data, head) if worth_keeping(self.unknown) else None

    def forget(self, connection: Upstream) -> None:
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def lost(self, why: str) -> None:
        """The replica gives no sign of life: no connection to it is used again, and those in use are told."""
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.transport is not None:
                connection.transport.abort()
        for connection in list(self.open):
            connection.lost(why)

    def close_idle(self, *, older_than: float | None = None) -> None:
        """Close connections idle for `older_than` seconds (default: the pool's own bound, below the engine's 5 s)."""
        bound = self._idle_seconds if older_than is None else older_than
        now = self._loop.time()
        while self._idle and now - self._idle[0].idle_since >= bound:
            connection = self._idle.pop(0)
            if connection.transport is not None:
                connection.transport.close()


def _one_chunk(data: bytes) -> bytes:
    """The data of the one chunk that `data` is, framed as all frame it; empty where it is anything else."""
    size = counted(len(data) - 4, 16)
    if size <= 0 or not data.endswith(b"\r\n"):
        return b""
    line = _size_line(size)
    at = len(line)
    return data[at:-2] if at + size + 2 == len(data) and data.startswith(line) else b""


def _size_line(size: int) -> bytes:
    known = _SIZE_LINES.get(size)
    if known is None:
        known = b"%x\r\n" % size
        if size < _MOST_SIZE_LINES:
            _SIZE_LINES[size] = known
    return known


def _name(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text[0].lower() + text[1:]
