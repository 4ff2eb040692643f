"""A client that goes away, in every place where it can."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.fake_backend.raw import ask, read_answer, read_head, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "ignore_eos": True}


async def metric(server: Server, line: str) -> float:
    text = (await ask(server.port, "GET", "/metrics")).body.decode()
    return float(next(row.rsplit(" ", 1)[1] for row in text.splitlines() if row.startswith(line)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte(start: Callable[..., Awaitable[Server]], stream: bool) -> None:
    server = await start("--time-scale", "1")
    (engine,) = server.replica.engines
    server.replica.ranks[0].runtime.engine.stopped = True  # admitted, but no step ever begins
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", CHAT, json.dumps(LONG | {"stream": stream}).encode()))
    await until(lambda: len(engine.scheduler) == 1)
    writer.close()
    await until(lambda: len(engine.scheduler) == 0)
    del reader


@pytest.mark.parametrize("stream", [False, True])
async def test_while_the_engine_works(start: Callable[..., Awaitable[Server]], stream: bool) -> None:
    server = await start("--time-scale", "1", "--model", "Llama-3.1-8B")
    (engine,) = server.replica.engines
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", CHAT, json.dumps(LONG | {"stream": stream}).encode()))
    if stream:
        assert (await read_head(reader))[0] == 200
    await until(lambda: any(r.generated > 2 for r in engine.scheduler.running))
    assert engine.pool.usage > 0
    writer.close()
    await until(lambda: len(engine.scheduler) == 0)
    assert engine.pool.free_blocks == engine.pool.usable
    await until(lambda: engine.idle)
    assert await metric(server, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 1
    assert await metric(server, "vllm:num_requests_running") == 0


async def test_several_answers_all_stop(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--time-scale", "1", "--model", "Llama-3.1-8B")
    (engine,) = server.replica.engines
    _reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 3000, "ignore_eos": True}
    writer.write(request("POST", "/v1/completions", json.dumps(body).encode()))
    await until(lambda: len(engine.scheduler.running) == 6)
    writer.close()
    await until(lambda: len(engine.scheduler) == 0)


async def test_an_idle_connection_is_closed_by_the_server(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    assert server.listener.keep_alive == 5.0
    await ask(server.port, "POST", "/fake/keep_alive", b'{"seconds": 0.01}')
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2):
        writer.write(request("GET", "/health"))
        assert (await read_answer(reader)).status == 200
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_pipelined_requests_are_answered_in_order(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    writer.write(request("POST", "/v1/completions", body) + request("GET", "/version") + request("GET", "/ping"))
    answers = [await read_answer(reader) for _ in range(3)]
    assert json.loads(answers[0].body)["object"] == "text_completion"
    assert json.loads(answers[1].body) == {"version": "0.32.0"}
    assert answers[2].body == b""
    writer.close()


async def test_what_is_no_http_is_refused(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    raw = await asyncio.wait_for(reader.read(), 60)
    assert raw.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert raw.endswith(b"Invalid HTTP request received.")
    writer.close()


async def test_http_1_0_and_connection_close_end_the_connection(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    for asked in (b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(asked)
        raw = await asyncio.wait_for(reader.read(), 60)
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nconnection: close\r\n" in raw
        writer.close()


async def test_expect_100_continue(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    headers = "host: x\r\ncontent-type: application/json\r\ncontent-length: 17\r\nexpect: 100-continue\r\n"
    writer.write(f"POST /tokenize HTTP/1.1\r\n{headers}\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b'{"prompt": "sea"}')
    assert (await read_answer(reader)).status == 200
    writer.close()
