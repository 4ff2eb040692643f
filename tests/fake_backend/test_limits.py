"""Keys, queues and lengths."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fake_backend.raw import ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

RECORDED = Path(__file__).resolve().parents[1] / "data" / "vllm" / "http"
COMPLETION = "/v1/completions"


def recorded_body(name: str) -> bytes:
    return (RECORDED / f"{name}.txt").read_bytes().split(b"\n\n", 1)[-1].split(b"\r\n\r\n", 1)[-1]


async def complete(server: Server, **body: Any) -> Any:
    return await ask(server.port, "POST", COMPLETION, json.dumps(body).encode())


async def test_authorisation(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--api-key", "one", "two")
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
        answer = await ask(server.port, "GET", "/v1/models", headers=headers)
        assert (answer.status, answer.body) == (401, recorded_body("error_unauthorized"))
        assert "vary" not in answer.headers
    for key in ("one", "two"):
        assert (await ask(server.port, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"})).status == 200
    for path in ("/health", "/metrics", "/version", "/load"):
        assert (await ask(server.port, "GET", path)).status == 200
    assert (await ask(server.port, "POST", "/tokenize", b'{"prompt": "a"}')).status == 200


async def test_queue_limits(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--max-num-queued-reqs", "3", "--time-scale", "1")
    (engine,) = server.replica.engines
    engine.stopped = True
    first = asyncio.create_task(complete(server, prompt="a", max_tokens=2, n=2))
    async with asyncio.timeout(60):
        while len(engine.scheduler) < 2:
            await asyncio.sleep(0.001)
    refused = await complete(server, prompt="a", n=2, max_tokens=2)
    assert (refused.status, refused.body) == (503, recorded_body("error_busy"))
    assert "retry-after" not in refused.headers
    engine.stopped = False
    server.replica.ranks[0].runtime.nudge()
    assert (await complete(server, prompt="a", max_tokens=2)).status == 200
    assert (await first).status == 200
    metrics = (await ask(server.port, "GET", "/metrics")).body.decode()
    line = 'vllm:admission_rejections_total{model_name="Qwen3-0.6B",reason="max_num_queued_reqs"} 1.0'
    assert line in metrics


async def test_prefill_backlog(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--max-num-queued-tokens", "50", "--time-scale", "1")
    (engine,) = server.replica.engines
    engine.stopped = True
    first = asyncio.create_task(complete(server, prompt=[5] * 60, max_tokens=2))
    async with asyncio.timeout(60):
        while engine.queued_prompt_tokens < 60:
            await asyncio.sleep(0.001)
    refused = await complete(server, prompt="a")
    assert refused.status == 503
    assert "prefill token backlog limit" in json.loads(refused.body)["error"]["message"]
    engine.stopped = False
    server.replica.ranks[0].runtime.nudge()
    assert (await first).status == 200
    assert (await complete(server, prompt="a")).status == 200


async def test_answers_are_clipped_to_the_context(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--max-model-len", "64")
    answer = json.loads((await complete(server, prompt=[5] * 60, max_tokens=500, ignore_eos=True)).body)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await complete(server, prompt=[5] * 64)).status == 400
    assert (await complete(server, prompt=[5] * 63)).status == 200


async def test_data_parallel_ranks(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--data-parallel-size", "2", "--enable-prompt-tokens-details")
    body = json.dumps({"prompt": list(range(200, 264)), "max_tokens": 2}).encode()

    async def cached(rank: str) -> int:
        answer = await ask(server.port, "POST", COMPLETION, body, {"x-data-parallel-rank": rank})
        return int(json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached("0"), await cached("0"), await cached("1"), await cached("1")] == [0, 48, 0, 48]
    refused = await ask(server.port, "POST", COMPLETION, body, {"x-data-parallel-rank": "5"})
    assert json.loads(refused.body)["error"]["message"] == "data_parallel_rank 5 is out of range [0, 2)."
    assert b'vllm:num_requests_running{engine="1"' in (await ask(server.port, "GET", "/metrics")).body


@pytest.mark.parametrize("flag", [(), ("--no-enable-prefix-caching",)])
async def test_prefix_caching_can_be_off(start: Callable[..., Awaitable[Server]], flag: tuple[str, ...]) -> None:
    server = await start("--enable-prompt-tokens-details", *flag)
    for _ in range(2):
        answer = json.loads((await complete(server, prompt=list(range(100, 164)), max_tokens=2)).body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (0 if flag else 48)


async def test_request_ids(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-request-id-headers")
    body = b'{"prompt": "a", "max_tokens": 2}'
    answer = await ask(server.port, "POST", COMPLETION, body, {"x-request-id": "rid-A1"})
    assert answer.headers["x-request-id"] == "rid-A1"
    assert json.loads(answer.body)["id"] == "cmpl-rid-A1"
    anonymous = await ask(server.port, "POST", COMPLETION, body)
    assert len(anonymous.headers["x-request-id"]) == 32
