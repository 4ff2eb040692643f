"""Connections as clients keep them, and time: what no setting names cuts nothing."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, answer, chunk, delta, until, until_closed, within

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
DONE = b"data: [DONE]\n\n"


@pytest.mark.fault("benchmark clients")
async def test_two_connections_serve_many_prompts(bench: Bench) -> None:
    """As load generators do it: few connections, kept, streams one after the other, and a replica that closes some."""
    answered = 0

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        writer.write(STREAM_HEAD + chunk(delta("a")) + chunk(DONE) + b"0\r\n\r\n")
        if answered % 3 == 0:
            await writer.drain()
            writer.close()
            raise ConnectionError("closed after its answer")

    router = await bench.router(*[await bench.replica(script) for _ in range(2)])

    async def one(number: int) -> None:
        client = await bench.client(router)
        for turn in range(8):
            prompt = f"prompt {number} {turn} " * 40
            body = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": 1}
            client.post("/v1/completions", json.dumps(body).encode())
            reply = await client.reply()
            assert (reply.status, reply.clean, reply.body) == (200, True, delta("a") + DONE)

    await asyncio.gather(*(one(number) for number in range(2)))
    assert answered == 16


@pytest.mark.fault("small packets wait")
async def test_small_packets_leave_at_once_on_both_sides(bench: Bench) -> None:
    go = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(answer(CHAT))

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    assert router.door is not None
    (front,) = router.door.connections
    assert front._transport is not None
    go.set()
    await client.reply()
    now = asyncio.get_running_loop().time()
    connection = router._pools[replica.name].take_idle(now)
    assert connection is not None
    assert connection.transport is not None
    for transport in (front._transport, connection.transport):
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    router._pools[replica.name].give_back(connection, now)


@pytest.mark.interpreted
@pytest.mark.fault("small packets wait")
async def test_what_comes_in_one_packet_is_one_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from router.wire.front import Front

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")) + chunk(delta("b")) + chunk(DONE) + b"0\r\n\r\n")

    written: list[bytes] = []
    write = Front.write

    def watched(front: Front, data: bytes) -> None:
        written.append(data)
        write(front, data)

    client = await bench.client(await bench.router(await bench.replica(script)))
    monkeypatch.setattr(Front, "write", watched)
    client.post("/v1/chat/completions", STREAM_BODY)
    assert (await client.reply()).body == delta("a") + delta("b") + DONE
    assert len(written) == 1


@pytest.mark.fault("hidden timeout")
async def test_only_its_own_bound_ends_the_wait_for_a_first_byte(bench: Bench) -> None:
    """Every other time is short, and goes by many times while the replica works on its prompt."""
    go = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(STREAM_HEAD + chunk(delta("a")) + chunk(DONE) + b"0\r\n\r\n")

    short = dict.fromkeys(
        (
            *("probe_seconds", "probe_timeout_seconds", "connect_timeout_seconds", "header_timeout_seconds"),
            *("body_timeout_seconds", "keep_alive_seconds", "upstream_idle_seconds", "idle_timeout_seconds"),
        ),
        0.05,
    )
    replica = await bench.replica(script)
    router = await bench.router(replica, **short)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    idle = await bench.client(router)
    for _ in range(3):
        assert await idle.closed() == b""  # its time is over
        idle = await bench.client(router)
    probes = len(replica.probes)
    await until(lambda: len(replica.probes) >= probes + 10, "many probes have gone by")
    go.set()
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, delta("a") + DONE)
    assert len(replica.received) == 1


@pytest.mark.fault("smuggling")
@pytest.mark.parametrize("chunked", [False, True], ids=["measured", "chunked"])
async def test_a_body_beside_an_offer_to_upgrade_is_a_body(bench: Bench, chunked: bool) -> None:
    """Java's client offers h2c with every request, and the parser takes the body for h2c's."""
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%s%s\r\n\r\n%s" % (offer, framing, framed)
    for cut in (len(asked), len(asked) - len(framed), len(asked) - 3):
        client.send(asked[:cut])
        await client.writer.drain()
        client.send(asked[cut:])
        assert (await client.reply()).status == 200
    client.send(asked * 2)
    for _ in range(2):
        assert (await client.reply()).status == 200
    assert [got.body for got in replica.received] == [BODY] * 5
    assert all(got.header(b"upgrade") is None for got in replica.received)


@pytest.mark.fault("silence during prefill")
async def test_pauses_between_events_are_bridged_by_comments_if_asked_for(bench: Bench) -> None:
    """In a prefill and later, and never within an event."""
    steps = asyncio.Semaphore(0)
    event = delta("a")

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in (event, event[:9], event[9:], DONE):
            await steps.acquire()
            writer.write(chunk(piece))
        writer.write(b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await bench.router(replica, sse_keep_alive_seconds=0.02)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    assert (await client.head()).status == 200
    comment = b": keep-alive\n\n"

    async def next_piece() -> bytes | None:
        while (piece := await client.chunk()) == comment:
            pass
        return piece

    for _ in range(3):
        assert await client.chunk() == comment
    load = router.fleet[replica.name].load
    assert (load.in_flight, load.decoding) == (1, 0)  # no first token yet
    steps.release()
    assert await next_piece() == event
    assert await client.chunk() == comment
    steps.release()
    assert await next_piece() == event[:9]
    steps.release()
    assert await client.chunk() == event[9:]  # nothing in between, however long it took
    steps.release()
    assert await next_piece() == DONE
    assert await client.chunk() is None


@pytest.mark.fault("silence during prefill")
async def test_comments_keep_no_silent_replica_alive(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await until_closed(request, reader)

    router = await bench.router(await bench.replica(script), sse_keep_alive_seconds=0.02, idle_timeout_seconds=0.2)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    reply = await client.reply()
    comments, _, said = reply.body.rpartition(b": keep-alive\n\n")
    assert comments.replace(b": keep-alive\n\n", b"") == b""
    assert said.startswith(b'data: {"error":')
    assert b"idle_timeout_seconds" in said


@pytest.mark.fault("left in a retry")
async def test_a_client_that_leaves_during_the_second_attempt_ends_it(bench: Bench) -> None:
    asked: list[Received] = []

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        if len(asked) == 1:
            writer.write(answer(b"{}", status=b"503 Service Unavailable"))
        else:
            await until_closed(request, reader)

    replicas = [await bench.replica(script) for _ in range(3)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(asked) == 2, "the second replica has the request")
    client.leave()
    await within(asked[1].aborted.wait())
    await until(lambda: all(replica.load.in_flight == 0 for replica in router.fleet), "nothing is in flight")
    assert len(asked) == 2


@pytest.mark.fault("label explosion")
async def test_names_from_clients_are_no_labels(bench: Bench) -> None:
    router = await bench.router(await bench.replica())
    client = await bench.client(router)

    async def ask(number: int) -> None:
        body = {"model": f"made-up-{number}", "prompt": "x", "user": f"u{number}"}
        client.post(f"/v1/completions/{number}" if number % 2 else "/v1/completions", json.dumps(body).encode())
        assert (await client.reply()).status == 200

    def series() -> set[bytes]:
        lines = router.telemetry.page().splitlines()
        return {line.rpartition(b" ")[0] for line in lines if not line.startswith(b"#")}

    for number in range(2):
        await ask(number)
    before = series()
    for number in range(2, 150):
        await ask(number)
    assert series() == before
    assert b"made-up" not in router.telemetry.page()
