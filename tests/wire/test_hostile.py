"""Peers that mean harm, or break at the worst moment: what each could do to others once, and no longer can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from router.prompt.request import read, without_hand_off
from router.prompt.tokens import Tokenizer
from tests.wire.conftest import Bench, older
from tests.wire.scripted import BOUND, CHAT, Received, answer, chunk, delta, until

TINY = Path(__file__).parents[2] / "fake_backend" / "tiny"
ASK = b'{"model":"m","prompt":"hello"}'


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


async def test_a_request_that_never_began_leaves_no_bytes_behind(bench: Bench) -> None:
    router = await bench.router(await bench.replica())
    door = router.door
    assert door is not None
    sock = socket.create_connection(router.address)
    await until(lambda: bool(door.connections), "accepted")
    sock.sendall(
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(ASK), ASK)
    )
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    await until(lambda: not door.connections, "gone")
    assert door.held_bytes == 0


def test_looking_for_hand_offs_takes_memory_in_proportion() -> None:
    body = b'{"kv_transfer_params":1,"prompt":"' + b"x" * 2_000_000 + b'"}'
    tracemalloc.start()
    try:
        without_hand_off(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(body)  # 115 times


async def test_looking_for_hand_offs_takes_time_in_proportion() -> None:
    body = b'"' + b'\\"' * 60_000  # 30 s; a minute for 170 KB, a day for 6 MB; and `re` keeps the interpreter's lock
    async with asyncio.timeout(BOUND):
        await asyncio.to_thread(read, "/v1/completions", body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","vllm_xargs":{"kv_transfer_params":"x"}}',
        b'{"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":{"do_remote_prefill":true}}}}',
    ],
)
async def test_hand_offs_inside_what_the_engine_unfolds(bench: Bench, body: bytes) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.post("/v1/completions", body)
    await client.reply()
    assert b"kv_transfer_params" not in replica.received[0].body


async def test_a_client_that_reads_no_answers_is_given_no_more(bench: Bench) -> None:
    router = await bench.router(await bench.replica())
    door = router.door
    assert door is not None
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(router.address)
    sock.setblocking(False)
    with contextlib.closing(sock):
        await until(lambda: bool(door.connections), "accepted")
        (front,) = door.connections
        asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 4000
        await asyncio.get_running_loop().sock_sendall(sock, asked[: 60 * 1024])
        unsent = 0
        for _ in range(2000):
            await asyncio.sleep(0)
            assert front._transport is not None
            unsent = max(unsent, front._transport.get_write_buffer_size())
        assert unsent < 1024 * 1024


async def test_a_client_that_never_reads_the_rest_of_a_whole_answer_is_cut(bench: Bench) -> None:
    size = 8_000_000

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"x" * size))

    router = await bench.router(await bench.replica(script), keep_alive_seconds=0.2, idle_timeout_seconds=0.5)
    door = router.door
    assert door is not None
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(router.address)
    sock.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    sock.setblocking(False)
    with contextlib.closing(sock):
        await until(lambda: bool(door.connections), "accepted")
        (front,) = door.connections
        await until(lambda: front.started, "begun")
        while not front.finished:
            with contextlib.suppress(BlockingIOError):
                sock.recv(20_000)
            await asyncio.sleep(0)
        await until(lambda: not door.connections, "the client that does not read is cut")


@pytest.mark.parametrize("depth", [970, 1000, 1020])
@pytest.mark.parametrize(
    "where", [b'"messages":[{"role":"user","content":%s}]', b'"tools":%s,"messages":[{"role":"user"}]']
)
async def test_deep_bodies_are_the_engines_to_judge(bench: Bench, depth: int, where: bytes) -> None:
    client = await bench.client(await bench.router(await bench.replica()))
    client.post("/v1/chat/completions", b'{"model":"m",' + where % (b"[" * depth + b"]" * depth) + b"}")
    assert (await client.reply()).status == 200


async def test_an_absurd_n_is_the_engines_to_judge_and_weighs_no_more_than_a_large_one(bench: Bench) -> None:
    router = await bench.router(await bench.replica())
    client = await bench.client(router)
    client.post("/v1/completions", b'{"model":"m","prompt":"x","n":1%s,"x":NaN}' % (b"0" * 400))
    assert (await client.reply()).status == 200  # 500: OverflowError
    client.post("/v1/completions", b'{"model":"m","prompt":"x","n":1000000000000000000}')
    assert (await client.reply()).status == 200
    (replica,) = router.fleet
    assert replica.load._routed < 1e9  # 1.28e21


async def test_a_connection_with_an_unsent_body_is_not_used_again(bench: Bench) -> None:
    """An answer may come before the body was read (413). What is still to be sent would hold up the next request."""
    served = 0
    stuck = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models "):
                    writer.write(answer(b'{"data":[{"id":"m"}]}'))
                elif head.startswith(b"GET /metrics "):
                    writer.write(answer(b"", kind=b"text/plain"))
                elif head.startswith(b"GET "):
                    writer.write(answer(b"{}", status=b"404 Not Found"))
                else:
                    served += 1
                    if served == 1:
                        writer.write(answer(b"{}", status=b"413 Too Large"))
                        await stuck.wait()
                    writer.write(answer(CHAT))

    replica = await bench.replica()
    await replica.stop()
    server = await asyncio.start_server(serve, "127.0.0.1", replica.port)
    async with server:
        router = await bench.router(replica)
        client = await bench.client(router)
        client.post("/v1/completions", b'{"model":"m","prompt":"%s"}' % (b"x" * 30_000_000))
        assert (await client.reply()).status == 413
        client.post("/v1/completions", ASK)
        assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    "page",
    [
        b"vllm:num_requests_running +Inf\n",
        b"vllm:num_requests_running NaN\n",
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % (b"9" * 5000),
        b'vllm:cache_config_info{block_size="16",prefix_caching_hash_algo="builtin"} 1\n',
    ],
)
async def test_odd_metrics_take_no_replica_out(bench: Bench, page: bytes) -> None:
    replica = await bench.replica()
    replica.metrics = page
    client = await bench.client(await bench.router(replica, tokenizer=TINY))
    client.post("/v1/completions", b'{"model":"m","prompt":"%s"}' % (b"hello " * 50))
    assert (await client.reply()).status == 200


@pytest.mark.fault("slow metrics")
@pytest.mark.parametrize("how", ["hangs", "breaks", "garbage"])
async def test_metrics_that_do_not_come_take_no_replica_out(bench: Bench, how: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /metrics "):
                    if how == "hangs":
                        await reader.read()
                    writer.write(b"" if how == "breaks" else b"\0\1\2")
                    break
                writer.write(answer(b'{"data":[{"id":"m"}]}' if b"/v1/models" in head else CHAT))
        writer.close()

    replica = await bench.replica()
    await replica.stop()
    async with await asyncio.start_server(serve, "127.0.0.1", replica.port):
        router = await bench.router(replica, probe_timeout_seconds=0.1, probe_seconds=0.05)
        await until(lambda: bool(router.fleet.ready()), "it is ready")
        client = await bench.client(router)
        client.send(b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    "said",
    [
        {"usage": {"prompt_tokens": 5, "completion_tokens": -1}},
        {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -5}}},
        *(
            {"choices": [{"index": 0, "text": "x", "token_ids": ids * 40}]}
            for ids in (["a"], [2**70], [None], [[1]], [1.5])
        ),
    ],
)
async def test_odd_answers_fail_nothing(bench: Bench, said: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(json.dumps({**json.loads(CHAT), **said}).encode()))

    replica = await bench.replica(script)
    replica.metrics = b'vllm:cache_config_info{block_size="16",prefix_caching_hash_algo="sha256_cbor"} 1\n'
    client = await bench.client(await bench.router(replica, tokenizer=TINY))
    for _ in range(2):
        client.post("/v1/completions", ASK)
        assert (await client.reply()).status == 200
    assert errors(caplog) == []


async def test_trailers_and_chunk_extensions_are_bounded(bench: Bench) -> None:
    router = await bench.router(await bench.replica())
    for start in (b"0\r\nX: ", b"1;"):
        client = await bench.client(router)
        client.send(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + start)
        for _ in range(50):
            client.send(b"a" * 65536)
            with contextlib.suppress(ConnectionError):
                await client.writer.drain()
        client.send(b"\r\nx\r\n0\r\n\r\n" if start == b"1;" else b"\r\n\r\n")
        assert (await client.reply()).status in (400, 431)


async def test_an_idle_connection_is_closed_in_silence_whatever_its_last_head_came_in(bench: Bench) -> None:
    router = await bench.router(await bench.replica(), header_timeout_seconds=60, keep_alive_seconds=600)
    door = router.door
    assert door is not None
    client = await bench.client(router)
    client.send(b"GET /health HTTP/1.1\r\nHo")
    await until(lambda: any(front._head_seen for front in door.connections), "the first half is read")
    (front,) = door.connections
    client.send(b"st: x\r\n\r\n")
    assert (await client.reply()).status == 200
    await until(lambda: front._task is None, "the answer is over")
    older(front, 601)
    front._judge_time()
    assert await client.closed() == b""


async def test_a_trickling_head_ends(bench: Bench) -> None:
    router = await bench.router(await bench.replica(), header_timeout_seconds=0.2)
    client = await bench.client(router)
    client.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
    ended = asyncio.create_task(client.closed())
    for _ in range(60):  # each well within the bound, all together well beyond it
        client.send(b"a")
        await asyncio.wait([ended], timeout=0.05)
    assert ended.done() and ended.result().startswith(b"HTTP/1.1 408 ")


@pytest.mark.fault("silent truncation")
async def test_a_compressed_stream_that_breaks_is_not_ended_in_plain_text(bench: Bench) -> None:
    zipped = zlib.compressobj(wbits=31)
    part = zipped.compress(delta("x")) + zipped.flush(zlib.Z_SYNC_FLUSH)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + chunk(part)
        )
        raise ConnectionError("that was all")

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/completions", ASK)
    reply = await client.reply()
    assert (reply.body, reply.clean) == (part, False)


async def test_a_continue_does_not_overtake_an_answer(bench: Bench) -> None:
    client = await bench.client(await bench.router(await bench.replica()))
    client.post("/v1/completions", ASK)
    client.send(b"POST /b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert (await client.head()).status == 200


async def test_no_continue_to_http_1_0(bench: Bench) -> None:
    client = await bench.client(await bench.router(await bench.replica()))
    client.send(b"POST /b HTTP/1.0\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
    assert (await client.head()).status == 200


@pytest.mark.parametrize("flood", [20_000, 60_000], ids=["within the bound", "beyond it"])
async def test_a_client_that_leaves_behind_a_flood_is_noticed(bench: Bench, flood: int) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        request.aborted.set()
        raise ConnectionError("the router left")

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/completions", ASK)
    await until(lambda: bool(replica.received), "sent")
    client.send(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * flood)
    if flood < 30_000:
        client.writer.transport.abort()
    async with asyncio.timeout(BOUND):
        await replica.received[0].aborted.wait()


@pytest.mark.fault("500 everywhere")
async def test_a_request_that_kills_engines_is_not_taken_round_the_fleet(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        raise ConnectionError("killed by it")

    replicas = [await bench.replica(script) for _ in range(4)]
    client = await bench.client(await bench.router(*replicas))
    client.post("/v1/completions", ASK)
    assert (await client.reply()).status == 502
    assert sum(len(replica.received) for replica in replicas) <= 2  # as for a 500


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"HTTP/1.1 042 Odd\r\nContent-Length: 2\r\n\r\nok", rb"HTTP/1\.1 502 "),
        (b"HTTP/1.1 200 O\0K\r\nContent-Length: 2\r\n\r\nok", rb"HTTP/1\.1 502 |HTTP/1\.1 200 [^\0]*\r\n"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", rb"HTTP/1\.1 204 (?!.*Content-Length)"),
    ],
)
async def test_odd_heads(bench: Bench, raw: bytes, told: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/completions", ASK)
    assert re.match(told, (await client.head()).head, re.DOTALL)


@pytest.mark.parametrize(
    "line", [b"GET /a HTTP/0.9", b"GET /a HTTP/2.0", b"DESCRIBE /a RTSP/1.0", b"SOURCE /a ICE/1.0"]
)
async def test_only_http_1(bench: Bench, line: bytes) -> None:
    client = await bench.client(await bench.router(await bench.replica()))
    client.send(line + b"\r\nHost: x\r\n\r\n")
    assert (await client.reply()).status in (400, 505)


async def test_an_odd_model_root_takes_no_replica_out(bench: Bench) -> None:
    replica = await bench.replica()
    replica.models = [{"id": "m", "root": "/" + "a" * 5000}]
    client = await bench.client(await bench.router(replica))
    client.post("/v1/completions", ASK)
    assert (await client.reply()).status == 200


def test_others_run_while_a_long_prompt_is_tokenized() -> None:
    tokenizer = Tokenizer.load(TINY)
    work = threading.Thread(target=tokenizer.encode, args=("x" * 2_000_000, True))
    work.start()
    turns = 0
    while work.is_alive():
        work.join(0.001)
        turns += 1
    assert turns > 20  # 1: `encode` keeps the interpreter's lock, `encode_batch_fast` does not
