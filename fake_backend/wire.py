"""HTTP/1.1 as a vLLM replica speaks it: uvicorn's framing, header names and keep-alive, on asyncio and httptools.

A request is read whole, then handed on; whoever answers gets an :class:`Exchange`. When the client leaves, or a fault
resets the connection, the task that answers is cancelled: before the first byte, between bytes, streaming or not.
"""

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qsl, unquote

import httptools

KEEP_ALIVE_SECONDS = 5.0
"""uvicorn's timeout_keep_alive, which vLLM leaves as it is."""

Headers = Sequence[tuple[str, str]]
Handler = Callable[["Exchange"], Awaitable[None]]

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class _Date:
    """The ``date`` header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def __call__(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text


_date = _Date()


class ClientGoneError(Exception):
    """Nobody is there to write to."""


class Request:
    """One request, read to its end."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query", "version")

    def __init__(self, method: str, target: str, headers: Mapping[str, str], version: str, keep_alive: bool) -> None:
        path, _question, query = target.partition("?")
        if "://" in path:
            path = "/" + path.split("://", 1)[1].partition("/")[2]
        self.method = method
        self.path = unquote(path)
        self.query = dict(parse_qsl(query, keep_blank_values=True))
        self.headers = headers
        """Names in lower case; the last of several values."""
        self.body = b""
        self.version = version
        self.keep_alive = keep_alive


class Exchange:
    """A request and the way back to the client."""

    def __init__(self, request: Request, connection: "Connection") -> None:
        self.request = request
        self.status = 0
        """Of the answer; 0 before it has begun."""
        self.extra_headers: list[tuple[str, str]] = []
        """Sent with whatever answer comes."""
        self.bytes_out = 0
        self.filter: Callable[[bytes], bytes] | None = None
        """A fault's hand on what is written: it returns what goes out instead, or ends the exchange."""
        self.pause = 0.0
        """Seconds to wait whenever the client has kept up; a fault's way to slow a stream down."""
        self._connection = connection
        self._chunked = False
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def reply(self, status: int, body: bytes = b"", headers: Headers = ()) -> None:
        """A whole answer."""
        self._head(status, [("content-length", str(len(body))), *headers])
        if self.request.method != "HEAD" and body:
            self.bytes_out += len(body)
            self._connection.write(self.filter(body) if self.filter else body)
        self.end()

    def open(self, status: int, headers: Headers) -> None:
        """Begin an answer of unknown length."""
        self._head(status, [*headers, ("transfer-encoding", "chunked")])
        self._chunked = self.request.method != "HEAD"

    def send(self, data: bytes) -> None:
        """One chunk, framed and handed to the socket in one piece."""
        if self.filter is not None:
            data = self.filter(data)
        if data and self._chunked:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.bytes_out += len(data)

    async def drain(self) -> None:
        """Wait until the client has read enough; raises ClientGoneError if it never will."""
        await self._connection.drain()
        if self.pause:
            await asyncio.sleep(self.pause)

    def end(self) -> None:
        """The answer is complete."""
        if self._ended:
            return
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._ended = True

    def raw(self, data: bytes) -> None:
        """Bytes that are no HTTP of ours; the connection is closed after this exchange."""
        self.status = self.status or 200
        self.request.keep_alive = False
        self._connection.write(data)

    def cut(self) -> None:
        """Close the connection in the middle of whatever was being said."""
        self._ended = True
        self._connection.close()

    def reset(self) -> None:
        """Reset the connection (RST)."""
        self._ended = True
        self._connection.reset()

    def _head(self, status: int, headers: Headers) -> None:
        self.status = status
        reason = _REASONS.get(status, "")
        lines = [f"HTTP/1.1 {status} {reason}", f"date: {_date()}", "server: uvicorn"]
        lines += [f"{name}: {value}" for name, value in (*headers, *self.extra_headers)]
        if not self.request.keep_alive:
            lines.append("connection: close")
        self._connection.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


class Connection(asyncio.Protocol):
    """One client connection; answers its requests in order."""

    def __init__(self, listener: "Listener") -> None:
        self._listener = listener
        self._handler = listener.handler
        self._connections = listener.connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._closing = False
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._request: Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        self._writable.set()
        self._stop_idle()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._stop_idle()
        if self._closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._refuse()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        self._request = Request(
            self._parser.get_method().decode("latin-1"),
            self._target.decode("latin-1"),
            self._headers,
            version,
            self._parser.should_keep_alive() and version != "1.0",
        )
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._target, self._headers, self._body = b"", {}, []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._request is not None
        self._request.body = b"".join(self._body)
        self._body = []
        self._waiting.append(self._request)
        self._request = None
        if self._task is None:
            self._task = self._loop.create_task(self._answer())
        elif self._transport is not None:
            self._transport.pause_reading()

    async def _answer(self) -> None:
        """Answer what has been read, one after the other."""
        try:
            while self._waiting and not self._closing:
                request = self._waiting.popleft()
                exchange = Exchange(request, self)
                with suppress(ClientGoneError):
                    await self._handler(exchange)
                if not exchange.ended:
                    exchange.cut()
                if not request.keep_alive:
                    self.close()
        finally:
            self._task = None
        if self._transport is not None and not self._closing:
            self._transport.resume_reading()
            self._idle = self._loop.call_later(self._listener.keep_alive, self.close)

    def write(self, data: bytes) -> None:
        if self._transport is None:
            raise ClientGoneError
        self._transport.write(data)

    async def drain(self) -> None:
        if not self._writable.is_set():
            await self._writable.wait()
        if self._transport is None:
            raise ClientGoneError

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Closing a socket that lingers for no time sends RST (RFC 9293 3.10.7, SO_LINGER)."""
        self._closing = True
        if self._transport is None:
            return
        raw = self._transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _refuse(self) -> None:
        text = b"Invalid HTTP request received."
        self.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
        )
        self.close()

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


class Listener:
    """A listening address that can stop listening and come back at the same place."""

    def __init__(self, handler: Handler, host: str, port: int) -> None:
        self.handler = handler
        self.host = host
        self.port = port
        """The port in use; 0 is replaced by the one the system gave."""
        self.keep_alive = KEEP_ALIVE_SECONDS
        """Idle seconds after which a connection is closed."""
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises OSError if the address is taken."""
        if self._server is not None:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self.host, self.port, backlog=2048, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self, *, reset: bool = False) -> None:
        """Stop listening and end every connection; new ones are refused until :meth:`open`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            if reset:
                connection.reset()
            else:
                connection.close()
        await asyncio.sleep(0)
