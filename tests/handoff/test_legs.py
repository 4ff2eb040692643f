"""Both legs of a split to the byte, by every connector; and who is told what when the client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.app import Router
from tests.handoff.test_connectors import HANDED
from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, Script, Scripted, answer, chunk, delta, until, until_closed

PATH = "/v1/chat/completions"
BODY = b'{"model":"m", "messages":[{"role":"user","content":"hello"}],"max_tokens":9,"min_tokens":2 }'
STREAM_BODY = (
    b'{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}'
)
KEYS = b"Authorization: Bearer secret\r\nX-Request-Id: mine\r\nX-Other: 7\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"Internal server error","code":500}}\n\ndata: [DONE]\n\n'


def handing(**changes: Any) -> bytes:
    usage = {"prompt_tokens": 463, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}}
    return json.dumps({"object": "chat.completion", "usage": usage, "kv_transfer_params": HANDED | changes}).encode()


def says(*answers: bytes) -> Script:
    """Answers one request after the other, the last one again and again."""
    left = list(answers)

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return script


def stream(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(chunk(event) for event in events) + b"0\r\n\r\n"


async def pair(bench: Bench, first: Script, second: Script, **settings: Any) -> tuple[Scripted, Scripted, Router]:
    prefill, decode = await bench.replica(first), await bench.replica(second)
    settings = {"split": "always", "probe_seconds": 60, **settings}
    router = await bench.router(prefill=prefill.url, decode=decode.url, **settings)
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    return prefill, decode, router


def headers(request: Received) -> list[bytes | None]:
    return [request.header(name) for name in (b"authorization", b"x-request-id", b"x-other")]


@pytest.mark.fault("a stream for the prefill", "keys lost between the legs")
async def test_both_legs_by_nixl(bench: Bench) -> None:
    prefill, decode, router = await pair(bench, says(answer(handing())), says(answer(CHAT)))
    client = await bench.client(router)
    client.post(PATH, BODY, KEYS)
    reply = await client.reply()
    assert (reply.status, reply.body) == (200, CHAT)
    assert reply.header(b"x-warmroute-replica") == decode.name.encode()
    assert reply.header(b"x-warmroute-prefill") == prefill.name.encode()
    (first,), (second,) = prefill.received, decode.received
    asked = json.loads(first.body)
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert (
        second.body == BODY[:-1] + b',"kv_transfer_params":' + json.dumps(HANDED, separators=(",", ":")).encode() + b"}"
    )
    assert headers(first) == headers(second) == [b"Bearer secret", b"mine", b"7"]


@pytest.mark.fault("a stream for the prefill")
async def test_a_streams_first_leg_is_whole_and_its_second_one_as_it_came(bench: Bench) -> None:
    prefill, decode, router = await pair(
        bench, says(answer(handing())), says(stream(ROLE, delta("a"), b"data: [DONE]\n\n")), connector="nixl"
    )
    client = await bench.client(router)
    client.post(PATH, STREAM_BODY)
    reply = await client.reply()
    assert reply.body == ROLE + delta("a") + b"data: [DONE]\n\n"
    asked = json.loads(prefill.received[0].body)
    assert (asked["stream"], asked["max_tokens"], "stream_options" in asked) == (False, 1, False)
    assert decode.received[0].body.startswith(STREAM_BODY[:-1] + b',"kv_transfer_params":{')
    # Without one of the client's, both legs have the same id all the same.
    assert prefill.received[0].header(b"x-request-id") == decode.received[0].header(b"x-request-id") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        answer(handing(remote_block_ids=None)),
        answer(handing(remote_request_id=None)),
        answer(handing(remote_port="1")),
        answer(handing(do_remote_prefill=False)),
        answer(b'{"kv_transfer_params":null}'),
        answer(b"[]"),
        answer(b"no JSON"),
    ],
)
async def test_nothing_wrong_reaches_the_second_leg(bench: Bench, wrong: bytes) -> None:
    prefill, decode, router = await pair(bench, says(wrong), says(answer(CHAT)))
    client = await bench.client(router)
    client.post(PATH, BODY)
    assert (await client.reply()).body == CHAT
    assert [request.body for request in decode.received] == [BODY]
    assert len(prefill.received) == 1
    assert router.telemetry.fallbacks.labels("no_parameters").value == 1


async def test_prompts_are_not_computed_in_vain_again_and_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.handoff.doubts.FIRST_PAUSE_SECONDS", 3600.0)
    prefill, decode, router = await pair(bench, says(answer(CHAT)), says(answer(CHAT)))
    client = await bench.client(router)
    for _ in range(5):
        client.post(PATH, BODY)
        assert (await client.reply()).status == 200
    assert (len(prefill.received), len(decode.received)) == (1, 5)
    assert router.telemetry.fallbacks.labels("no_parameters").value == 1


@pytest.mark.parametrize("opening", [ROLE + ERROR, ERROR], ids=["behind the role", "at once"])
async def test_an_error_that_opens_a_stream_is_shown_to_nobody(bench: Bench, opening: bytes) -> None:
    whole = (ROLE, delta("a"), b"data: [DONE]\n\n")
    _, decode, router = await pair(bench, says(answer(handing())), says(stream(opening), stream(*whole)))
    client = await bench.client(router)
    client.post(PATH, STREAM_BODY)
    assert (await client.reply()).body == b"".join(whole)
    assert decode.received[1].body == STREAM_BODY
    assert router.telemetry.fallbacks.labels("kv_load").value == 1


async def test_an_error_behind_an_answer_is_passed_on(bench: Bench) -> None:
    _, decode, router = await pair(bench, says(answer(handing())), says(stream(ROLE, delta("a"), ERROR)))
    client = await bench.client(router)
    client.post(PATH, STREAM_BODY)
    assert (await client.reply()).body == ROLE + delta("a") + ERROR
    assert len(decode.received) == 1


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/v1/responses", b'{"model":"m","input":"hi"}', b""),
        (PATH, b'{"model":"m","n":2,"messages":[{"role":"user","content":"hi"}]}', b""),
        (PATH, b'{"model":"m","prompt_logprobs":1,"messages":[{"role":"user","content":"hi"}]}', b""),
        ("/v1/completions", b'{"model":"m","prompt":["a","b"]}', b""),
        ("/v1/completions", b'{"model":"m","prompt":"a","echo":true}', b""),
        (PATH, BODY, b"X-data-parallel-rank: 0\r\n"),
    ],
)
async def test_what_must_stay_in_one_place(bench: Bench, path: str, body: bytes, more: bytes) -> None:
    prefill, decode, router = await pair(bench, says(answer(handing())), says(answer(CHAT)))
    client = await bench.client(router)
    client.post(path, body, more)
    assert (await client.reply()).status == 200
    assert [request.body for request in decode.received] == [body]
    assert prefill.received == []


async def test_a_clients_own_hand_off_is_not_passed_on(bench: Bench) -> None:
    prefill, decode, router = await pair(bench, says(answer(handing())), says(answer(CHAT)))
    client = await bench.client(router)
    client.post(PATH, b'{"kv_transfer_params":{"do_remote_prefill":true},' + BODY[1:])
    await client.reply()
    assert json.loads(prefill.received[0].body)["kv_transfer_params"]["do_remote_decode"] is True
    assert json.loads(decode.received[0].body)["kv_transfer_params"] == HANDED


async def test_token_ids_go_with_the_kv(bench: Bench) -> None:
    told = json.loads(handing()) | {"prompt_token_ids": [1, 2, 3]}
    prefill, decode, router = await pair(
        bench, says(answer(json.dumps(told).encode())), says(answer(CHAT)), pass_token_ids=True
    )
    client = await bench.client(router)
    client.post(PATH, BODY)
    await client.reply()
    assert json.loads(prefill.received[0].body)["return_token_ids"] is True
    assert json.loads(decode.received[0].body)["kv_transfer_params"] == HANDED | {"prompt_token_ids": [1, 2, 3]}


async def test_where_nothing_is_split_the_policy_decides(bench: Bench) -> None:
    prefill, decode, router = await pair(bench, says(answer(handing())), says(answer(CHAT)), split="never")
    client = await bench.client(router)
    client.post(PATH, BODY)
    assert (await client.reply()).header(b"x-warmroute-replica") == decode.name.encode()
    assert prefill.received == []


async def test_a_store_of_content_needs_the_order_alone(bench: Bench) -> None:
    prefill, decode, router = await pair(bench, says(answer(CHAT)), says(answer(CHAT)), connector="content")
    client = await bench.client(router)
    client.post(PATH, BODY)
    assert (await client.reply()).header(b"x-warmroute-prefill") == prefill.name.encode()
    assert json.loads(prefill.received[0].body)["max_tokens"] == 1
    assert "kv_transfer_params" not in json.loads(prefill.received[0].body)
    assert decode.received[0].body == BODY


class Together:
    """A pair of which the second one answers when the first one has computed."""

    def __init__(self) -> None:
        self.computed = asyncio.Event()
        self.asked = asyncio.Event()

    def prefill(self, told: bytes) -> Script:
        async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.wait_for(self.asked.wait(), 60)
            self.computed.set()
            writer.write(answer(told))

        return script

    async def decode(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await asyncio.wait_for(self.computed.wait(), 60)
        writer.write(answer(CHAT))


async def test_nixl_that_pushes_is_told_both_at_once_when_it_is_known(bench: Bench) -> None:
    together = Together()
    pushing = handing(transfer_mode="push")
    prefill, decode, router = await pair(bench, says(answer(pushing)), together.decode)
    together.computed.set()
    client = await bench.client(router)
    client.post(PATH, BODY, KEYS)
    assert (await client.reply()).header(b"x-warmroute-prefill") is None
    # The client's id might be another's, too, and the engines go by it: that one was not handed over.
    assert decode.received[0].body == BODY
    client.post(PATH, BODY, KEYS)
    assert (await client.reply()).status == 200
    await until(lambda: len(prefill.received) == 2, "both are asked")
    # From here on each leg waits for the other one to be asked.
    together.computed.clear()
    together.asked.clear()
    prefill.script = together.prefill(pushing)
    client.post(PATH, BODY, KEYS)
    assert (await client.reply()).status == 200
    asked, told = (json.loads(each.received[2].body)["kv_transfer_params"] for each in (prefill, decode))
    name = asked["transfer_id"]
    assert [each.received[2].header(b"x-request-id") for each in (prefill, decode)] == [name.encode()] * 2
    place = {"remote_host": "127.0.0.1", "remote_port": HANDED["remote_port"], "tp_size": 1, "pp_size": 1}
    assert told == place | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": HANDED["remote_engine_id"],
        "remote_request_id": name,
        "transfer_id": name,
    }
    assert name != json.loads(prefill.received[0].body)["kv_transfer_params"]["transfer_id"]


async def test_who_would_wait_for_ever_is_left_when_the_other_one_fails(bench: Bench) -> None:
    async def waits(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"kv_transfer_params" in request.body and len(decode.received) > 1:
            await until_closed(request, reader)
        writer.write(answer(CHAT))

    prefill, decode, router = await pair(bench, says(answer(handing(transfer_mode="push"))), waits)
    client = await bench.client(router)
    client.post(PATH, BODY)
    await client.reply()

    async def fails(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until(lambda: len(decode.received) > 1, "the other one waits")
        writer.write(answer(b"{}", status=b"503 Service Unavailable"))

    prefill.script = fails
    client.post(PATH, BODY)
    assert (await client.reply()).body == CHAT
    assert decode.received[1].aborted.is_set()
    assert decode.received[2].body == BODY
    assert router.telemetry.fallbacks.labels("prefill_refused").value == 1


async def test_mooncakes_engines_are_asked_for_and_both_told_at_once(bench: Bench) -> None:
    together = Together()
    bootstrap = await bench.replica(says(answer(b'{"0":{"engine_id":"e0","worker_addr":{}}}')))
    prefill, decode, router = await pair(
        bench, together.prefill(CHAT), together.decode, connector="mooncake", mooncake_bootstrap_port=bootstrap.port
    )
    assert [request.line for request in bootstrap.received] == [b"GET /query HTTP/1.1"]
    client = await bench.client(router)
    client.post(PATH, BODY)
    assert (await client.reply()).status == 200
    asked, told = (json.loads(each.received[0].body)["kv_transfer_params"] for each in (prefill, decode))
    assert told == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap.port}",
        "remote_engine_id": "e0",
        "transfer_id": asked["transfer_id"],
    }


async def test_mooncake_without_its_bootstrap_server_is_not_split(bench: Bench) -> None:
    prefill, decode, router = await pair(bench, says(answer(CHAT)), says(answer(CHAT)), connector="mooncake")
    client = await bench.client(router)
    client.post(PATH, BODY)
    assert (await client.reply()).status == 200
    assert (prefill.received, len(decode.received)) == ([], 1)
    assert router.telemetry.fallbacks.labels("no_parameters").value == 1


class TestLeaving:
    async def test_before_the_prompt_is_computed(self, bench: Bench) -> None:
        async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await until_closed(request, reader)

        prefill, decode, router = await pair(bench, script, says(answer(CHAT)))
        client = await bench.client(router)
        client.post(PATH, BODY)
        await until(lambda: len(prefill.received) == 1, "it computes")
        client.leave()
        await asyncio.wait_for(prefill.received[0].aborted.wait(), 60)
        await until(lambda: not any(each.load.in_flight for each in router.fleet), "nothing is booked")
        assert decode.received == []

    @pytest.mark.interpreted
    async def test_before_the_other_one_is_reached(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """The prompt is computed and its blocks are pinned; the one that was to fetch says that they may go."""
        prefill, decode, router = await pair(
            bench, says(answer(handing())), says(answer(b"{}", status=b"404 Not Found"))
        )
        pool, trying = router._pools[decode.name], asyncio.Event()
        reached = pool.connect

        async def late() -> Any:
            if not trying.is_set():
                trying.set()
                await asyncio.Event().wait()
            return await reached()

        monkeypatch.setattr(pool, "connect", late)
        client = await bench.client(router)
        client.post(PATH, BODY, KEYS)
        await asyncio.wait_for(trying.wait(), 60)
        assert router._journey is not None
        assert router._journey.divided.pinned == {prefill.name: 15}
        client.leave()
        await until(lambda: len(decode.received) == 1, "it is told")
        (told,) = decode.received
        assert (told.line, told.header(b"authorization")) == (b"POST /v1/completions HTTP/1.1", b"Bearer secret")
        assert json.loads(told.body) == {
            "model": "-",
            "prompt": [0],
            "max_tokens": 1,
            "kv_transfer_params": HANDED,
        }
        divided = router._journey.divided
        await until(lambda: divided.pinned == {}, "nothing is pinned")
        await until(lambda: not any(each.load.in_flight for each in router.fleet), "nothing is booked")

    async def test_in_the_middle_of_the_answer(self, bench: Bench) -> None:
        async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(STREAM_HEAD + chunk(ROLE) + chunk(delta("a")))
            await until_closed(request, reader)

        _, decode, router = await pair(bench, says(answer(handing())), script)
        client = await bench.client(router)
        client.post(PATH, STREAM_BODY)
        await client.head()
        client.leave()
        await asyncio.wait_for(decode.received[0].aborted.wait(), 60)
        await until(lambda: not any(each.load.in_flight for each in router.fleet), "nothing is booked")
        assert router._journey is not None
        assert router._journey.divided.pinned == {}


@pytest.mark.parametrize("connector", ["nixl", "content"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_usage_tells_what_was_cached_where_the_prompt_was_computed(
    bench: Bench, connector: str, streamed: bool
) -> None:
    """An engine that fetched all of a prompt counts all of it as cached."""
    usage = b'"usage":{"prompt_tokens":463,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":%s}}'
    told, true = (
        b'data: {"choices":[],%s}\n\n' % (usage % count) if streamed else b'{"choices":[{}],%s}' % (usage % count)
        for count in (b"462", b" 32")
    )
    begun, ended = (ROLE + delta("a"), b"data: [DONE]\n\n") if streamed else (b"", b"")
    second = stream(begun, told[:-30], told[-30:], ended) if streamed else answer(told)
    _, _, router = await pair(bench, says(answer(handing())), says(second), connector=connector)
    client = await bench.client(router)
    client.post(PATH, STREAM_BODY if streamed else BODY)
    reply = await client.reply()
    assert (reply.clean, reply.body) == (True, begun + true + ended)
