"""A failure before the first byte is invisible where another replica can answer; after it, it is told honestly."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest

from tests.wire.conftest import Bench
from tests.wire.scripted import (
    CHAT,
    STREAM_HEAD,
    Received,
    Scripted,
    answer,
    chunk,
    delta,
    until,
    until_closed,
)

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def status(code: bytes, extra: bytes = b"") -> bytes:
    return answer(b'{"error":{"message":"m","type":"t","param":null,"code":1}}', status=code, extra=extra)


async def hang_up(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.fault("stale connections", "one race, all dead")
async def test_a_connection_closed_while_idle_is_no_failure(bench: Bench) -> None:
    """The replica closes right after each answer, just as the next request is on its way: 60 times."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(CHAT))
        await writer.drain()
        writer.close()

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    for _ in range(60):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 200
    assert len(replica.received) == 60
    assert router.fleet[replica.name].shunned_until == 0.0


async def test_a_connection_idle_for_too_long_is_not_used(bench: Bench) -> None:
    now = asyncio.get_running_loop().time

    def ticked(then: float) -> bool:
        return now() > then

    replica = await bench.replica()
    for seconds, connections in ((1e-9, 3), (60, 1)):
        router = await bench.router(replica, upstream_idle_seconds=seconds, probe_seconds=60)
        before = replica.connections
        client = await bench.client(router)
        for _ in range(3):
            client.post("/v1/chat/completions", BODY)
            await client.reply()
            await until(functools.partial(ticked, now()), "the clock ticks")
        assert replica.connections - before == connections


@pytest.mark.fault("refused connection")
async def test_a_refused_connection_is_another_replicas_request(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=60)
    await replicas[1].stop()
    client = await bench.client(router)
    for i in range(10):
        client.post("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"%d"}]}' % i)
        reply = await client.reply()
        assert (reply.status, reply.header(b"x-warmroute-replica")) == (200, replicas[0].name.encode())


@pytest.mark.fault("refused connection")
async def test_however_many_are_gone_one_that_is_there_answers(bench: Bench) -> None:
    """What cannot be reached has not been given the request, and takes none of its attempts."""
    replicas = [await bench.replica() for _ in range(6)]
    router = await bench.router(*replicas, probe_seconds=60, max_attempts=2)
    for replica in replicas[1:]:
        await replica.stop()
    client = await bench.client(router)
    for _ in range(2):
        client.post("/v1/chat/completions", BODY)
        reply = await client.reply()
        assert (reply.status, reply.header(b"x-warmroute-replica")) == (200, replicas[0].name.encode())


@pytest.mark.fault("refused connection")
async def test_a_reset_before_the_first_byte_is_another_replicas_request(bench: Bench) -> None:
    replicas = [await bench.replica(hang_up), await bench.replica()]
    router = await bench.router(*replicas, policy="round_robin", probe_seconds=60)
    client = await bench.client(router)
    for _ in range(4):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).body == CHAT
    assert len(replicas[0].received) >= 1


@pytest.mark.fault("refused connection")
async def test_all_gone_is_a_502_that_names_them(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=60)
    for replica in replicas:
        await replica.stop()
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    error = reply.json["error"]
    assert reply.status == 502
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    assert all(replica.name in error["message"] for replica in replicas)


@pytest.mark.fault("429 or 503")
async def test_no_ready_replica_is_a_503_to_come_back_later(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, probe_seconds=0.02)
    await replica.stop()
    await until(lambda: not router.fleet.ready(), "the replica is lost")
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert (reply.status, reply.header(b"retry-after")) == (503, b"1")
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    ready = await client.reply()
    assert ready.status == 503
    assert replica.name in ready.body.decode()
    await replica.start()
    await until(lambda: bool(router.fleet.ready()), "it is back")
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.reply()).status == 200
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200


@pytest.mark.fault("500 everywhere", "429 multiplied", "429 or 503")
@pytest.mark.parametrize(
    ("code", "calls", "told"),
    [
        (b"500 Internal Server Error", 2, 500),  # once more, elsewhere: it may be the request's own doing
        (b"503 Service Unavailable", 3, 503),
        (b"429 Too Many Requests", 1, 429),
        (b"400 Bad Request", 1, 400),
        (b"404 Not Found", 1, 404),
    ],
)
async def test_which_statuses_are_tried_elsewhere(bench: Bench, code: bytes, calls: int, told: int) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(status(code, b"Retry-After: 7\r\n"))

    replicas = [await bench.replica(script) for _ in range(3)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert (reply.status, reply.header(b"retry-after")) == (told, b"7")
    assert reply.body == b'{"error":{"message":"m","type":"t","param":null,"code":1}}'
    assert sum(len(replica.received) for replica in replicas) == calls
    assert max(len(replica.received) for replica in replicas) == 1  # never the same one twice


async def test_a_500_is_answered_by_another_replica(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(status(b"500 Internal Server Error"))

    replicas = [await bench.replica(script), await bench.replica()]
    router = await bench.router(*replicas, policy="round_robin")
    client = await bench.client(router)
    for _ in range(4):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).body == CHAT


@pytest.mark.fault("hidden timeout")
async def test_a_silent_replica_is_given_up_and_named(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, first_byte_timeout_seconds=0.5)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert reply.status == 504
    assert "first_byte_timeout_seconds" in reply.body.decode()
    await asyncio.wait_for(replica.received[0].aborted.wait(), 60)


@pytest.mark.fault("silent truncation", "500 everywhere")
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
async def test_a_stream_that_breaks_ends_with_an_error_and_no_done(bench: Bench, reset: bool) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")) + chunk(delta("b")) + chunk(b'data: {"cho'))
        await writer.drain()
        await go.wait()
        writer.transport.abort() if reset else writer.close()

    go = asyncio.Event()
    replicas = [await bench.replica(script) for _ in range(2)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    reply = await client.head()
    for _ in range(3):
        reply.body += await client.chunk() or b""
    go.set()
    while (data := await client.chunk()) is not None:
        reply.body += data
    assert reply.body.startswith(delta("a") + delta("b"))
    assert b"[DONE]" not in reply.body
    last = reply.body.rstrip().rpartition(b"\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 502
    assert await client.closed() == b""
    assert sum(len(replica.received) for replica in replicas) == 1  # bytes were sent: no second try
    await until(lambda: sum(r.load.in_flight for r in router.fleet) == 0, "nothing is in flight")


@pytest.mark.fault("silent truncation")
@pytest.mark.parametrize("framed", [True, False], ids=["chunked", "to its close"])
@pytest.mark.parametrize("said", [b"", delta("a")], ids=["nothing", "a part"])
async def test_a_stream_that_ends_without_saying_so_is_no_whole_answer(bench: Bench, framed: bool, said: bytes) -> None:
    """As HTTP it is whole: a server between that swallows a replica's death makes it look so."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if framed:
            writer.write(STREAM_HEAD + (chunk(said) if said else b"") + b"0\r\n\r\n")
        else:
            writer.write(STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + said)
            await writer.drain()
            raise ConnectionError("that was all")

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    reply = await client.reply()
    assert reply.body.startswith(said)
    error = json.loads(reply.body.removeprefix(said).removeprefix(b"data: "))["error"]
    assert (error["code"], reply.clean) == (502, True)
    assert "before its answer was done" in error["message"]
    assert await client.closed() == b""
    await until(lambda: router.fleet[replica.name].load.in_flight == 0, "nothing is in flight")


@pytest.mark.parametrize("last", [b'data: {"error":{"code":400}}\n\n', b"data: [DONE]\n\n"], ids=["an error", "done"])
async def test_a_stream_that_says_how_it_ends_is_left_alone(bench: Bench, last: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")) + chunk(last) + b"0\r\n\r\n")

    client = await bench.client(await bench.router(await bench.replica(script)))
    for _ in range(2):
        client.post("/v1/chat/completions", STREAM_BODY)
        assert (await client.reply()).body == delta("a") + last


@pytest.mark.fault("silent truncation")
async def test_a_whole_answer_that_breaks_is_no_clean_end(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/chat/completions", BODY)
    reply = await client.reply()
    assert (reply.body, reply.clean) == (b"{", False)


@pytest.mark.fault("answers that are no HTTP")
@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"\x00" * 64]
)
async def test_what_is_not_http_is_another_replicas_request(bench: Bench, garbage: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)

    replicas = [await bench.replica(script), await bench.replica()]
    router = await bench.router(*replicas, policy="round_robin", probe_seconds=60)
    client = await bench.client(router)
    for _ in range(3):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).body == CHAT


@pytest.mark.fault("hidden pool limit")
async def test_400_slow_streams_all_begin(bench: Bench) -> None:
    """No pool of connections caps concurrency: each stream begins while all before it are still open."""
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    router = await bench.router(await bench.replica(script))
    clients = [await bench.client(router) for _ in range(400)]
    for client in clients:
        client.post("/v1/chat/completions", STREAM_BODY)
    for client in clients:
        assert (await client.head()).status == 200
        assert await client.chunk() == delta("a")
    release.set()
    for client in clients:
        assert await client.chunk() == b"data: [DONE]\n\n"
        assert await client.chunk() is None


@pytest.mark.fault("other routes")
async def test_routes_without_a_prompt_go_by_load(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    for path in ("/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score", "/v1/audio/speech", "/tokenize"):
        for _ in range(2):
            client.post(path, b'{"model":"m","input":"hello"}')
            assert (await client.reply()).status == 200
    assert [len(replica.received) for replica in replicas] == [6, 6]


@pytest.mark.fault("shapes of prompts")
async def test_prompts_of_every_shape(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    ids = list(range(600))
    for prompt in ("x" * 3000, ids, [ids, ids[::-1]], ["y" * 3000, "z" * 3000], [], [[]], "", None, {}, [None], 5):
        client.post("/v1/completions", json.dumps({"model": "m", "prompt": prompt}).encode())
        assert (await client.reply()).status == 200
    client.post("/v1/completions", json.dumps({"model": "m", "prompt": [ids, ids[::-1]]}).encode())
    reply = await client.reply()
    # 600 ids of 4 bytes, in blocks of 64 bytes: 37 whole blocks of 16 tokens each, for both prompts.
    assert reply.header(b"x-warmroute-predicted-tokens") == str(2 * 37 * 16).encode()


@pytest.mark.fault("equal lengths")
async def test_token_prompts_of_equal_length_are_different_prompts(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    for i in range(20):
        client.post("/v1/completions", json.dumps({"model": "m", "prompt": [i] * 300}).encode())
        assert (await client.reply()).header(b"x-warmroute-predicted-tokens") == b"0"
    assert min(len(replica.received) for replica in replicas) >= 8


@pytest.mark.fault("shared system prompt")
async def test_a_shared_system_prompt_does_not_pin_everyone_to_one_replica(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(CHAT))

    release = asyncio.Event()
    replicas = [await bench.replica(script) for _ in range(2)]
    router = await bench.router(*replicas)
    clients = [await bench.client(router) for _ in range(24)]
    for i, client in enumerate(clients):
        messages = [{"role": "system", "content": "common " * 430}, {"role": "user", "content": f"question {i}"}]
        client.post("/v1/chat/completions", json.dumps({"model": "m", "messages": messages}).encode())
    await until(lambda: sum(len(replica.received) for replica in replicas) == 24, "all have been sent on")
    assert min(len(replica.received) for replica in replicas) >= 6
    release.set()
    for client in clients:
        assert (await client.reply()).status == 200


async def test_a_replica_is_not_remembered_for_a_prompt_it_refused(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(status(b"400 Bad Request"))

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica))
    body = json.dumps({"model": "m", "prompt": "x" * 3000}).encode()
    for _ in range(2):
        client.post("/v1/completions", body)
        assert (await client.reply()).header(b"x-warmroute-predicted-tokens") == b"0"


async def test_unknown_models_are_the_engines_to_judge_and_known_ones_go_where_they_are(bench: Bench) -> None:
    replicas: list[Scripted] = [await bench.replica() for _ in range(2)]
    replicas[1].models = [
        {"id": "other", "root": "other"},
        {"id": "lora", "root": "/adapters/lora", "parent": "other"},
    ]
    router = await bench.router(*replicas)
    client = await bench.client(router)
    for model, where in (("m", 0), ("other", 1), ("lora", 1)):
        for _ in range(3):
            client.post("/v1/completions", json.dumps({"model": model, "prompt": "x"}).encode())
            assert (await client.reply()).header(b"x-warmroute-replica") == replicas[where].name.encode()
    client.post("/v1/completions", b'{"model":"nope","prompt":"x"}')
    assert (await client.reply()).status == 200
