"""What answers teach the router: read back from what it predicts for the next turn, and from its books."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from router import reading
from router.app import Router
from router.prompt.request import Ask, read
from router.prompt.tokens import Tokenizer
from tests.wire.conftest import Bench
from tests.wire.scripted import STREAM_HEAD, Raw, Received, Script, answer, chunk, delta, until

TINY = Path(__file__).parents[2] / "fake_backend" / "tiny"
# Read as bytes, this question and the marks of its roles are 1024 bytes: 16 blocks of 16 tokens of 4 bytes.
QUESTION = [{"role": "user", "content": "q" * 1005}]
PROMPT_TOKENS = 256
# With this answer behind it, 26 blocks.
TEXT, TURN_TOKENS = "a" * 640, 416


def ask(messages: list[dict[str, str]], **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


def next_turn(text: str) -> list[dict[str, str]]:
    return [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "go on " * 100}]


def whole(*texts: str, **members: Any) -> bytes:
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    return answer(json.dumps({"choices": choices, **members}).encode())


def stream(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(chunk(event) for event in events) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def says(*replies: bytes) -> Script:
    """Each reply once, in order; the last one for ever."""
    left = list(replies)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return script


async def ticked() -> None:
    """Nobody prefills in no time at all; the loop's clock has whole milliseconds."""
    now = asyncio.get_running_loop().time
    came = now()
    await until(lambda: now() > came, "the clock ticks")


async def predicted(client: Raw, body: bytes, path: str = "/v1/chat/completions") -> int:
    client.post(path, body)
    reply = await client.reply()
    assert reply.status == 200
    return int(reply.header(b"x-warmroute-predicted-tokens") or b"")


ANSWERS = {
    "whole": whole(TEXT),
    "stream": stream(delta(TEXT[:300]), delta(TEXT[300:])),
}


@pytest.mark.parametrize("reply", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_answer_is_part_of_the_next_turns_past(bench: Bench, reply: bytes) -> None:
    client = await bench.client(await bench.router(await bench.replica(says(reply))))
    assert await predicted(client, ask(QUESTION)) == 0
    assert await predicted(client, ask(next_turn(TEXT))) == TURN_TOKENS


FAILED = {
    "an error in the stream": stream(delta(TEXT), event(error={"message": "m", "code": 500})),
    "an error with choices": whole(TEXT, error={"message": "m", "code": 500}, usage={"completion_tokens": 5}),
}


@pytest.mark.parametrize("reply", FAILED.values(), ids=FAILED.keys())
async def test_an_answer_that_failed_is_recorded_nowhere(bench: Bench, reply: bytes) -> None:
    replica = await bench.replica(says(reply))
    router = await bench.router(replica)
    client = await bench.client(router)
    assert await predicted(client, ask(QUESTION)) == 0
    assert await predicted(client, ask(next_turn(TEXT))) == PROMPT_TOKENS
    assert router.telemetry.completion_tokens.labels(replica.name).value == 0
    assert router.feedback.of(replica.name).compared == 0


async def test_an_answer_that_broke_off_is_recorded_nowhere(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta(TEXT)))
        await writer.drain()
        writer.close()
        raise ConnectionError("ended by the script")

    router = await bench.router(await bench.replica(script))
    (await bench.client(router)).post("/v1/chat/completions", ask(QUESTION))
    await until(lambda: router.telemetry.requests.labels("broken", "2xx").value == 1, "it has broken off")
    assert await predicted(await bench.client(router), ask(next_turn(TEXT))) == PROMPT_TOKENS


OPAQUE = {
    "two choices": whole(TEXT, TEXT),
    "two streamed choices": stream(
        delta(TEXT), event(choices=[{"index": 1, "delta": {"content": TEXT}, "finish_reason": "stop"}])
    ),
    "one choice of two": whole(TEXT),
}


@pytest.mark.parametrize("reply", OPAQUE.values(), ids=OPAQUE.keys())
async def test_several_answers_to_a_prompt_are_several_sequences_and_no_past(bench: Bench, reply: bytes) -> None:
    release = asyncio.Event()
    scripted = says(reply)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await scripted(request, reader, writer)

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", ask(QUESTION, n=2))
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    assert router.fleet[replica.name].load.in_flight == 2
    release.set()
    assert (await client.reply()).status == 200
    await until(lambda: router.fleet[replica.name].load.in_flight == 0, "nothing is in flight")
    assert await predicted(client, ask(next_turn(TEXT))) == PROMPT_TOKENS


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("surplus", "recorded"), [(0, True), (1, False), (-1, False), (None, True)], ids=["same", "more", "fewer", "untold"]
)
async def test_an_answer_of_another_length_is_not_what_the_engine_holds(
    bench: Bench, streamed: bool, surplus: int | None, recorded: bool
) -> None:
    """Text that tokenizes to more or fewer tokens than were generated has other blocks than the engine's cache."""
    tokenizer = Tokenizer.load(TINY)
    text = "the harbour lies still tonight and the lamp turns slowly over grey water " * 8
    # The end-of-sequence token is generated too, and is not in the text.
    generated = len(tokenizer.encode(text, add_special_tokens=False)) + 1
    usage = {} if surplus is None else {"usage": {"prompt_tokens": 1, "completion_tokens": generated + surplus}}
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    reply = stream(delta(text), end, event(choices=[], **usage)) if streamed else whole(text, **usage)
    client = await bench.client(await bench.router(await bench.replica(says(reply)), tokenizer=TINY))
    assert await predicted(client, ask(QUESTION)) == 0
    assert tokenizer.chat_template is not None
    prompt = len(tokenizer.encode(tokenizer.chat_template.render(QUESTION), add_special_tokens=False))
    held = prompt + generated - 1 if recorded else prompt
    assert held // 16 != (prompt if recorded else prompt + generated - 1) // 16
    assert await predicted(client, ask(next_turn(text))) == held // 16 * 16


async def test_streams_teach_the_prefill_rate_and_whole_answers_do_not(bench: Bench) -> None:
    scripted = says(whole("hi"), stream(delta("hi")))

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ticked()
        await scripted(request, reader, writer)

    router = await bench.router(await bench.replica(script), probe_seconds=60)
    client = await bench.client(router)
    assumed = router.rates.token_ms
    await predicted(client, ask([{"role": "user", "content": "x" * 4000}]))
    assert router.rates.token_ms == assumed
    await predicted(client, ask([{"role": "user", "content": "y" * 4000}], stream=True))
    assert router.rates.token_ms != assumed


# -- the end of the prefill ---------------------------------------------------------------------------------------


async def test_a_comment_is_no_first_token(bench: Bench) -> None:
    steps = asyncio.Semaphore(0)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in (b": keep-alive\n\n", b": keep-alive\n\n", delta("a")):
            await ticked()
            writer.write(chunk(piece))
            await steps.acquire()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await bench.router(replica, probe_seconds=60)
    load, assumed = router.fleet[replica.name].load, router.rates.token_ms
    client = await bench.client(router)
    client.post("/v1/chat/completions", ask(QUESTION, stream=True))
    await client.head()
    for decoding in (0, 0, 1):
        await client.chunk()
        assert (load.in_flight, load.decoding) == (1, decoding)
        assert (router.rates.token_ms == assumed) is (decoding == 0)
        steps.release()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() is None


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/responses", {"input": "word " * 4000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 9}),
        ("/inference/v1/generate", {"token_ids": [1] * 9000}),
    ],
)
async def test_streams_of_every_api_leave_prefill_at_their_first_event(
    bench: Bench, path: str, members: dict[str, Any]
) -> None:
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b'event: response.created\ndata: {"type":"response.created"}\n\n'))
        await release.wait()
        writer.write(b"0\r\n\r\n")

    replica = await bench.replica(script)
    # So slow that no prefill is presumed to be over before the test is.
    router = await bench.router(replica, probe_seconds=60, prefill_tokens_per_second=0.01)
    load = router.fleet[replica.name].load
    clients = [await bench.client(router) for _ in range(3)]
    for client in clients:
        client.post(path, json.dumps({"model": "m", "stream": True, **members}).encode())
        await client.head()
        assert await client.chunk()
    assert (load.in_flight, load.decoding) == (3, 3)
    assert load.waiting_ms(asyncio.get_running_loop().time()) == 0.0
    release.set()
    for client in clients:
        assert await client.chunk() is None


# -- what cannot be read --------------------------------------------------------------------------------------------

BIG = 3_000_000
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * (BIG // 4)}}


def booked(router: Router) -> float:
    """The prompt tokens booked for the one request there was."""
    (replica,) = router.fleet
    value: float = router.telemetry.prompt_tokens.labels(replica.name).value
    assert replica.load.routed(asyncio.get_running_loop().time()) < 4096 * 4
    return value


@pytest.mark.parametrize("exact", [False, True], ids=["bytes", "tokens"])
async def test_an_image_weighs_no_more_than_the_models_context(bench: Bench, exact: bool) -> None:
    router = await bench.router(await bench.replica(), **({"tokenizer": TINY} if exact else {}))
    client = await bench.client(router)
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, IMAGE]}]
    client.post("/v1/chat/completions", json.dumps({"model": "m", "messages": messages, "max_tokens": 1}).encode())
    assert (await client.reply()).status == 200
    assert 0 < booked(router) <= 4096


async def test_an_upload_weighs_no_more_than_the_models_context(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    body = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + bytes(BIG) + b"\r\n--x--\r\n"
    client.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert (await client.reply()).status == 200
    assert replica.received[0].body == body
    assert replica.received[0].header(b"content-type") == b"multipart/form-data; boundary=x"
    assert booked(router) == 4096


UNREADABLE = b'{"model":"m","cache_salt":"\\ud800","messages":[{"role":"user","content":"%s"}]}' % (b"a" * 500)


@pytest.mark.interpreted
async def test_bodies_that_break_reading_pass_with_one_line_for_all(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: str, body: bytes, *rest: Any) -> Ask:
        found = read(path, body, *rest)
        if b"salted" in body:
            found.messages = 5  # type: ignore[assignment]
        return found

    monkeypatch.setattr(reading, "read", fails)
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    for _ in range(3):
        for body in (UNREADABLE, ask([{"role": "user", "content": "salted"}])):
            client.post("/v1/chat/completions", body)
            assert (await client.reply()).status == 200
            assert replica.received[-1].body == body
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    kinds = [record.exc_info[0] for record in told if record.exc_info]
    assert len(kinds) == len(told) == len(set(kinds)) >= 1
    assert TypeError in kinds


async def test_more_answers_than_any_engine_gives_do_not_distort_the_books(bench: Bench) -> None:
    release = asyncio.Event()
    scripted = says(whole("hi"))

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await scripted(request, reader, writer)

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    body = b'{"model":"m","n":1%s,"messages":[{"role":"user","content":"a"}]}' % (b"0" * 400)
    client.post("/v1/chat/completions", body)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    assert router.fleet[replica.name].load.in_flight == reading.MAX_N
    release.set()
    assert (await client.reply()).status == 200
    assert replica.received[0].body == body


async def test_blocks_hashed_in_a_way_unknown_to_us_still_tell_prompts_apart(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await bench.replica()
    replica.metrics = (
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",prefix_caching_hash_algo="builtin"} 1.0\n'
        b"process_start_time_seconds 1.0\n"
    )
    client = await bench.client(await bench.router(replica, tokenizer=TINY))
    assert await predicted(client, ask(QUESTION)) == 0
    assert await predicted(client, ask(QUESTION)) > 0
    assert await predicted(client, ask([{"role": "user", "content": "r" * 1005}])) < PROMPT_TOKENS
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.interpreted
async def test_long_bodies_are_read_off_the_event_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def watched(path: str, body: bytes, *rest: Any) -> Ask:
        threads.append(threading.get_ident())
        return read(path, body, *rest)

    monkeypatch.setattr(reading, "read", watched)
    client = await bench.client(await bench.router(await bench.replica()))
    for size in (reading.READ_ASIDE_BYTES // 2, reading.READ_ASIDE_BYTES * 2):
        client.post("/v1/completions", json.dumps({"model": "m", "prompt": "x" * size}).encode())
        assert (await client.reply()).status == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
