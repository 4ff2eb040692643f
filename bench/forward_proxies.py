"""Two proxies to compare with: what a few lines of aiohttp cost, and the least that uvloop and httptools can.

`python -m bench.forward_proxies aiohttp|bare PORT BACKEND_URL...` passes each request to the next backend in turn.
`bare` is a yardstick, no product: it parses both sides to know where messages end, passes all bytes on as they came,
and knows no limit, no failure, no backpressure and no header that should be dropped.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import cycle
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import aiohttp
import httptools
import uvloop
from aiohttp import web

from bench.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"})
_BODY_BYTES = 64 * 1024 * 1024


class Bare:
    """A proxy of one function for each event."""

    def __init__(self, backends: Sequence[str]) -> None:
        self._pools: Iterator[Pool] = cycle([Pool(urlsplit(url).port or 80) for url in backends])

    def pool(self) -> Pool:
        return next(self._pools)


class Pool:
    """Idle connections to one backend."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Upstream] = []


class Client(asyncio.Protocol):
    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        self._opening: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.upstream: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.upstream is not None and self.upstream.transport is not None:
            self.upstream.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        pool = self._bare.pool()
        if pool.idle:
            self.send(pool.idle.pop())
        else:
            self._opening = asyncio.get_running_loop().create_task(self._open(pool))

    async def _open(self, pool: Pool) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(pool), HOST, pool.port)
        self.send(upstream)

    def send(self, upstream: Upstream) -> None:
        assert upstream.transport is not None
        upstream.client = self
        self.upstream = upstream
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1:
            upstream.transport.write(pieces[0])
        else:
            upstream.transport.writelines(pieces)


class Upstream(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self.client: Client | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        if self.client is not None and self.client.transport is not None:
            self.client.transport.abort()

    def data_received(self, data: bytes) -> None:
        client = self.client
        self._parser.feed_data(data)
        if client is not None and client.transport is not None:
            client.transport.write(data)

    def on_message_complete(self) -> None:
        if self.client is not None:
            self.client.upstream = None
            self.client = None
        self._pool.idle.append(self)


async def serve_bare(port: int, backends: Sequence[str]) -> None:
    bare = Bare(backends)
    server = await asyncio.get_running_loop().create_server(lambda: Client(bare), HOST, port, backlog=4096)
    await server.serve_forever()


async def serve_aiohttp(port: int, backends: Sequence[str]) -> None:
    """As the libraries' documentation would have it written, but for their limits."""
    turn = cycle(backends)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
            async with session.request(
                request.method, next(turn) + request.path_qs, headers=headers, data=await request.read()
            ) as answer:
                kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP]
                response = web.StreamResponse(status=answer.status, headers=dict(kept))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        application = web.Application(client_max_size=_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, HOST, port, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    serve = {"aiohttp": serve_aiohttp, "bare": serve_bare}[sys.argv[1]]
    uvloop.run(serve(int(sys.argv[2]), sys.argv[3:]))
