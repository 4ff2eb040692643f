"""Bodies go up byte for byte, answers come down byte for byte. Raw sockets on both sides."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, answer, chunk, delta, until

BODIES = {
    "duplicate keys": b'{"model":"m","model":"m","messages":[{"role":"user","content":"a"}],"seed":1,"seed":2}',
    "lone surrogate": b'{"model":"m","messages":[{"role":"user","content":"a\\ud800b"}]}',
    "big integer": b'{"model":"m","seed":123456789012345678901234567890,"messages":[{"role":"user","content":"a"}]}',
    "byte order mark": b'\xef\xbb\xbf{"model":"m","messages":[]}',
    "NaN": b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"a"}]}',
    "white space and floats": b' {\n\t"model" : "m" , "temperature": 1.0E-0, "messages" : [ ] }\r\n ',
    "escapes": b'{"model":"m","messages":[{"role":"user","content":"\\u00e9\\/\\n"}]}',
    "latin-1": b'{"model":"m","messages":[{"role":"user","content":"caf\xe9"}]}',
    "truncated": b'{"model":',
    "an array": b"[1]",
    "null": b"null",
    "deep": b"[" * 3000 + b"]" * 3000,
    "empty": b"",
    "not JSON at all": bytes(range(256)) * 4,
}


@pytest.mark.fault("bytes of bodies")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/anything/else"])
async def test_a_body_arrives_as_it_was_sent(bench: Bench, path: str, body: bytes) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post(path, body)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, CHAT)
    assert replica.received[0].body == body


@pytest.mark.fault("large bodies")
async def test_a_16_mb_body_arrives_whole(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 3_300_000}]}).encode()
    assert len(body) > 16_000_000
    client.post("/v1/chat/completions", body)
    assert (await client.reply()).status == 200
    assert replica.received[0].body == body


async def test_a_chunked_body_arrives_whole_and_measured(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(chunk(b'{"model":"m",') + chunk(b'"prompt":"a"}') + b"0\r\nX-Trailer: 1\r\n\r\n")
    assert (await client.reply()).status == 200
    assert replica.received[0].body == b'{"model":"m","prompt":"a"}'
    assert replica.received[0].header(b"content-length") == b"26"
    assert replica.received[0].header(b"transfer-encoding") is None
    assert replica.received[0].header(b"x-trailer") is None


@pytest.mark.fault("identity", "query strings")
async def test_method_target_and_headers_arrive(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.send(
        b"PATCH /v1/some%20thing?api-version=1&x=a%20b HTTP/1.1\r\nHost: x\r\nX-Request-Id: r-1\r\n"
        b"traceparent: 00-1\r\n"
        b"AUTHORIZATION: Bearer k\r\nX-Two: 1\r\nX-Two: 2\r\nContent-Length: 2\r\n\r\nhi"
    )
    assert (await client.reply()).status == 200
    got = replica.received[0]
    assert got.line == b"PATCH /v1/some%20thing?api-version=1&x=a%20b HTTP/1.1"
    assert got.header(b"host") == replica.name.encode()
    assert b"AUTHORIZATION: Bearer k\r\n" in got.head
    assert b"X-Two: 1\r\nX-Two: 2\r\n" in got.head
    assert got.header(b"x-request-id") == b"r-1"
    assert got.header(b"traceparent") == b"00-1"


@pytest.mark.fault("hop-by-hop", "our own headers")
async def test_hop_by_hop_and_our_own_headers_do_not_cross(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            answer(
                CHAT, extra=b"Connection: X-Back\r\nX-Back: 1\r\nKeep-Alive: timeout=5\r\nX-Warmroute-Replica: evil\r\n"
            )
        )

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica))
    client.post(
        "/v1/chat/completions",
        b'{"model":"m","messages":[]}',
        b"Connection: X-Hop, keep-alive\r\nX-Hop: 1\r\nTE: trailers\r\nProxy-Authorization: Basic x\r\n"
        b"X-Warmroute-Replica: other\r\n",
    )
    reply = await client.reply()
    for name in (b"connection", b"x-hop", b"te", b"proxy-authorization", b"x-warmroute-replica"):
        assert replica.received[0].header(name) is None, name
    assert reply.header(b"x-back") is None
    assert reply.header(b"keep-alive") is None
    assert reply.headers(b"x-warmroute-replica") == [replica.name.encode()]


async def test_hand_off_parameters_of_a_client_are_cut_out(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    body = (
        b'{"model":"m", "kv_transfer_params": {"do_remote_decode": true}, "messages":[],'
        b'"kv_\\u0074ransfer_params":{"do_remote_prefill":true},"seed":NaN}'
    )
    for path in ("/v1/chat/completions", "/v1/responses", "/inference/v1/generate"):
        client.post(path, body)
        assert (await client.reply()).status == 200
    for got in replica.received:
        assert b"transfer_params" not in got.body
        assert b"do_remote" not in got.body
        assert b'"seed":NaN' in got.body


@pytest.mark.fault("answer headers", "identity", "encoding told wrong")
async def test_an_answer_comes_back_as_it_was_sent(bench: Bench) -> None:
    packed = gzip.compress(b'{"choices":[]}')

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            answer(
                packed,
                status=b"299 Oddly Enough",
                extra=b"Content-Encoding: gzip\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Request-Id: r\r\nDate: d\r\n",
            )
        )

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/chat/completions", b"{}", b"Accept-Encoding: gzip\r\n")
    reply = await client.reply()
    assert reply.head.startswith(b"HTTP/1.1 299 Oddly Enough\r\n")
    assert reply.body == packed
    assert reply.headers(b"set-cookie") == [b"a=1", b"b=2"]
    assert reply.headers(b"date") == [b"d"]
    assert reply.headers(b"x-request-id") == [b"r"]
    assert reply.header(b"content-encoding") == b"gzip"


TEXT = "你好🙂é"
EVENTS = (
    delta(TEXT)
    + b': a comment\r\nevent: x\r\ndata:{"choices":[]}\r\n\r\n'
    + b'data: {"choices":[{"index":0,"delta":{"content":"x data: [DONE]\\n\\n y"},"finish_reason":"stop"}]}\n\n'
    + b'data: {"choices":[],"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\n' + b"data: [DONE]\n\n"
)


def splits() -> list[list[bytes]]:
    one_by_one = [EVENTS[i : i + 1] for i in range(len(EVENTS))]
    return [one_by_one, [EVENTS]] + [[EVENTS[:i], EVENTS[i:]] for i in range(1, len(EVENTS), 7)]


@pytest.mark.fault(
    "split characters",
    "split events",
    "odd event lines",
    "end within text",
    "usage apart from the end",
    "usage reshaped",
    "content type",
)
async def test_a_stream_split_anywhere_is_the_same_stream(bench: Bench) -> None:
    ways = iter(splits())

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in next(ways):
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    for count, _ in enumerate(splits(), 1):
        client.post("/v1/chat/completions", b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a"}]}')
        reply = await client.reply()
        assert reply.clean
        assert reply.body == EVENTS
        assert reply.header(b"content-type") == b"text/event-stream; charset=utf-8"
        assert router.telemetry.completion_tokens.labels(replica.name).value == 4 * count
        assert router.telemetry.delivered_tokens.labels(replica.name).value == 3 * count


@pytest.mark.fault("held back")
async def test_each_chunk_is_passed_on_before_the_next_one_is_made(bench: Bench) -> None:
    """The replica makes a chunk only once the client has the one before: one held back would hang here."""
    taken = asyncio.Semaphore(0)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for i in range(4):
            await taken.acquire()
            writer.write(chunk(delta(str(i))))
        await taken.acquire()
        writer.write(b"0\r\n\r\n")

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/chat/completions", b'{"model":"m","stream":true,"messages":[]}')
    assert (await client.head()).status == 200
    for i in range(4):
        taken.release()
        assert await client.chunk() == delta(str(i))
    taken.release()
    assert await client.chunk() is None


@pytest.mark.fault("long lines")
async def test_a_3_mb_event_passes(bench: Bench) -> None:
    event = delta("x" * 3_000_000)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post("/v1/chat/completions", b'{"model":"m","stream":true,"messages":[]}')
    assert (await client.reply()).body == event + b"data: [DONE]\n\n"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_body_that_ends_with_the_connection(bench: Bench, version: bytes) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nsome text")
        await writer.drain()
        writer.close()

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.send(b"GET /v1/x HTTP/%s\r\nHost: x\r\n\r\n" % version)
    reply = await client.reply()
    assert (reply.body, reply.clean) == (b"some text", True)
    if version == b"1.0":
        assert reply.header(b"transfer-encoding") is None
        assert await client.closed() == b""


async def test_a_chunked_answer_reaches_an_http_1_0_client_without_chunks(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    reply = await client.reply()
    assert reply.header(b"transfer-encoding") is None
    assert reply.body == b"data: 1\n\ndata: [DONE]\n\n"


async def test_interim_answers_are_not_mistaken_for_the_answer(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(CHAT))

    client = await bench.client(await bench.router(await bench.replica(script)))
    for _ in range(2):
        client.post("/v1/chat/completions", b"{}")
        reply = await client.reply()
        assert (reply.status, reply.body) == (200, CHAT)


async def test_head_options_and_pipelined_requests(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.line.startswith(b"HEAD"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        else:
            writer.write(answer(request.line))

    replica = await bench.replica(script)
    client = await bench.client(await bench.router(replica))
    client.send(
        b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\nOPTIONS * HTTP/1.1\r\nHost: x\r\n\r\nGET /c HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    reply = await client.reply(head_only=True)
    assert reply.header(b"content-length") == b"99"
    assert (await client.reply()).body == b"OPTIONS * HTTP/1.1"
    client.send(b"GET /d HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.reply()).body == b"GET /c HTTP/1.1"
    assert (await client.reply()).body == b"GET /d HTTP/1.1"


async def test_expect_100_continue(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert (await client.head()).status == 100
    client.send(b"{}")
    assert (await client.reply()).status == 200
    assert replica.received[0].header(b"expect") is None


@pytest.mark.fault("answers that are no HTTP")
async def test_surplus_bytes_of_a_replica_reach_nobody(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(CHAT) + answer(b"smuggled"))

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    for _ in range(3):
        client.post("/v1/chat/completions", b"{}")
        assert (await client.reply()).body == CHAT
    client.leave()
    await until(lambda: not router.door.connections, "the client's connection is gone")  # type: ignore[union-attr]
