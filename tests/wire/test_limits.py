"""What a client may make the router hold, and what is no HTTP at all."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, Received, answer, until, until_closed

LIMIT = 64 * 1024 * 1024


@pytest.mark.fault("large bodies")
@pytest.mark.parametrize("size", [1_100_000, 2_100_000, 16_100_000, LIMIT])
async def test_bodies_up_to_the_limit_pass(bench: Bench, size: int) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.post("/v1/embeddings", b"x" * size)
    assert (await client.reply()).status == 200
    assert len(replica.received[0].body) == size


@pytest.mark.fault("large bodies")
@pytest.mark.parametrize("chunked", [False, True], ids=["measured", "chunked"])
@pytest.mark.parametrize("size", [LIMIT + 1, 120_000_000])
async def test_bodies_above_the_limit_are_a_413_that_names_the_setting(bench: Bench, size: int, chunked: bool) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % framing)
    piece = b"x" * 1_000_000

    async def send() -> None:
        for _ in range(size // len(piece) + 1):
            client.send(b"f4240\r\n%s\r\n" % piece if chunked else piece)
            await client.writer.drain()

    sending = asyncio.create_task(send())
    reply = await client.reply()
    sending.cancel()
    error = reply.json["error"]
    assert reply.status == 413
    assert isinstance(error, dict)
    assert "max_body_bytes" in error["message"]
    assert replica.received == []
    assert router.door is not None
    assert router.door.held_bytes == 0


async def test_bodies_held_together_are_bounded(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, max_buffered_bytes=3_000_000)
    first, second = await bench.client(router), await bench.client(router)
    first.post("/v1/completions", b"x" * 2_000_000)
    await until(lambda: len(replica.received) == 1, "the first is under way")
    second.post("/v1/completions", b"x" * 2_000_000)
    reply = await second.reply()
    assert (reply.status, reply.header(b"retry-after")) == (503, b"1")
    first.leave()
    assert router.door is not None
    await until(lambda: router.door.held_bytes == 0, "what was held is free")


async def test_headers_are_bounded_in_size_and_number(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    for headers in (b"X: " + b"a" * 70_000 + b"\r\n", b"X: a\r\n" * 200):
        client = await bench.client(router)
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        assert (await client.reply()).status == 431
        assert await client.closed() == b""
    endless = await bench.client(router)
    endless.send(b"GET /" + b"a" * 100_000)
    assert (await endless.reply()).status == 431
    assert replica.received == []


async def test_connections_are_bounded(bench: Bench) -> None:
    router = await bench.router(await bench.replica(), max_connections=2)
    clients = [await bench.client(router) for _ in range(2)]
    for client in clients:
        client.post("/v1/completions", b"{}")
        assert (await client.reply()).status == 200
    third = await bench.client(router)
    assert (await third.reply()).status == 503
    clients[0].leave()
    assert router.door is not None
    third.leave()
    await until(lambda: len(router.door.connections) == 1, "there is room again")
    fourth = await bench.client(router)
    fourth.post("/v1/completions", b"{}")
    assert (await fourth.reply()).status == 200


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        (b"POST / HTTP/1.1\r\nHo", "header_timeout_seconds"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na", "body_timeout_seconds"),
    ],
    ids=["headers", "body"],
)
async def test_a_trickling_client_is_refused(bench: Bench, start: bytes, setting: str) -> None:
    router = await bench.router(await bench.replica(), **{setting: 0.05})
    client = await bench.client(router)
    client.send(start)
    reply = await client.reply()
    assert reply.status == 408
    assert setting in reply.body.decode()
    assert await client.closed() == b""


async def test_an_idle_connection_is_closed_in_silence(bench: Bench) -> None:
    router = await bench.router(await bench.replica(), keep_alive_seconds=0.05)
    client = await bench.client(router)
    assert await client.closed() == b""


SMUGGLERS = {
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "folded header": b"POST / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "space before the colon": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 4\r\n\r\nabcd",
    "bad chunk size": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "chunks twice": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "no protocol": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
}


@pytest.mark.fault("smuggling")
@pytest.mark.parametrize("data", SMUGGLERS.values(), ids=SMUGGLERS.keys())
async def test_what_two_parsers_may_read_differently_is_refused(bench: Bench, data: bytes) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.send(data)
    reply = await client.reply()
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert await client.closed() == b""
    assert replica.received == []


async def test_a_refusal_does_not_overtake_the_answer_before_it(bench: Bench) -> None:
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(CHAT))

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica))
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}garbage\r\n\r\n")
    await until(lambda: len(replica.received) == 1, "the first is under way")
    release.set()
    assert (await client.reply()).body == CHAT
    assert (await client.reply()).status == 400


@pytest.mark.fault("HEAD")
async def test_our_own_paths(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    for path in (b"/health", b"/ready", b"/metrics"):
        for method in (b"GET", b"HEAD"):
            client.send(b"%s %s HTTP/1.1\r\nHost: x\r\n\r\n" % (method, path))
            assert (await client.reply(head_only=method == b"HEAD")).status == 200
    assert replica.received == []
    client.send(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    await client.reply()
    client.send(b"GET /v1/models?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.reply()
    assert [got.line for got in replica.received] == [b"POST /health HTTP/1.1", b"GET /v1/models?x=1 HTTP/1.1"]


async def test_the_choice_is_shown_or_not(bench: Bench) -> None:
    replica = await bench.replica()
    for shown in (True, False):
        client = await bench.client(await bench.router(replica, show_choice=shown))
        client.post("/v1/completions", json.dumps({"model": "m", "prompt": "x" * 200}).encode())
        reply = await client.reply()
        assert (reply.header(b"x-warmroute-replica") is not None) is shown
        assert (reply.header(b"x-warmroute-predicted-tokens") is not None) is shown
