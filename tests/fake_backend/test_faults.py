from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.fake_backend.raw import ask, read_answer, read_head, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

COMPLETION = "/v1/completions"
BODY = json.dumps({"prompt": "a", "max_tokens": 8, "ignore_eos": True}).encode()
STREAM = json.dumps({"prompt": "a", "max_tokens": 8, "ignore_eos": True, "stream": True}).encode()


async def fault(server: Server, **rule: object) -> None:
    answer = await ask(server.port, "POST", "/fake/faults", json.dumps(rule).encode())
    assert answer.status == 200, answer.body


async def everything(server: Server, body: bytes) -> bytes:
    """All bytes until the server ends the connection. Raises ConnectionResetError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", COMPLETION, body, {"connection": "close"}))
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


async def test_an_error_with_headers_as_often_as_asked(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="status", status=429, headers={"retry-after": "7"}, skip=1, times=2)
    statuses = [(await ask(server.port, "POST", COMPLETION, BODY)).status for _ in range(4)]
    assert statuses == [200, 429, 429, 200]
    (rule,) = json.loads((await ask(server.port, "GET", "/fake/faults")).body)["faults"]
    assert (rule["hits"], rule["times"]) == (2, 0)


async def test_the_error_is_sent_as_given(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="status", status=503, headers={"retry-after": "7"}, body='{"x": 1}', path=COMPLETION)
    answer = await ask(server.port, "POST", COMPLETION, BODY)
    assert (answer.status, answer.headers["retry-after"], answer.body) == (503, "7", b'{"x": 1}')
    assert (await ask(server.port, "GET", "/v1/models")).status == 200
    await ask(server.port, "DELETE", "/fake/faults")
    assert (await ask(server.port, "POST", COMPLETION, BODY)).status == 200


async def test_hang_until_the_client_leaves(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="hang")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", COMPLETION, BODY))
    async with asyncio.timeout(60):
        while not server.replica.in_server:
            await asyncio.sleep(0.001)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    assert server.replica.in_server == 1
    writer.close()
    async with asyncio.timeout(60):
        while server.replica.in_server:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("events", [0, 1, 3])
async def test_cut_after_so_many_events(start: Callable[..., Awaitable[Server]], events: int) -> None:
    server = await start()
    await fault(server, kind="cut", events=events)
    raw = await everything(server, STREAM)
    assert raw.count(b"data: ") == events
    assert b"[DONE]" not in raw
    assert not raw.endswith(b"0\r\n\r\n")


async def test_reset_before_and_between_bytes(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--time-scale", "0.1")
    await fault(server, kind="reset", times=1)
    with pytest.raises(ConnectionResetError):
        await everything(server, BODY)
    await fault(server, kind="reset", events=2, times=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", COMPLETION, STREAM))
    assert (await read_head(reader))[0] == 200
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 60)
        await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert (await ask(server.port, "POST", COMPLETION, BODY)).status == 200


async def test_half_a_body(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="cut", events=1)
    head, body = (await everything(server, BODY)).split(b"\r\n\r\n", 1)
    length = int(next(line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")))
    assert len(body) == length // 2


async def test_no_done(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="no_done")
    answer = await ask(server.port, "POST", COMPLETION, STREAM)
    assert len(answer.events) == 8
    assert b"[DONE]" not in answer.body


async def test_garbage(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="garbage", body="nonsense\r\n")
    assert await everything(server, BODY) == b"nonsense\r\n"


async def test_the_engine_fails_one_request(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="engine_error", times=1)
    answer = await ask(server.port, "POST", COMPLETION, BODY)
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["type"] == "InternalServerError"


async def test_a_slow_first_token_holds_the_headers_back(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="slow_first_token", seconds=30)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", COMPLETION, STREAM))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    writer.close()


async def test_metrics_faults(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="metrics_old_names", times=1)
    old = (await ask(server.port, "GET", "/metrics")).body
    assert b"vllm:gpu_cache_usage_perc" in old
    assert b"vllm:kv_cache_usage_perc" not in old
    await fault(server, kind="metrics_fail", status=500, times=1)
    assert (await ask(server.port, "GET", "/metrics")).status == 500
    await fault(server, kind="metrics_huge", events=1, times=1)
    assert len((await ask(server.port, "GET", "/metrics")).body) > 1_000_000
    await fault(server, kind="metrics_stale", times=2)
    first = (await ask(server.port, "GET", "/metrics")).body
    await ask(server.port, "POST", COMPLETION, BODY)
    assert (await ask(server.port, "GET", "/metrics")).body == first
    assert (await ask(server.port, "GET", "/metrics")).body != first


async def test_a_restart_forgets_the_cache_at_the_same_address(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-prompt-tokens-details")
    body = json.dumps({"prompt": list(range(100, 180)), "max_tokens": 2}).encode()

    async def cached() -> int:
        answer = json.loads((await ask(server.port, "POST", COMPLETION, body)).body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def started(text: bytes) -> float:
        line = next(row for row in text.decode().splitlines() if row.startswith("process_start_time_seconds "))
        return float(line.split()[1])

    assert [await cached(), await cached()] == [0, 64]
    before = started((await ask(server.port, "GET", "/metrics")).body)
    port = server.port
    await server.restart()
    assert server.port == port
    metrics = (await ask(port, "GET", "/metrics")).body
    assert started(metrics) > before
    assert b'vllm:prefix_cache_queries_total{engine="0",model_name="Qwen3-0.6B"} 0.0' in metrics
    assert [await cached(), await cached()] == [0, 64]


async def test_refusing_keeps_the_cache(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-prompt-tokens-details")
    body = json.dumps({"prompt": list(range(100, 180)), "max_tokens": 2}).encode()
    await ask(server.port, "POST", COMPLETION, body)
    refusing = asyncio.create_task(server.refuse(0.2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await ask(server.port, "GET", "/health")
    await refusing
    answer = json.loads((await ask(server.port, "POST", COMPLETION, body)).body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_a_slow_gpu(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await ask(server.port, "POST", "/fake/gpu", b'{"slowdown": 3}')
    (engine,) = server.replica.engines
    assert engine.step_time.slowdown == 3


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"kind": "sulk"}, "unknown fault kind 'sulk'"),
        ({"kind": "hang", "color": "red"}, "unknown fault settings color"),
        ({"kind": "cut", "events": "many"}, "events has the wrong type"),
        ("hang", "a fault is an object"),
    ],
)
async def test_a_rule_that_means_nothing_is_refused(
    start: Callable[..., Awaitable[Server]], rule: object, complaint: str
) -> None:
    server = await start()
    answer = await ask(server.port, "POST", "/fake/faults", json.dumps(rule).encode())
    assert answer.status == 400
    assert complaint in json.loads(answer.body)["error"]
    assert server.faults.rules == []


async def test_a_client_that_uses_a_connection_twice(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    await fault(server, kind="status", status=500, times=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for expected in (500, 200):
        writer.write(request("POST", COMPLETION, BODY))
        assert (await read_answer(reader)).status == expected
    writer.close()
