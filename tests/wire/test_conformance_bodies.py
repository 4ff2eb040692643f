"""What routers of this kind refuse, mend or wrap, though only the engine can judge it: it passes as it came."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from router.fleet.replica import State
from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, answer, chunk, delta

HELLO = [{"role": "user", "content": "hello"}]
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TOOL_TURN = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}, {"type": "text", "text": "°C"}]},
]


@pytest.mark.parametrize(
    ("path", "members"),
    [
        pytest.param(
            CHAT_PATH,
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "now"}}]},
            marks=pytest.mark.fault("tools without parameters"),
            id="tool without parameters",
        ),
        pytest.param(CHAT_PATH, {"messages": TOOL_TURN}, marks=pytest.mark.fault("tool messages"), id="tool message"),
        pytest.param(
            CHAT_PATH,
            {"messages": HELLO, "stream": None, "logprobs": None, "stop": None, "tools": None},
            marks=pytest.mark.fault("nulls"),
            id="nulls in a chat",
        ),
        pytest.param(
            TEXT_PATH, {"prompt": "a", "stream": None, "logprobs": None}, marks=pytest.mark.fault("nulls"), id="nulls"
        ),
        pytest.param(
            CHAT_PATH,
            {
                "messages": HELLO,
                "stream": True,
                "min_tokens": 0,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "stop": ["a", "b", "c", "d", "e"],
            },
            marks=pytest.mark.fault("engine options"),
            id="options",
        ),
        pytest.param(
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            marks=pytest.mark.fault("embedding parts"),
            id="parts to embed",
        ),
        pytest.param(
            "/v1/embeddings",
            {"input": [{"type": "text", "text": "a"}]},
            marks=pytest.mark.fault("embedding parts"),
            id="parts as input",
        ),
    ],
)
async def test_what_only_the_engine_can_judge_reaches_it_unchanged(
    bench: Bench, path: str, members: dict[str, Any]
) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    body = json.dumps({"model": "m", **members}, ensure_ascii=False).encode()
    client.post(path, body)
    assert (await client.reply()).status == 200
    assert replica.received[0].body == body


@pytest.mark.fault("multipart")
async def test_a_form_is_passed_on_as_it_is(bench: Bench) -> None:
    replica = await bench.replica()
    client = await bench.client(await bench.router(replica))
    form = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\0\xff\r\n--x--\r\n"
    )
    client.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(form), form)
    )
    assert (await client.reply()).status == 200
    assert replica.received[0].body == form
    assert replica.received[0].header(b"content-type") == b"multipart/form-data; boundary=x"


RERANKED = (
    b'{"id":"r","model":"m","usage":{"total_tokens":9},'
    b'"results":[{"index":1,"document":{"text":"a"},"relevance_score":0.5}]}'
)
ERROR = b'{"error":{"message":"stop has 5 entries","type":"BadRequestError","param":null,"code":400}}'


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        pytest.param(
            CHAT_PATH,
            b"200 OK",
            CHAT[:-1] + b', "made_up_by_a_newer_engine":{"a":[null]},"prompt_token_ids":null}',
            marks=pytest.mark.fault("unknown answer fields"),
            id="a new field",
        ),
        pytest.param(
            "/v1/rerank", b"200 OK", RERANKED, marks=pytest.mark.fault("rerank answers"), id="a rerank answer"
        ),
        pytest.param(
            CHAT_PATH,
            b"400 Bad Request",
            ERROR,
            marks=pytest.mark.fault("client errors", "wrapped errors"),
            id="an error",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_an_engine_says_comes_back_unchanged(
    bench: Bench, path: str, status: bytes, body: bytes, stream: bool
) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(body, status=status))

    replicas = [await bench.replica(script) for _ in range(2)]
    client = await bench.client(await bench.router(*replicas))
    client.post(path, json.dumps({"model": "m", "stream": stream, "messages": HELLO, "query": "q"}).encode())
    reply = await client.reply()
    assert reply.head.startswith(b"HTTP/1.1 %s\r\n" % status)
    assert reply.body == body
    assert reply.headers(b"content-type") == [b"application/json"]
    assert sum(len(replica.received) for replica in replicas) == 1


@pytest.mark.fault("content type")
async def test_an_error_in_answer_to_a_stream_keeps_its_type(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(ERROR, status=b"400 Bad Request", kind=b"application/json; charset=utf-8"))

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post(CHAT_PATH, json.dumps({"model": "m", "stream": True, "messages": HELLO}).encode())
    reply = await client.reply()
    assert (reply.status, reply.body) == (400, ERROR)
    assert reply.headers(b"content-type") == [b"application/json; charset=utf-8"]


@pytest.mark.fault("compressed stream")
async def test_a_stream_compressed_event_by_event_is_passed_on_event_by_event(bench: Bench) -> None:
    """The replica makes an event only once the client could read the one before."""
    taken = asyncio.Semaphore(0)
    events = [delta(text) for text in ("a", "你好", "🙂")] + [b"data: [DONE]\n\n"]

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packer = zlib.compressobj(wbits=31)
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))
        for event in events:
            await taken.acquire()
            writer.write(chunk(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)))
        writer.write(chunk(packer.flush()) + b"0\r\n\r\n")

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post(
        CHAT_PATH, json.dumps({"model": "m", "stream": True, "messages": HELLO}).encode(), b"Accept-Encoding: gzip\r\n"
    )
    head = await client.head()
    assert head.headers(b"content-encoding") == [b"gzip"]
    unpacker = zlib.decompressobj(wbits=31)
    for event in events:
        taken.release()
        data = b""
        while data != event:
            piece = await client.chunk()
            assert piece is not None
            data += unpacker.decompress(piece)
    while (piece := await client.chunk()) is not None:
        assert unpacker.decompress(piece) == b""
    assert unpacker.eof


@pytest.mark.fault("encoding told wrong")
@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
async def test_a_compressed_body_is_announced_as_one(bench: Bench, status: bytes) -> None:
    packed = gzip.compress(ERROR)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert request.header(b"accept-encoding") == b"gzip, br"
        writer.write(answer(packed, status=status, extra=b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n"))

    client = await bench.client(await bench.router(await bench.replica(script)))
    client.post(CHAT_PATH, b'{"model":"m","messages":[]}', b"Accept-Encoding: gzip, br\r\n")
    reply = await client.reply()
    assert (reply.body, reply.headers(b"content-encoding")) == (packed, [b"gzip"])
    assert reply.headers(b"content-length") == [b"%d" % len(packed)]
    assert reply.headers(b"vary") == [b"Accept-Encoding"]


@pytest.mark.fault("model list")
async def test_a_model_of_two_replicas_is_one_entry_with_all_its_fields(bench: Bench) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    for replica in replicas:
        replica.models = [
            {"id": "m", "object": "model", "root": "/m", "parent": None, "max_model_len": 4096, "permission": [{}]},
            {"id": "tuned", "object": "model", "root": "/adapters/tuned", "parent": "m", "made_up": {"a": 1}},
        ]
    client = await bench.client(await bench.router(*replicas, probe_seconds=60))
    for _ in range(2):
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await client.reply()
        assert reply.status == 200
        assert reply.json == {"object": "list", "data": replicas[0].models}


@pytest.mark.fault("model list")
async def test_models_that_only_some_replicas_serve_are_in_one_list(bench: Bench) -> None:
    base = {"id": "m", "object": "model", "root": "/m", "parent": None, "max_model_len": 4096, "permission": [{}]}
    tuned = {"id": "tuned", "object": "model", "root": "/adapters/tuned", "parent": "m", "made_up": {"a": 1.50}}
    other = {"id": "other", "object": "model", "root": "/o", "parent": None, "max_model_len": 512}
    replicas = [await bench.replica() for _ in range(3)]
    for replica, models in zip(replicas, ([base], [{**base, "root": "/m2"}, tuned], [other]), strict=True):
        replica.models = models
    router = await bench.router(*replicas, probe_seconds=60)
    client = await bench.client(router)
    for method in (b"GET", b"HEAD"):
        client.send(method + b" /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await client.reply(head_only=method == b"HEAD")
        assert (reply.status, reply.headers(b"content-type")) == (200, [b"application/json"])
        if method == b"GET":
            found = reply.json
            assert found["object"] == "list"
            assert {each["id"]: each for each in found["data"]} == {"m": base, "tuned": tuned, "other": other}
    # Each of them is asked where it is served.
    for model, serving in (("tuned", replicas[1]), ("other", replicas[2])):
        client.post(CHAT_PATH, b'{"model":"%b","messages":[]}' % model.encode())
        assert (await client.reply()).headers(b"x-warmroute-replica") == [serving.name.encode()]
    # One that is lost is no longer offered.
    router.fleet[replicas[2].name].state = State.LOST
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert {each["id"] for each in (await client.reply()).json["data"]} == {"m", "tuned"}
