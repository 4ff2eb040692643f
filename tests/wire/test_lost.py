"""A replica that gives no sign of life: what waits there goes elsewhere, what has begun is told. Rounds of probes are
run by hand, and the silence is made."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.app import Router
from router.fleet.probe import FAILURES_TO_LOSE
from router.fleet.replica import State
from tests.wire.conftest import Bench, probed
from tests.wire.scripted import (
    BODY,
    BOUND,
    CHAT,
    STREAM_BODY,
    STREAM_HEAD,
    Raw,
    Received,
    Scripted,
    answer,
    begin,
    chunk,
    delta,
    hang,
    until,
    until_closed,
    within,
)


async def open_router(bench: Bench, *replicas: Scripted) -> Router:
    return await bench.router(*replicas, probe_seconds=3600, probe_timeout_seconds=BOUND, policy="round_robin")


async def stop(router: Router, replica: Scripted) -> None:
    """The process is stopped: its port still takes connections, and nothing comes any more."""
    replica.deaf = True
    router.fleet[replica.name].heard_at = asyncio.get_running_loop().time() - 11.0
    await probed(router, replica, FAILURES_TO_LOSE)


async def waiting(bench: Bench, body: bytes) -> tuple[Scripted, Scripted, Router, Raw]:
    """A client whose request the first of two replicas has, and holds."""
    first, other = sorted([await bench.replica() for _ in range(2)], key=lambda replica: replica.name)
    first.script = hang
    router = await open_router(bench, first, other)
    client = await bench.client(router)
    client.post("/v1/chat/completions", body)
    await until(lambda: len(first.received) == 1, "it has the request")
    return first, other, router, client


@pytest.mark.fault("hung replica")
@pytest.mark.parametrize("body", [BODY, STREAM_BODY], ids=["whole", "stream"])
async def test_what_waits_for_its_first_byte_goes_elsewhere(bench: Bench, body: bytes) -> None:
    stopped, other, router, client = await waiting(bench, body)
    await stop(router, stopped)
    reply = await client.reply()
    assert (reply.status, reply.header(b"x-warmroute-replica")) == (200, other.name.encode())
    await within(stopped.received[0].aborted.wait())
    assert router.fleet[stopped.name].load.in_flight == 0
    assert router.telemetry.attempts.labels(stopped.name, "unreached").value == 1
    # A kept connection to it is not used again either.
    assert not router._pools[stopped.name].open


async def test_one_whose_streams_go_on_keeps_what_waits_there(bench: Bench) -> None:
    stopped, other, router, client = await waiting(bench, BODY)
    stopped.deaf = True
    await probed(router, stopped)
    for _ in range(2 * FAILURES_TO_LOSE):
        router.fleet[stopped.name].heard_at = asyncio.get_running_loop().time()  # a stream's byte
        assert await probed(router, stopped) is State.READY
    assert not stopped.received[0].aborted.is_set()
    assert not other.received
    client.leave()


async def test_the_only_one_is_waited_for(bench: Bench) -> None:
    wake = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wake.wait()
        writer.write(answer(CHAT))

    stopped, gone = [await bench.replica(script) for _ in range(2)]
    router = await open_router(bench, stopped, gone)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    await until(lambda: bool(stopped.received or gone.received), "one has the request")
    if gone.received:
        stopped, gone = gone, stopped
    await stop(router, gone)
    await stop(router, stopped)
    assert [router.fleet[replica.name].state for replica in (stopped, gone)] == [State.SILENT] * 2
    wake.set()
    assert (await client.reply()).body == CHAT
    assert not gone.received


@pytest.mark.fault("silent truncation")
async def test_what_has_begun_is_told(bench: Bench) -> None:
    stopped = await bench.replica(begin)
    router = await open_router(bench, stopped)
    client = await bench.client(router)
    client.post("/v1/completions", STREAM_BODY)
    await client.head()
    assert await client.chunk() == delta("a")
    await stop(router, stopped)
    error = json.loads((await client.chunk() or b"").removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert "no answer in time, and not a byte for 10 s (silence_seconds)" in error["message"]
    assert await client.chunk() is None
    await within(stopped.received[0].aborted.wait())


async def test_one_that_shuts_down_ends_what_it_has_begun(bench: Bench) -> None:
    """It takes no connections any more, and its streams go on: they are let be."""
    more = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await more.wait()
        writer.write(chunk(delta("b")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await open_router(bench, replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    await client.head()
    await client.chunk()
    assert replica._server is not None
    replica._server.close()
    assert await probed(router, replica, FAILURES_TO_LOSE) is State.LOST
    more.set()
    assert await client.chunk() == delta("b")
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() is None


async def test_a_websocket_to_it_is_ended(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello")
        await until_closed(request, reader)

    stopped = await bench.replica(script)
    router = await open_router(bench, stopped)
    client = await bench.client(router)
    client.send(b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    assert (await client.head()).status == 101
    assert await within(client.reader.readexactly(5)) == b"hello"
    await stop(router, stopped)
    assert await client.closed() == b""
    await within(stopped.received[0].aborted.wait())
    await until(lambda: router.fleet[stopped.name].load.in_flight == 0, "nothing is in flight")
