"""A replica that does exactly what a test says, on a raw socket; and a client that sees exactly what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Script = Callable[["Received", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BOUND = 60.0
"""The longest that any wait in these tests may take. A bound against hangs; nothing is measured by it."""


@dataclass
class Received:
    """A request as the replica got it, to the byte."""

    head: bytes
    body: bytes
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: bytes) -> bytes | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower():
                return value.strip()
        return None

    @property
    def json(self) -> object:
        return json.loads(self.body)


def answer(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, kind, len(body), extra, body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


CHAT = json.dumps(
    {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
).encode()


BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


class Scripted:
    """One replica. `script` answers whatever is no probe; `received` are those requests in order."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or self._plain
        self.received: list[Received] = []
        self.models: list[dict[str, object]] = [{"id": "m", "object": "model", "root": "m", "max_model_len": 4096}]
        self.metrics = b"process_start_time_seconds 1.0\n"
        self.base = b""
        self.deaf = False
        """Takes connections and probes and answers no probe, as a stopped process does."""
        self.probes: list[Received] = []
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}{self.base.decode()}"

    @property
    def open_connections(self) -> int:
        return len(self._writers)

    async def start(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**27)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    async def _plain(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(CHAT))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = Received(head, b"")
                length = request.header(b"content-length")
                if length:
                    request.body = await reader.readexactly(int(length))
                if request.line in (b"GET %s/v1/models HTTP/1.1" % self.base, b"GET %s/metrics HTTP/1.1" % self.base):
                    self.probes.append(request)
                    if self.deaf:
                        await until_closed(request, reader)
                    elif request.line.endswith(b"/metrics HTTP/1.1"):
                        writer.write(answer(self.metrics, kind=b"text/plain"))
                    else:
                        writer.write(answer(json.dumps({"object": "list", "data": self.models}).encode()))
                elif request.line == b"GET %s/kv_event_sources HTTP/1.1" % self.base:
                    writer.write(answer(b'{"detail":"Not Found"}', status=b"404 Not Found"))
                else:
                    self.received.append(request)
                    await self.script(request, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def until_closed(request: Received, reader: asyncio.StreamReader) -> None:
    """Wait for the router to leave; nothing else may come on the connection."""
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    request.aborted.set()
    raise ConnectionError("the router left")


async def hang(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script: not a byte, until the router leaves."""
    await until_closed(request, reader)


async def begin(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script: the beginning of a stream, and no more until the router leaves."""
    writer.write(STREAM_HEAD + chunk(delta("a")))
    await until_closed(request, reader)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def within(awaitable: Awaitable[object]) -> object:
    async with asyncio.timeout(BOUND):
        return await awaitable


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, bounded."""
    try:
        async with asyncio.timeout(BOUND):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None


@dataclass
class Reply:
    status: int
    head: bytes
    body: bytes
    clean: bool = True
    """The message ended as its framing says it does."""

    def header(self, name: bytes) -> bytes | None:
        values = self.headers(name)
        return values[0] if values else None

    def headers(self, name: bytes) -> list[bytes]:
        found = []
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower():
                found.append(value.strip())
        return found

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


class Raw:
    """A client on a raw socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Raw:
        return cls(*await asyncio.open_connection(*address, limit=2**27))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: bytes, headers: bytes = b"") -> None:
        self.send(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s"
            % (path.encode(), len(body), headers, body)
        )

    async def head(self) -> Reply:
        async with asyncio.timeout(BOUND):
            head = await self.reader.readuntil(b"\r\n\r\n")
        return Reply(int(head.split(b" ", 2)[1]), head, b"")

    async def chunk(self) -> bytes | None:
        """The next chunk's data; None at the last one. Raises IncompleteReadError where the connection breaks."""
        async with asyncio.timeout(BOUND):
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2] if size else None

    async def reply(self, *, head_only: bool = False) -> Reply:
        """A whole answer, its chunks put together; `clean` is False where the connection broke within it."""
        reply = await self.head()
        if head_only:
            return reply
        try:
            if (length := reply.header(b"content-length")) is not None:
                async with asyncio.timeout(BOUND):
                    reply.body = await self.reader.readexactly(int(length))
            elif reply.header(b"transfer-encoding") is not None:
                while (data := await self.chunk()) is not None:
                    reply.body += data
            else:
                async with asyncio.timeout(BOUND):
                    reply.body = await self.reader.read()
        except asyncio.IncompleteReadError as error:
            reply.body += error.partial
            reply.clean = False
        except ConnectionError:
            reply.clean = False
        return reply

    async def closed(self) -> bytes:
        """What still comes until the other side closes."""
        async with asyncio.timeout(BOUND):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def leave(self) -> None:
        self.writer.close()
