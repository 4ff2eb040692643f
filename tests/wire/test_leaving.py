"""A client that leaves is followed to the replica, on every path; and load is counted from the decision to the end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from router.app import Router
from router.config import parse_url
from router.fleet.replica import State
from router.wire.upstream import Pool, Upstream
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import (
    BODY,
    CHAT,
    STREAM_BODY,
    STREAM_HEAD,
    Received,
    Script,
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


def streaming(release: asyncio.Event) -> Script:
    """Begins a stream, and ends it once it is let."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def in_flight(router: Router) -> list[int]:
    return [replica.load.in_flight for replica in router.fleet]


@pytest.mark.fault("work for nobody", "left before the first byte")
@pytest.mark.parametrize("body", [BODY, STREAM_BODY], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["before the head", "mid-answer"])
async def test_the_replica_is_left_when_the_client_leaves(bench: Bench, body: bytes, begun: bool) -> None:
    replica = await bench.replica(begin if begun else hang)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", body)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    if begun:
        await client.head()
    assert in_flight(router) == [1]
    client.leave()
    await within(replica.received[0].aborted.wait())
    await until(lambda: in_flight(router) == [0], "nothing is in flight")


async def test_a_client_that_leaves_while_its_next_request_is_queued(bench: Bench) -> None:
    replica = await bench.replica(hang)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(replica.received) == 1, "the replica has the first request")
    client.leave()
    await within(replica.received[0].aborted.wait())
    await until(lambda: in_flight(router) == [0], "nothing is in flight")
    assert len(replica.received) == 1
    assert router.door is not None
    await until(lambda: router.door.held_bytes == 0, "no body is held")


@pytest.mark.fault("load of the aborted")
async def test_aborted_requests_leak_no_load(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"hello" in request.body:
            await until_closed(request, reader)
        writer.write(answer(CHAT))

    replicas = [await bench.replica(script) for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=0.05)
    for _ in range(25):
        clients = [await bench.client(router) for _ in range(2)]
        for client in clients:
            client.post("/v1/chat/completions", BODY)
        await until(lambda: sum(in_flight(router)) == 2, "both are in flight")
        for client in clients:
            client.leave()
        await until(lambda: in_flight(router) == [0, 0], "both are gone")
    replicas[1].metrics = b"process_start_time_seconds 2.0\n"
    restarted = router.fleet[replicas[1].name]
    await until(lambda: restarted.epoch == 1 and restarted.state is State.READY, "the restart is seen and over")
    before = [len(replica.received) for replica in replicas]
    for i in range(40):
        client = await bench.client(router)
        client.post("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"cold %d"}]}' % i)
        assert (await client.reply()).status == 200
    after = [len(replica.received) - b for replica, b in zip(replicas, before, strict=True)]
    assert min(after) >= 5  # the one that was not restarted has had 25 requests lately, so it gets fewer


@pytest.mark.fault("probes reset load", "load ends at the head")
async def test_probes_do_not_reset_what_is_in_flight(bench: Bench) -> None:
    release = asyncio.Event()

    replica = await bench.replica(streaming(release))
    replica.metrics = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    router = await bench.router(replica, probe_seconds=0.02)
    clients = [await bench.client(router) for _ in range(20)]
    for client in clients:
        client.post("/v1/chat/completions", STREAM_BODY)
    await until(lambda: router.fleet[replica.name].load.decoding == 20, "all have begun")
    seen = router.fleet[replica.name].scraped_at
    await until(lambda: router.fleet[replica.name].scraped_at != seen, "a probe went by")
    assert in_flight(router) == [20]  # past their heads, and long before their ends
    assert router.fleet[replica.name].load.decoding == 20
    client = await bench.client(router)
    client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b'warmroute_in_flight{replica="%s"} 20.0' % replica.name.encode() in (await client.reply()).body
    release.set()
    for each in clients:
        assert (await each.reply()).clean
    await until(lambda: in_flight(router) == [0], "all have ended")


@pytest.mark.fault("load begins at the answer")
async def test_load_counts_from_the_decision(bench: Bench) -> None:
    """20 different prompts at once, before any of them has an answer: half each."""
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(CHAT))

    replicas = [await bench.replica(script) for _ in range(2)]
    router = await bench.router(*replicas)
    clients = [await bench.client(router) for _ in range(20)]
    for i, client in enumerate(clients):
        text = b"%d " % i * 400
        client.post("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % text)
    await until(lambda: sum(len(replica.received) for replica in replicas) == 20, "all have been sent on")
    assert [len(replica.received) for replica in replicas] == [10, 10]
    release.set()
    for client in clients:
        assert (await client.reply()).status == 200


@pytest.mark.fault("load of the dead")
async def test_a_restarted_replica_owes_nothing_for_the_old_one(bench: Bench) -> None:
    release = asyncio.Event()

    replica = await bench.replica(streaming(release))
    router = await bench.router(replica, probe_seconds=0.02)
    clients = [await bench.client(router) for _ in range(5)]
    for client in clients:
        client.post("/v1/chat/completions", STREAM_BODY)
    for client in clients:
        await client.head()
    known = router.fleet[replica.name]
    old = known.load
    replica.metrics = b"process_start_time_seconds 2.0\n"
    await until(lambda: known.epoch == 1, "the restart is seen")
    release.set()
    for client in clients:
        while await client.chunk() is not None:
            pass
    await until(lambda: old.in_flight == 0, "the old requests have ended")
    assert (known.load.in_flight, known.load.decoding) == (0, 0)


@pytest.mark.fault("clients that do not read")
async def test_a_stalled_client_stops_the_replica_too(bench: Bench) -> None:
    """Neither side is buffered without bound: what the client does not read, the replica does not get to send."""
    sent = 0

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        piece = chunk(b"x" * 65_536)
        try:
            for _ in range(3200):  # 200 MB
                writer.write(piece)
                await writer.drain()
                sent += 65_536
        finally:
            request.aborted.set()

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.post("/v1/chat/completions", STREAM_BODY)
    assert router.door is not None
    await until(lambda: any(front.stalled for front in router.door.connections), "the client is seen to stall")
    (front,) = router.door.connections
    assert front._transport is not None
    assert front._transport.get_write_buffer_size() < 2_000_000
    assert sent < 100_000_000
    client.writer.transport.abort()
    await within(replica.received[0].aborted.wait())
    await until(lambda: in_flight(router) == [0], "nothing is in flight")


async def test_stop_lets_running_answers_end_and_refuses_new_ones(bench: Bench) -> None:
    release = asyncio.Event()

    replica = await Scripted(streaming(release)).start()
    router = Router(settings_for([replica.url], drain_seconds=20))
    await router.__aenter__()
    client = await bench.client(router)
    idle = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    await client.head()
    stopping = asyncio.create_task(router.__aexit__())
    assert await idle.closed() == b""
    with pytest.raises(ConnectionError):
        await bench.client(router)
    release.set()
    assert await client.chunk() == delta("a")
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() is None
    assert await client.closed() == b""
    await within(stopping)
    await replica.stop()


@pytest.mark.parametrize("late", [False, True])
async def test_a_connection_that_opens_as_its_client_leaves_is_not_kept(late: bool) -> None:
    came, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        pool = Pool(parse_url(f"http://{host}:{port}"), connect_seconds=5, idle_seconds=5)

        class Opened(set[Upstream]):
            def add(self, connection: Upstream, /) -> None:
                super().add(connection)
                if late:  # in the moment after it has opened
                    asyncio.get_running_loop().call_soon(connecting.cancel)
                else:
                    connecting.cancel()

        opened = pool.open = Opened()
        connecting = asyncio.create_task(pool.connect())
        with contextlib.suppress(asyncio.CancelledError):
            (await connecting).drop()
        assert opened == set()
        async with asyncio.timeout(10):
            await came.wait()
            await ended.wait()
