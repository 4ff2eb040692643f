"""Hostile and broken peers on both sides: seeded mutations of valid messages, floods, and what must hold after them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import struct

import pytest

from router.app import Router
from tests.wire.conftest import Bench
from tests.wire.scripted import BOUND, CHAT, STREAM_HEAD, Raw, Received, answer, chunk, delta, until

BODY = b'{"model":"m","prompt":"hello","max_tokens":1}'
MEASURED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (
        len(BODY),
        BODY,
    )
)
REQUESTS = [
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: x\r\n\r\n",
    MEASURED,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: a\r\n\r\n"
    b"10;ext=1\r\n%s\r\n%x\r\n%s\r\n0\r\nA: b\r\n\r\n" % (BODY[:16], len(BODY) - 16, BODY[16:]),
    b"GET http://x/v1/x?a=b HTTP/1.0\r\nHost: x\r\nConnection: keep-alive, x-foo\r\nX-Foo: 1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, X-Settings\r\nX-Settings: A\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Key: eA==\r\n\r\n\x81\x00",
    b"HEAD /v1/x HTTP/1.1\r\nHost: x\r\nX-Warmroute-Replica: me\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
]
REQUEST_PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"\xff", b"\x0b", b"\xef\xbb\xbf", b" folded\r\n"),
    *(b"Content-Length: %s\r\n" % value for value in (b"5", b"0", b"", b"-1", b"1 2", b"5, 5", b"0x5", b"9" * 20)),
    *(b"Transfer-Encoding: %s\r\n" % value for value in (b"chunked", b"identity", b"xchunked", b"chunked, gzip")),
    *(b"Transfer-Encoding : chunked\r\n", b"Host: y\r\n", b"Connection: close\r\n", b"Connection: host\r\n"),
    *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"0\r\n\r\n", b"f" * 17 + b"\r\n", b"GET / HTTP/1.1\r\n"),
]
EVENT = delta("hi")
ANSWERS = [
    answer(CHAT),
    STREAM_HEAD + chunk(EVENT) + b"%x;e=1\r\n%s\r\n0\r\nT: x\r\n\r\n" % (len(EVENT), EVENT),
    b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"ok"),
    b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT * 3,
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
    answer(b"busy", status=b"503 Busy", extra=b"Retry-After: 3\r\n"),
    b"HTTP/1.1 500 E\r\nConnection: close\r\n\r\nboo",
]
ANSWER_PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff\xfe", b" folded\r\n", b"0\r\n\r\n", b"f" * 18 + b"\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"Connection: upgrade\r\nUpgrade: x\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 S\r\n\r\n"),
    *(b'{"error":1}', b"data: [1]\n\n", b'data: {"choices":[5],"usage":[]}\n\n', b"Content-Encoding: gzip\r\n"),
]


def mutated(rng: random.Random, seeds: list[bytes], pieces: list[bytes]) -> bytes:
    """One of the seeds with up to four wounds: pieces put in, bytes changed, cut out or doubled, lines added."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(data))
        match rng.choice(["put", "put", "change", "cut", "double", "line", "line", "append"]):
            case "put":
                data[at:at] = rng.choice(pieces)
            case "change" if data:
                data[at % len(data)] = rng.randrange(256)
            case "cut":
                del data[at : at + rng.randint(1, 8)]
            case "double":
                data[at:at] = data[at : at + rng.randint(1, 20)]
            case "line":
                lines = bytes(data).split(b"\r\n")
                lines.insert(rng.randrange(len(lines)), rng.choice(pieces).rstrip(b"\r\n"))
                data = bytearray(b"\r\n".join(lines))
            case _:
                data += rng.choice(seeds)
    return bytes(data)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def at_rest(router: Router) -> None:
    """Nobody is connected and no request is in flight."""
    door = router.door
    assert door is not None
    await until(lambda: not door.connections, "all client connections are gone")
    await until(lambda: all(not replica.load.in_flight for replica in router.fleet), "nothing is in flight")


def reset(client: Raw) -> None:
    """Leave with a reset instead of an end."""
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


LINE = re.compile(rb"[A-Z!#$%&'*+.^_`|~0-9a-z-]+ [\x21-\x7e]+ HTTP/1\.1")
FIELD = re.compile(rb"([A-Z!#$%&'*+.^_`|~0-9a-z-]+): [\x20-\x7e\x80-\xff\t]*")


@pytest.mark.fault("smuggling")
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_clients_send_replicas_get_whole_requests_only(
    bench: Bench, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """What one parser lets pass and another reads differently is how requests are smuggled. Whatever comes in, what
    goes out has one reading: this hop's own framing, one Host, no field of one connection only."""
    replica = await bench.replica()
    router = await bench.router(replica, header_timeout_seconds=0.1, body_timeout_seconds=0.1, keep_alive_seconds=0.1)
    rng = random.Random(seed)
    clients = []
    for _ in range(250):
        client = await bench.client(router)
        data = mutated(rng, REQUESTS, REQUEST_PIECES)
        cut = rng.randint(0, len(data))
        client.send(data[:cut])
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        client.send(data[cut:])
        if rng.random() < 0.2:
            reset(client)
        else:
            clients.append((client, data))
    for client, data in clients:
        said = await client.closed()
        assert not said or said.startswith(b"HTTP/1.1 ")
        assert not re.search(rb"HTTP/1\.1 5\d\d ", said), (data, said)
        client.leave()
    await at_rest(router)
    assert failures(caplog) == []
    assert len(replica.received) > 50, "some are still requests"
    for request in replica.received:
        line, *fields = request.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        assert LINE.fullmatch(line), request.head
        names = []
        for field in fields:
            match = FIELD.fullmatch(field)
            assert match, request.head
            names.append(match[1].lower())
        assert names.count(b"host") == 1
        assert names.count(b"content-length") <= 1
        if (protocol := request.header(b"upgrade")) is not None:
            # The one other protocol that is passed on, and never beside a body.
            assert (protocol.lower(), request.header(b"connection")) == (b"websocket", b"Upgrade")
            assert (names.count(b"upgrade"), names.count(b"connection"), request.body) == (1, 1, b"")
            assert line.startswith(b"GET ")
            names = [name for name in names if name not in (b"upgrade", b"connection")]
        assert not {b"transfer-encoding", b"upgrade", b"connection", b"expect", b"te", b"trailer"} & set(names)
        assert not any(name.startswith(b"x-warmroute-") for name in names)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_replicas_answer_clients_get_an_end(
    bench: Bench, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """An answer, an error of the router's own or a broken connection; never a hang, a trace or a load that stays."""
    rng = random.Random(seed)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = mutated(rng, ANSWERS, ANSWER_PIECES)
        cut = rng.randint(0, len(data))
        writer.write(data[:cut])
        await writer.drain()
        writer.write(data[cut:])
        if rng.random() < 0.3:
            writer.transport.abort()
        raise ConnectionError("that was all")

    first, second = await bench.replica(script), await bench.replica(script)
    router = await bench.router(first, second)
    for number in range(250):
        client = await Raw.connect(router.address)
        body = b'{"model":"m","prompt":"p%d","stream":%s}' % (number % 20, rng.choice([b"true", b"false"]))
        client.post("/v1/completions", body, b"Connection: close\r\n")
        if rng.random() < 0.1:
            reset(client)
            continue
        said = await client.closed()
        assert not said or re.match(rb"HTTP/1\.1 \d{3} ", said)
        assert b"The router failed" not in said
        client.leave()
    await at_rest(router)
    assert failures(caplog) == []


async def test_bodies_given_up_halfway_are_let_go(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    door = router.door
    assert door is not None
    half = b"x" * 2**20
    for number in range(10):
        client = await bench.client(router)
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * len(half)) + half)
        await until(lambda: door.held_bytes > 0, "a part of the body is there")
        reset(client) if number % 2 else client.leave()
        await at_rest(router)
        assert door.held_bytes == 0
    assert replica.received == []


async def test_1000_connections_at_once(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    clients = [await bench.client(router) for _ in range(1000)]
    for client in clients:
        client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert {(await client.reply()).status for client in clients} == {200}
    for client in clients:
        client.leave()
    await at_rest(router)


async def test_a_flood_of_pipelined_requests_is_answered_in_order(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(request.line.split(b" ")[1]))

    router = await bench.router(await bench.replica(script))
    client = await bench.client(router)
    client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(2000)))
    assert [(await client.reply()).body for _ in range(2000)] == [b"/%d" % number for number in range(2000)]


@pytest.mark.fault("answers that are no HTTP")
@pytest.mark.parametrize(
    "flood",
    [
        b"HTTP/1.1 102 Processing\r\nA: b\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n" + b"Link: x\r\n" * 100 + b"\r\n",
        b"X",
    ],
    ids=["102", "103", "no end"],
)
async def test_a_replica_that_never_comes_to_its_answer_is_left(bench: Bench, flood: bytes) -> None:
    begin = b"HTTP/1.1 200 OK\r\nX: " if flood == b"X" else b""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(flood * (65536 // len(flood)))
                await writer.drain()
        request.aborted.set()
        raise ConnectionError("the router left")

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/completions", BODY)
    reply = await client.reply()
    assert reply.status == 502
    assert b"headers exceed" in reply.body
    async with asyncio.timeout(BOUND):
        await replica.received[0].aborted.wait()


@pytest.mark.fault("answers that are no HTTP")
@pytest.mark.parametrize(
    "raw",
    [
        answer(b"ok").replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
        answer(b"ok", extra=b"Content-Length: 3\r\n"),
        answer(b"ok", extra=b"Content-Length : 2\r\n"),
        answer(b"ok", extra=b"X: a\0b\r\n"),
        answer(b"ok", extra=b"X: a\rY: b\r\n"),
        answer(b"ok", extra=b"X: a\nY: b\r\n"),
        answer(b"ok", extra=b"X: a\r\n folded\r\n"),
        answer(b"ok").replace(b"\r\n", b"\n"),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x00",
        b"ICY 200 OK\r\n\r\nok",
    ],
)
async def test_answers_with_two_readings_are_not_passed_on(bench: Bench, raw: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    router = await bench.router(await bench.replica(script))
    client = await bench.client(router)
    client.post("/v1/completions", BODY)
    assert (await client.reply()).status == 502


async def test_lengths_that_lie(bench: Bench) -> None:
    """Too long: the client sees a break. Too short: it gets what was announced, and the rest reaches nobody."""
    lies = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + answer(b"evil"),
    ]

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not lies:
            writer.write(answer(b"good"))
            return
        writer.write(lies.pop(0))
        await writer.drain()
        writer.write_eof()

    router = await bench.router(await bench.replica(script))
    first, second = await bench.client(router), await bench.client(router)
    first.post("/v1/completions", BODY)
    reply = await first.reply()
    assert (reply.body, reply.clean) == (b"ok", False)
    second.post("/v1/completions", BODY)
    assert (await second.reply()).body == b"ok"
    second.post("/v1/completions", BODY)
    assert (await second.reply()).body == b"good"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","kv_transfer_params":{"a":1}}',
        b'{"k\\u0076_transfer_params":{"a":1},"model":"m"}',
        b'\xef\xbb\xbf{"kv_transfer_params":{"a":1}}',
        *('{"a":"x","kv_transfer_params":{"a":[1]}}'.encode(code) for code in ("utf-16", "utf-16-le", "utf-16-be")),
        *('{"a":"x","ec_transfer_params":{"a":[1]}}'.encode(code) for code in ("utf-32", "utf-32-le", "utf-32-be")),
        b'{"kv_transfer_params":1,"kv_transfer_params":{"a":1},"x":3}',
        b'{"x":NaN,"kv_transfer_params":{"a":1}}',
        b'{"x":' + b"[" * 3000 + b"]" * 3000 + b',"kv_transfer_params":{"a":1}}',
        b'{"a":"\\ud800","kv_transfer_params":1}',
        b'{"a":"\xed\xa0\x80","kv_transfer_params":1}',
    ],
    ids=range(14),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "//v1/completions", "/%761/x"])
@pytest.mark.parametrize("headers", [b"", b"Content-Encoding: identity\r\n", b"Connection: content-type\r\n"])
async def test_hand_offs_reach_no_replica_in_any_spelling(bench: Bench, body: bytes, path: str, headers: bytes) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post(path, body, headers)
    assert (await client.reply()).status == 200
    got = replica.received[0].body.replace(b"\0", b"")
    assert b"_transfer_params" not in got
    assert len(got) > 1
