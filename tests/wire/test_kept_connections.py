"""Connections to replicas are kept: what may go wrong with one that is used again, and what ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from router.app import Router
from router.wire import attempts
from router.wire import front as front_module
from router.wire.front import Front
from tests.wire.conftest import Bench
from tests.wire.scripted import (
    CHAT,
    STREAM_HEAD,
    Raw,
    Received,
    Script,
    Scripted,
    answer,
    chunk,
    delta,
    reset,
    until,
    until_closed,
)

# Long enough to be warm where it was answered: it goes there again.
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 400}]}).encode()
SMALL = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


def once_a_connection(last: Callable[[asyncio.StreamWriter], None], *, before: bytes = b"") -> Script:
    """Answers the first request of each connection and ends the connection on the second one: it has arrived, or its
    end would have been seen before the request was sent."""
    served: set[asyncio.StreamWriter] = set()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer not in served:
            served.add(writer)
            writer.write(answer(CHAT))
            return
        if before:
            writer.write(before)
            await writer.drain()
        last(writer)
        raise ConnectionError("ended by the script")

    return script


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.fault("stale connections", "one race, all dead")
@pytest.mark.parametrize("last", [close, reset], ids=["closed", "reset"])
async def test_a_kept_connection_that_ends_as_the_request_arrives_is_no_failure(
    bench: Bench, last: Callable[[asyncio.StreamWriter], None]
) -> None:
    replica = await bench.replica(once_a_connection(last))
    router = await bench.router(replica, probe_seconds=60)
    client = await bench.client(router)
    for _ in range(20):
        client.post("/v1/chat/completions", SMALL)
        reply = await client.reply()
        assert (reply.status, reply.body) == (200, CHAT)
    # The first, and then each one twice: on the kept connection and on a fresh one, which the next one finds kept.
    assert len(replica.received) == 1 + 19 * 2
    assert router.fleet[replica.name].shunned_until == 0.0
    assert router.telemetry.attempts.labels(replica.name, "complete").value == 20
    assert router.telemetry.attempts.labels(replica.name, "unreached").value == 0


async def home_of(bench: Bench, replicas: list[Scripted], **changes: object) -> tuple[Scripted, Scripted, bytes]:
    """BODY asked twice: where it is warm, the other replica, and who answered the second time."""
    router = await bench.router(*replicas, probe_seconds=60, **changes)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    home = (await client.reply()).header(b"x-warmroute-replica")
    first, other = sorted(replicas, key=lambda replica: replica.name.encode() != home)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, CHAT)
    return first, other, reply.header(b"x-warmroute-replica") or b""


async def test_one_that_ends_later_broke_over_the_request_and_is_another_replicas(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "STALE_SECONDS", 0.0)
    replicas = [await bench.replica(once_a_connection(close)) for _ in range(2)]
    first, other, answered = await home_of(bench, replicas)
    assert answered == other.name.encode()
    assert (len(first.received), len(other.received)) == (2, 1)


async def test_one_that_ends_within_its_answers_head_is_another_replicas(bench: Bench) -> None:
    replicas = [await bench.replica(once_a_connection(close, before=b"HTTP/1.1 2")) for _ in range(2)]
    first, other, answered = await home_of(bench, replicas)
    assert answered == other.name.encode()
    assert (len(first.received), len(other.received)) == (2, 1)


async def test_the_fresh_connection_settles_it(bench: Bench) -> None:
    served: set[Scripted] = set()

    def dies(replica: Scripted) -> Script:
        async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if served and served != {replica}:
                writer.write(answer(CHAT))
            elif replica not in served:
                served.add(replica)
                writer.write(answer(CHAT))
            else:
                writer.close()
                raise ConnectionError("ended by the script")

        return script

    replicas = [await bench.replica() for _ in range(2)]
    for replica in replicas:
        replica.script = dies(replica)
    first, other, answered = await home_of(bench, replicas)
    assert answered == other.name.encode()
    # Answered, broken on the kept connection, broken on a fresh one; and no third time.
    assert (len(first.received), len(other.received)) == (3, 1)


@pytest.mark.fault("stale connections")
async def test_one_stale_connection_is_enough(bench: Bench) -> None:
    """After a pause all of them are stale: the second try does not take another kept one."""
    scripted = once_a_connection(close)
    together = asyncio.Barrier(3)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"first" in request.body:
            await together.wait()
        await scripted(request, reader, writer)

    replica = await bench.replica(script)
    router = await bench.router(replica, probe_seconds=60)
    clients = [await bench.client(router) for _ in range(3)]
    for client in clients:
        client.post("/v1/embeddings", b'{"input":"first"}')
    for client in clients:
        assert (await client.reply()).status == 200
    clients[0].post("/v1/chat/completions", SMALL)
    assert (await clients[0].reply()).status == 200
    assert len(replica.received) == 3 + 2


@pytest.mark.fault("stale connections")
async def test_idle_connections_are_closed_though_nobody_asks(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, probe_seconds=60, upstream_idle_seconds=0.01)
    client = await bench.client(router)
    client.post("/v1/chat/completions", SMALL)
    assert (await client.reply()).status == 200
    await until(lambda: replica.open_connections == 0, "the router has closed its connection")


async def test_a_replica_behind_a_path_is_asked_there(bench: Bench) -> None:
    replica = await bench.replica()
    replica.base = b"/fleet/a"
    router = await bench.router(replica)
    assert [each.name for each in router.fleet.ready()] == [replica.name]
    client = await bench.client(router)
    client.send(b"GET /v1/files?a=b%20c HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    assert reply.header(b"x-warmroute-replica") == replica.name.encode()
    assert replica.received[0].line == b"GET /fleet/a/v1/files?a=b%20c HTTP/1.1"
    assert replica.received[0].header(b"host") == b"127.0.0.1:%d" % replica.port


class Slow:
    """A client that reads nothing. Its second answer's last bytes are what its connection cannot take at once, just as
    the replica's connection is free for others again."""

    BIG, SECOND = b"x" * 12_000_000, b"y" * 5000

    @classmethod
    async def script(cls, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match request.line.split()[1]:
            case b"/1":
                writer.write(answer(cls.BIG))
            case b"/2":
                writer.write(answer(cls.SECOND))
            case b"/3":
                writer.write(STREAM_HEAD + chunk(delta("a")))
                await until_closed(request, reader)
            case _:
                writer.write(answer(CHAT))

    @staticmethod
    async def begin(client: Raw, router: Router) -> Front:
        assert router.door is not None
        await until(lambda: len(router.door.connections) == 1, "the client is there")  # type: ignore[union-attr]
        (front,) = router.door.connections
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: front.finished, "the first answer lies at the router")
        transport = front._transport
        assert transport is not None
        assert not front.stalled
        looks = [0, 0]

        def settled() -> bool:
            looks[:] = looks[1], transport.get_write_buffer_size()
            return 0 < looks[0] == looks[1]

        await until(settled, "the client's kernel takes no more of it")
        transport.set_write_buffer_limits(high=looks[1] + 100)
        client.send(b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: front.stalled, "the second answer is too much")
        await until(lambda: front.finished, "and whole")
        return front


@pytest.mark.fault("clients that do not read")
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_client_that_does_not_read_holds_up_nobody_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(front_module, "WRITE_HIGH_BYTES", 2 * len(Slow.BIG))
    replica = await bench.replica(Slow.script)
    router = await bench.router(replica, probe_seconds=60, upstream_idle_seconds=60)
    slow = await bench.client(router)
    await Slow.begin(slow, router)
    connections = replica.connections
    other = await bench.client(router)
    other.post("/v1/chat/completions", SMALL)
    assert (await other.reply()).body == CHAT
    if leaves:
        slow.writer.transport.abort()
        await until(lambda: len(router.door.connections) == 1, "the slow one is gone")  # type: ignore[union-attr]
    else:
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [(await slow.reply()).body for _ in range(2)] == [Slow.BIG, Slow.SECOND]
    other.post("/v1/chat/completions", SMALL)
    assert (await other.reply()).body == CHAT
    assert replica.connections == connections, "all of it on one connection"


async def test_a_client_gets_no_further_answer_before_it_reads_the_last_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "WRITE_HIGH_BYTES", 2 * len(Slow.BIG))
    replica = await bench.replica(Slow.script)
    router = await bench.router(replica, probe_seconds=60)
    slow = await bench.client(router)
    await Slow.begin(slow, router)
    slow.send(b"GET /3 HTTP/1.1\r\nHost: x\r\n\r\n")
    other = await bench.client(router)
    for _ in range(2):
        other.post("/v1/chat/completions", SMALL)
        assert (await other.reply()).body == CHAT
    assert [got.line.split()[1] for got in replica.received[:2]] == [b"/1", b"/2"]
    assert b"/3" not in [got.line.split()[1] for got in replica.received]
    slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert [(await slow.reply()).body for _ in range(2)] == [Slow.BIG, Slow.SECOND]
    assert (await slow.head()).status == 200
    assert await slow.chunk() == delta("a")


@pytest.mark.parametrize("cut", [0, 1, 30, 200, None], ids=["nothing", "a byte", "a line", "a head", "all of it"])
async def test_a_client_goes_on_after_a_stream_whatever_it_had_sent_ahead(bench: Bench, cut: int | None) -> None:
    """Of its next request some came with the first one, some while that was answered, the rest afterwards."""
    go_on = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' not in request.body:
            writer.write(answer(CHAT))
            return
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await writer.drain()
        await go_on.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica))
    streamed = SMALL[:-1] + b',"stream":true}'
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
    following = post % (len(BODY), BODY)
    client.send(post % (len(streamed), streamed) + following[:cut])
    assert (await client.head()).status == 200
    assert await client.chunk() == delta("a")
    rest = b"" if cut is None else following[cut:]
    client.send(rest[:50])
    await asyncio.sleep(0)
    go_on.set()
    while await client.chunk() is not None:
        pass
    client.send(rest[50:])
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, CHAT)
    assert replica.received[-1].body == BODY
