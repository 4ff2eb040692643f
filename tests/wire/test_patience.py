"""How long the router waits for either side, and what it says once it has waited."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.wire.conftest import Bench, older
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, answer, chunk, delta, until, until_closed, within

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


@pytest.mark.fault("silent truncation")
async def test_a_stream_that_falls_silent_is_ended_with_an_error_that_names_the_setting(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, idle_timeout_seconds=0.05)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    reply = await client.reply()
    assert (reply.status, reply.clean) == (200, True)
    assert reply.body.startswith(delta("a"))
    error = json.loads(reply.body.removeprefix(delta("a")).removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert "idle_timeout_seconds" in error["message"]
    assert await client.closed() == b""
    await within(replica.received[0].aborted.wait())
    # It was heard: a slow stream is no reason to keep other requests away.
    assert router.fleet[replica.name].shunned_until == 0.0
    await until(lambda: router.fleet[replica.name].load.in_flight == 0, "nothing is in flight")


async def test_an_answer_that_falls_silent_is_broken_off(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await until_closed(request, reader)

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica, idle_timeout_seconds=0.05))
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert (reply.body, reply.clean) == (b"{", False)
    await within(replica.received[0].aborted.wait())


@pytest.mark.fault("clients that do not read")
async def test_a_client_that_stops_reading_is_cut_and_the_replica_is_not_blamed(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        try:
            while True:
                writer.write(chunk(b"x" * 65_536))
                await writer.drain()
        finally:
            request.aborted.set()

    replica = await bench.replica(script)
    router = await bench.router(replica, idle_timeout_seconds=0.05, probe_seconds=60)
    client = await bench.client(router)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.post("/v1/chat/completions", STREAM_BODY)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    # Its connection goes at once, unread bytes and all: it will never take them.
    await until(lambda: not router.door.connections, "the client is cut")  # type: ignore[union-attr]
    await within(replica.received[0].aborted.wait())
    await until(lambda: router.fleet[replica.name].load.in_flight == 0, "nothing is in flight")
    assert router.fleet[replica.name].shunned_until == 0.0
    client.writer.transport.abort()


@pytest.mark.fault("hung replica")
async def test_the_first_byte_is_waited_for_once_whatever_is_tried(bench: Bench) -> None:
    """The first replica takes half of the time and says no; the second one would answer a little too late."""
    bound = 2.0
    now = asyncio.get_running_loop().time
    begun = 0.0

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        if not begun:
            begun = now()
            await until(lambda: now() >= begun + bound / 2, "half of the time has gone by")
            writer.write(answer(b"{}", status=b"503 Service Unavailable"))
        else:
            await until(lambda: now() >= begun + bound * 1.25, "all of it has gone by")
            writer.write(answer(CHAT))

    replicas = [await bench.replica(script) for _ in range(3)]
    router = await bench.router(*replicas, first_byte_timeout_seconds=bound, probe_seconds=60)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert reply.status == 504
    assert f"within {bound:g} s (first_byte_timeout_seconds)" in reply.body.decode()
    assert sum(len(replica.received) for replica in replicas) == 2


@pytest.mark.fault("answers that are no HTTP")
@pytest.mark.parametrize("lines", [b"X: " + b"a" * 300_000, b"X: a\r\n" * 60_000], ids=["one line", "many"])
async def test_a_replica_whose_headers_never_end_is_given_up(bench: Bench, lines: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + lines)
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, probe_seconds=60)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert reply.status == 502
    assert "headers exceed 262144 bytes" in reply.body.decode()


@pytest.mark.parametrize("cut", [1, 20, 30])
async def test_headers_in_two_packets_leave_no_clock_running(bench: Bench, cut: int) -> None:
    router = await bench.router(await bench.replica(), header_timeout_seconds=60, keep_alive_seconds=600)
    client = await bench.client(router)
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    assert router.door is not None
    await until(lambda: len(router.door.connections) == 1, "the client is there")  # type: ignore[union-attr]
    (front,) = router.door.connections
    client.send(head[:cut])
    await until(lambda: front._head_seen == cut, "the first packet is there")
    client.send(head[cut:])
    assert (await client.reply()).status == 200
    # Idle from here on: closed in silence once keep_alive_seconds are over, not accused of a late head before.
    await until(lambda: front._task is None, "the answer is over")
    older(front, 61)
    assert front._judge_time()
    older(front, 600)
    front._judge_time()
    assert await client.closed() == b""
