"""Another protocol on the connection: a WebSocket goes through as its bytes, both ways, whoever ends it."""

from __future__ import annotations

import asyncio
import hashlib

import aiohttp
import pytest
from aiohttp import web

from router.app import Router
from tests.wire.conftest import Bench
from tests.wire.scripted import (
    BOUND,
    Raw,
    Received,
    Script,
    answer,
    until,
    until_closed,
    within,
)

ASKED = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


def agrees(then: Script) -> Script:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED)
        try:
            await then(request, reader, writer)
        finally:
            request.aborted.set()
        raise ConnectionError("no HTTP follows")

    return script


async def echo(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65_536):
        writer.write(piece)
        await writer.drain()


def in_flight(router: Router) -> list[int]:
    return [replica.load.in_flight for replica in router.fleet]


async def upgraded(bench: Bench, router: Router) -> Raw:
    client = await bench.client(router)
    client.send(ASKED)
    assert (await client.head()).status == 101
    return client


async def test_the_handshake_arrives_and_bytes_go_both_ways(bench: Bench) -> None:
    replica = await bench.replica(agrees(echo))
    router = await bench.router(replica)
    client = await bench.client(router)
    client.send(ASKED + b"\x81\x03early")  # before the answer is there
    head = await client.head()
    assert head.head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert (head.header(b"upgrade"), head.headers(b"connection")) == (b"websocket", [b"Upgrade"])
    assert head.header(b"sec-websocket-accept") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert head.header(b"x-warmroute-replica") == replica.name.encode()
    (got,) = replica.received
    assert got.line == b"GET /v1/realtime?model=m HTTP/1.1"
    assert (got.header(b"upgrade"), got.header(b"connection")) == (b"websocket", b"Upgrade")
    assert got.header(b"sec-websocket-key") == b"dGhlIHNhbXBsZSBub25jZQ=="
    assert await within(client.reader.readexactly(7)) == b"\x81\x03early"
    # What would be HTTP is none here.
    client.send(b"GET / HTTP/1.1\r\n\r\n\x00\xff")
    assert await within(client.reader.readexactly(20)) == b"GET / HTTP/1.1\r\n\r\n\x00\xff"
    assert in_flight(router) == [1]
    assert router.telemetry.upgrades.labels(replica.name).value == 1
    client.leave()
    await within(got.aborted.wait())
    await until(lambda: in_flight(router) == [0], "it is over")


async def test_what_the_replica_said_last_arrives_before_the_end(bench: Bench) -> None:
    async def last_words(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 1_000_000 + b"bye")

    router = await bench.router(await bench.replica(agrees(last_words)))
    client = await upgraded(bench, router)
    assert await client.closed() == b"x" * 1_000_000 + b"bye"
    await until(lambda: in_flight(router) == [0], "it is over")
    await until(lambda: not router._pools[next(iter(router._pools))].open, "no connection is kept")


@pytest.mark.parametrize(
    ("status", "calls"), [(b"403 Forbidden", 1), (b"426 Upgrade Required", 1), (b"200 OK", 1), (b"503 Busy", 2)]
)
async def test_one_that_refuses_answers_as_ever(bench: Bench, status: bytes, calls: int) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"a":1}', status=status))

    replicas = [await bench.replica(script) for _ in range(2)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    client.send(ASKED)
    reply = await client.reply()
    assert (reply.status, reply.body, reply.header(b"connection")) == (int(status[:3]), b'{"a":1}', b"close")
    assert await client.closed() == b""
    assert sum(len(replica.received) for replica in replicas) == calls


async def test_one_that_cannot_be_reached_is_anothers_request(bench: Bench) -> None:
    replicas = [await bench.replica(agrees(echo)) for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=60)
    await replicas[0].stop()
    for _ in range(4):
        client = await upgraded(bench, router)
        client.send(b"hello")
        assert await within(client.reader.readexactly(5)) == b"hello"
        client.leave()
    assert len(replicas[1].received) == 4


async def test_sessions_spread_by_load(bench: Bench) -> None:
    replicas = [await bench.replica(agrees(echo)) for _ in range(3)]
    router = await bench.router(*replicas)
    for _ in range(9):
        await upgraded(bench, router)
    assert in_flight(router) == [3, 3, 3]


async def test_neither_side_is_buffered_without_bound(bench: Bench) -> None:
    sent = 0
    listening = asyncio.Event()

    async def flood(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(3200):  # 200 MB
            writer.write(b"y" * 65_536)
            await writer.drain()
            sent += 65_536

    replica = await bench.replica(agrees(flood))
    router = await bench.router(replica)
    client = await upgraded(bench, router)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    (connection,) = router._pools[replica.name].open
    assert router.door is not None
    (front,) = router.door.connections
    toward_replica, toward_client = connection.transport, front._transport
    assert toward_replica is not None
    assert toward_client is not None

    async def send() -> None:
        for _ in range(3200):
            client.send(b"x" * 65_536)
            await client.writer.drain()
        listening.set()

    sending = asyncio.create_task(send())
    await until(lambda: toward_client.get_write_buffer_size() > 0, "the client is seen to stall")
    await until(lambda: toward_replica.get_write_buffer_size() > 0, "the replica is seen to stall")
    for _ in range(50):
        await asyncio.sleep(0)
    assert toward_client.get_write_buffer_size() < 2_000_000
    assert toward_replica.get_write_buffer_size() < 2_000_000
    assert sent < 100_000_000
    assert not listening.is_set()
    sending.cancel()
    client.writer.transport.abort()
    await within(replica.received[0].aborted.wait())
    await until(lambda: in_flight(router) == [0], "it is over")


async def test_one_on_which_nothing_is_said_is_ended(bench: Bench) -> None:
    async def silent(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    replica = await bench.replica(agrees(silent))
    router = await bench.router(replica, idle_timeout_seconds=0.05)
    client = await upgraded(bench, router)
    assert await client.closed() == b""
    await within(replica.received[0].aborted.wait())
    assert router.fleet[replica.name].breaker.failures == 0


@pytest.mark.parametrize("before", [True, False], ids=["before the answer", "open"])
async def test_a_client_that_leaves_is_followed(bench: Bench, before: bool) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not before:
            writer.write(AGREED)
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.send(ASKED)
    await until(lambda: len(replica.received) == 1, "the replica was asked")
    if not before:
        await client.head()
    client.leave()
    await within(replica.received[0].aborted.wait())
    await until(lambda: in_flight(router) == [0], "it is over")


@pytest.mark.parametrize(
    "asked",
    [
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /x HTTP/1.0\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
    ids=["h2c", "not named by Connection", "with a body", "HTTP/1.0"],
)
async def test_other_protocols_are_not_passed_on(bench: Bench, asked: bytes) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.send(asked)
    assert (await client.reply()).status == 200
    (got,) = replica.received
    assert (got.header(b"upgrade"), got.header(b"connection")) == (None, None)


async def test_one_that_switches_unasked_is_another_replicas_request(bench: Bench) -> None:
    replicas = [await bench.replica(agrees(echo)), await bench.replica()]
    router = await bench.router(*replicas, policy="round_robin", probe_seconds=60)
    client = await bench.client(router)
    for _ in range(3):
        client.post("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"hello"}]}')
        assert (await client.reply()).status == 200


async def test_aiohttps_client_and_server_understand_each_other(bench: Bench) -> None:
    """Messages of every size, compressed, pings, and a close that is agreed on."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def realtime(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("realtime",), max_msg_size=2**24)
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(hashlib.sha256(message.data.encode()).hexdigest())
            elif message.type is aiohttp.WSMsgType.BINARY:
                await socket.send_bytes(message.data[::-1])
        return socket

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/realtime", realtime)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        from tests.wire.conftest import settings_for

        async with Router(settings_for([f"http://127.0.0.1:{port}"])) as router:
            host, own = router.address
            async with asyncio.timeout(BOUND), aiohttp.ClientSession() as session:
                url = f"http://{host}:{own}/v1/realtime"
                async with session.ws_connect(url, protocols=("realtime",), compress=15, max_msg_size=2**24) as socket:
                    assert socket.protocol == "realtime"
                    for size in (0, 1, 125, 126, 65_535, 65_536, 3_000_000):
                        text = "é" * size
                        await socket.send_str(text)
                        assert await socket.receive_str() == hashlib.sha256(text.encode()).hexdigest()
                        data = bytes(range(256)) * (size // 256 + 1)
                        await socket.send_bytes(data)
                        assert await socket.receive_bytes() == data[::-1]
                    await socket.ping()
                    await socket.send_str("after the ping")
                    await socket.receive_str()
                assert socket.close_code == 1000
            await until(lambda: in_flight(router) == [0], "it is over")
    finally:
        await runner.cleanup()
