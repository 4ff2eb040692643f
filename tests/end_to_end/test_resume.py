"""A stream whose replica dies is finished by another one, as one answer; what can't be is ended with an error.

The fakes answer as a model at temperature 0 does (`--answers greedy`): each token follows from those before it. So a
continuation is right exactly where it equals the rest of the undisturbed answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import openai
import pytest

from bench.processes import free_ports
from fake_backend.faults import Rule
from fake_backend.server import Server
from fake_backend.settings import TINY
from router.app import Router
from tests.end_to_end.conftest import Fleet
from tests.handoff.pairs import PROMPT, consumer, nothing_pinned, producer
from tests.wire.conftest import settings_for
from tests.wire.scripted import Raw, Reply, until

START_SECONDS = 100.0  # a bound; a fake takes two, alone on the machine
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "You are a lighthouse keeper; “brief”, and a bit é."},
    {"role": "user", "content": "Who are you?"},
]
CHAT_BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "min_tokens": 40, "stream": True}
TEXT_BODY: dict[str, Any] = {
    "prompt": "The sea was",
    "max_tokens": 60,
    "temperature": 0,
    "min_tokens": 40,
    "stream": True,
}
IDS_BODY: dict[str, Any] = TEXT_BODY | {"prompt": [10, 200, 3000, 45, 7]}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


pytestmark = pytest.mark.usefixtures("one_tokenizer")


async def fakes(fleet: Fleet, count: int = 2) -> list[Server]:
    return [await fleet.fake("--answers", "greedy:80", "--served-model-name", "m") for _ in range(count)]


async def stream(client: Raw, path: str, body: dict[str, Any]) -> Reply:
    client.post(path, json.dumps(body).encode())
    return await client.reply()


def events(reply: Reply) -> list[Any]:
    """The stream's events, less what differs from replica to replica."""
    pieces = reply.body.decode().split("\n\n")
    assert pieces.pop() == ""
    found: list[Any] = []
    for piece in pieces:
        data = piece.removeprefix("data: ")
        if data == "[DONE]":
            found.append(data)
            continue
        event = json.loads(data)
        for name in ("id", "created", "system_fingerprint"):
            event.pop(name, None)
        found.append(event)
    return found


def identities(reply: Reply) -> set[tuple[Any, ...]]:
    values = [json.loads(piece[6:]) for piece in reply.body.decode().split("\n\n")[:-1] if piece != "data: [DONE]"]
    return {(value["id"], value["created"], value["model"]) for value in values}


def counted(router: Router) -> tuple[float, dict[str, float]]:
    """Resumed answers, and those that were not, by why."""
    values: dict[str, float] = {}
    for metric in router.telemetry.unresumed.collect():
        values |= {s.labels["why"]: s.value for s in metric.samples if s.name.endswith("_total")}
    return router.telemetry.resumed.value, values


def dies(servers: list[Server], after: int, kind: str = "reset") -> Rule:
    """Whoever is asked next dies after so many events."""
    rule = Rule(kind, events=after, times=1)
    for server in servers:
        server.faults.add(rule)
    return rule


def cached_apart(found: list[Any]) -> list[Any]:
    """Less what each engine had cached, which is its own."""
    for event in found:
        if event != "[DONE]" and event.get("usage"):
            event["usage"].pop("prompt_tokens_details", None)
    return found


@pytest.mark.fault("silent truncation")
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, CHAT_BODY), (CHAT, CHAT_BODY | {"max_tokens": 50}), (COMPLETIONS, TEXT_BODY), (COMPLETIONS, IDS_BODY)],
    ids=["chat", "bounded chat", "text", "ids"],
)
async def test_the_client_gets_the_undisturbed_answer(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    servers = await fakes(fleet)
    router = await fleet.router(*servers, tokenizer=TINY)
    client, direct = await fleet.client(router), await fleet.direct(servers[0])
    resumed = 0
    for usage in ({}, USAGE, CONTINUOUS):
        undisturbed = cached_apart(events(await stream(direct, path, body | usage)))
        assert len(undisturbed) > 35
        for after in (0, 1, 2, 9, 30):
            rule = dies(servers, after)
            reply = await stream(client, path, body | usage)
            assert rule.hits == 1
            assert (reply.status, reply.clean) == (200, True)
            assert cached_apart(events(reply)) == undisturbed
            assert len(identities(reply)) == 1
            resumed += bool(after)
            assert counted(router) == (resumed, {})
            for replica in router.fleet:
                assert replica.load.in_flight == 0
                replica.breaker.answered()  # else it is left alone soon, and rightly


async def test_the_second_half_is_found_in_the_cache_and_learned(fleet: Fleet) -> None:
    servers = await fakes(fleet)
    router = await fleet.router(*servers, tokenizer=TINY)
    body = CHAT_BODY | {"messages": [{"role": "user", "content": "x " * 400}]} | USAGE
    for server in servers:
        await stream(await fleet.direct(server), CHAT, body)
    dies(servers, 30)
    reply = await stream(await fleet.client(router), CHAT, body)
    *_, last, _ = events(reply)
    assert 400 <= last["usage"]["prompt_tokens_details"]["cached_tokens"] <= last["usage"]["prompt_tokens"]
    assert sorted(replica.load.in_flight for replica in router.fleet) == [0, 0]
    assert min(router.index.blocks(replica.name) for replica in router.fleet) >= 400 // 16


async def test_an_answer_that_breaks_off_twice_goes_on_twice(fleet: Fleet) -> None:
    servers = await fakes(fleet, 3)
    router = await fleet.router(*servers, tokenizer=TINY)
    body = CHAT_BODY | CONTINUOUS | {"max_tokens": 70}
    undisturbed = cached_apart(events(await stream(await fleet.direct(servers[0]), CHAT, body)))
    rules = [dies(servers, 10), dies(servers, 12)]
    reply = await stream(await fleet.client(router), CHAT, body)
    assert [rule.hits for rule in rules] == [1, 1]
    assert cached_apart(events(reply)) == undisturbed
    assert counted(router) == (1.0, {})


async def test_one_that_dies_before_its_last_word_needs_no_other(fleet: Fleet) -> None:
    """The engine had told why it finished; only [DONE] is missing."""
    servers = await fakes(fleet)
    router = await fleet.router(*servers, tokenizer=TINY)
    undisturbed = await stream(await fleet.direct(servers[0]), CHAT, CHAT_BODY)
    dies(servers, len(events(undisturbed)) - 1)
    client = await fleet.client(router)
    reply = await stream(client, CHAT, CHAT_BODY)
    assert (events(reply), reply.clean) == (events(undisturbed), True)
    assert counted(router) == (0.0, {})
    # Where the tokens were to be told, they are not made up.
    dies(servers, len(events(undisturbed)) - 1)
    reply = await stream(client, CHAT, CHAT_BODY | USAGE)
    assert events(reply)[-1]["error"]["code"] == 502
    assert counted(router) == (0.0, {"usage is missing": 1.0})


async def test_one_that_fetched_its_prompt_dies_and_another_computes_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed over is of no use to a third replica, and is not offered again."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    flags = ("--answers", "greedy:80", "--served-model-name", "m")
    prefill = await producer(fleet, *flags)
    decodes = [await consumer(fleet, *flags) for _ in range(2)]
    router = await fleet.router(prefill, *decodes, tokenizer=TINY, split="always")
    body = CHAT_BODY | {"messages": [{"role": "user", "content": PROMPT}]} | USAGE
    direct = await fleet.direct(decodes[0])
    undisturbed = cached_apart(events(await stream(direct, CHAT, body)))
    dies(decodes, 12)
    reply = await stream(await fleet.client(router), CHAT, body)
    assert reply.header(b"x-warmroute-prefill") == prefill.url.removeprefix("http://").encode()
    assert cached_apart(events(reply)) == undisturbed
    assert counted(router) == (1.0, {})
    await nothing_pinned(prefill)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [TOOL]}, "form of the request"),
    (CHAT, {"logprobs": True}, "form of the request"),
    (CHAT, {"response_format": {"type": "json_object"}}, "form of the request"),
    (CHAT, {"presence_penalty": 0.5}, "form of the request"),
    (CHAT, {"never_heard_of": 1}, "form of the request"),
    (CHAT, {"n": 2, "temperature": 1}, "not plain text"),
    (CHAT, {"stop": ["never said"]}, "stop strings"),
    (COMPLETIONS, {"echo": True}, "form of the request"),
    (COMPLETIONS, {"logprobs": 0}, "form of the request"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "not plain text"),
]


@pytest.mark.fault("silent truncation")
async def test_what_would_not_be_exact_ends_with_an_error(fleet: Fleet) -> None:
    servers = await fakes(fleet)
    router = await fleet.router(*servers, tokenizer=TINY)
    told: dict[str, float] = {}
    for path, changes, why in UNFIT:
        dies(servers, 9)
        reply = await stream(await fleet.client(router), path, (CHAT_BODY if path == CHAT else TEXT_BODY) | changes)
        assert (reply.status, reply.clean) == (200, True)
        *shown, last = events(reply)
        assert last["error"]["code"] == 502
        assert len(shown) == 9
        assert "[DONE]" not in shown
        told[why] = told.get(why, 0.0) + 1
        assert counted(router) == (0.0, told)
        for replica in router.fleet:
            replica.breaker.answered()


@pytest.mark.parametrize(
    ("count", "settings", "why"),
    [
        (1, {"tokenizer": TINY}, {"no other replica": 1.0}),
        (2, {"tokenizer": TINY, "max_attempts": 1}, {"no other replica": 1.0}),
        (2, {"tokenizer": TINY, "resume_streams": False}, {}),
    ],
    ids=["alone", "one attempt", "off"],
)
async def test_where_nobody_may_go_on_it_ends_with_an_error(
    fleet: Fleet, count: int, settings: dict[str, Any], why: dict[str, float]
) -> None:
    servers = await fakes(fleet, count)
    router = await fleet.router(*servers, **settings)
    dies(servers, 9)
    reply = await stream(await fleet.client(router), CHAT, CHAT_BODY)
    assert events(reply)[-1]["error"]["code"] == 502
    assert counted(router) == (0.0, why)


async def test_where_all_others_fail_it_ends_with_an_error(fleet: Fleet) -> None:
    servers = await fakes(fleet, 3)
    router = await fleet.router(*servers, tokenizer=TINY)
    dies(servers, 9)
    for server in servers:
        server.faults.add(Rule("status", status=503))
    reply = await stream(await fleet.client(router), CHAT, CHAT_BODY)
    assert len(events(reply)) == 10
    assert events(reply)[-1]["error"]["code"] == 502
    assert counted(router) == (0.0, {"others failed": 1.0})


class Processes:
    """Fake replicas in processes of their own, to be killed."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, count: int) -> list[tuple[str, asyncio.subprocess.Process]]:
        flags = ("--model", "Qwen3-0.6B", "--answers", "greedy:300", "--served-model-name", "m", "--host", "127.0.0.1")
        started = []
        for port in free_ports(count):
            command = ("-m", "fake_backend", "--port", str(port), *flags)
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            self._stack.push_async_callback(process.wait)
            self._stack.callback(_kill, process)
            started.append((f"http://127.0.0.1:{port}", process))
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
            for url, process in started:
                while process.returncode is None:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(f"{url}/health"):
                            break
                    await asyncio.sleep(0.1)
        return started


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.fault("silent truncation")
@pytest.mark.parametrize("usage", [{}, USAGE], ids=["no usage", "usage"])
async def test_killed_while_it_streams_to_the_openai_client(usage: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        replicas = await Processes(stack).start(2)
        settings = settings_for([url for url, _ in replicas], tokenizer=TINY, probe_seconds=0.1)
        router = await stack.enter_async_context(Router(settings))
        await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
        host, port = router.address
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        )
        asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 200, **usage}
        asked["extra_body"] = {"ignore_eos": True}
        undisturbed, total = "", None
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            undisturbed += chunk.choices[0].delta.content or "" if chunk.choices else ""
            total = chunk.usage or total
        raw = await client.chat.completions.with_raw_response.create(stream=True, **asked)
        serving = raw.headers["x-warmroute-replica"]
        text, roles, ids, usages, count = "", 0, set(), [], 0
        async for chunk in raw.parse():
            count += 1
            if count == 20:
                for url, process in replicas:
                    if url.endswith(serving):
                        _kill(process)
            ids.add((chunk.id, chunk.created))
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                roles += choice.delta.role is not None
                text += choice.delta.content or ""
        assert text == undisturbed
        assert (roles, len(ids)) == (1, 1)
        assert counted(router)[0] == 1.0
        if usage:
            assert total is not None
            assert [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in usages] == [
                (total.prompt_tokens, 200, total.prompt_tokens + 200)
            ]


async def test_stopped_while_some_wait_and_some_stream() -> None:
    """A process that is stopped closes no connection. What waits there for its first byte is answered elsewhere, what
    streams from there goes on elsewhere, and nobody sees a failure."""
    async with AsyncExitStack() as stack:
        replicas = await Processes(stack).start(2)
        settings = settings_for(
            [url for url, _ in replicas],
            tokenizer=TINY,
            probe_seconds=0.1,
            probe_timeout_seconds=1,
            silence_seconds=3,
            policy="round_robin",
        )
        router = await stack.enter_async_context(Router(settings))
        await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
        host, port = router.address
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=60)
        )
        asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
        asked["extra_body"] = {"ignore_eos": True}
        undisturbed = (await client.chat.completions.create(**asked)).choices[0].message.content
        raw = await client.chat.completions.with_raw_response.create(stream=True, **asked)
        serving = raw.headers["x-warmroute-replica"]
        (stopped,) = (process for url, process in replicas if url.endswith(serving))
        text, waiting = "", []
        async for chunk in raw.parse():
            text += chunk.choices[0].delta.content or ""
            if not waiting and len(text) > 40:
                os.kill(stopped.pid, signal.SIGSTOP)
                waiting = [asyncio.create_task(client.chat.completions.create(**asked)) for _ in range(6)]
        assert text == undisturbed
        answers = await asyncio.gather(*waiting)
        assert [answer.choices[0].message.content for answer in answers] == [undisturbed] * 6
        assert counted(router) == (1.0, {})
        assert router.telemetry.attempts.labels(serving, "unreached").value >= 1
        assert all(replica.load.in_flight == 0 for replica in router.fleet)
