"""The workload's client against a server of its own: what it records of good, bad and broken answers."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.ceilings import Exchange
from bench.client import Record, play_all
from bench.workloads import Script, Turn

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Play = Callable[[Handler, list[Script]], Awaitable[list[Record]]]


def script(session: int, *texts: str) -> Script:
    return Script(session, 0.0, "You are brief.", tuple(Turn(text, 8, 0.0) for text in texts))


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    servers = []

    async def run(handler: Handler, scripts: list[Script]) -> list[Record]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return await play_all(str(server.make_url("")).rstrip("/"), "m", scripts)

    yield run
    for server in servers:
        await server.close()


async def stream(request: web.Request, *events: object) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream", "x-warmroute-replica": "a:1", "x-warmroute-predicted-tokens": "2"}
    )
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    return response


def whole(text: str, ids: list[int]) -> list[object]:
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    return [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3, 4]},
        {"choices": [{"delta": {"content": text}, "token_ids": ids[:1]}]},
        {"choices": [{"delta": {"content": "."}, "token_ids": ids[1:], "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
        "[DONE]",
    ]


async def test_a_conversation_is_told_on_with_its_answers(play: Play) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await stream(request, *whole(f"Answer {len(bodies)}", [7, 8]))

    records = await play(handler, [script(5, "One?", "Two?")])
    assert [body["messages"] for body in bodies] == [
        [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "One?"}],
        [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Answer 1."},
            {"role": "user", "content": "Two?"},
        ],
    ]
    assert [(r.session, r.turn, r.error, r.replica) for r in records] == [
        (5, 0, None, "a:1"),
        (5, 1, None, "a:1"),
    ]
    first = records[0]
    assert (first.prompt_tokens, first.cached_tokens, first.answer_tokens) == (4, 3, 2)
    assert first.predicted_tokens == 2
    assert first.exchange == Exchange((1, 2, 3, 4), (7, 8))
    assert first.sent_s < first.sent_s + first.ttft_s <= first.ended_s


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (whole("x", [7, 8])[:3], "the stream ended early"),
        ([*whole("x", [7, 8])[:1], {"error": {"message": "engine died"}}, "[DONE]"], "in the stream: engine died"),
        (["{broken"], "JSONDecodeError"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error_and_ends_the_conversation(
    play: Play, events: list[object], error: str
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events)

    records = await play(handler, [script(0, "One?", "Two?")])
    assert len(records) == 1
    assert records[0].error is not None
    assert records[0].error.startswith(error)


async def test_a_status_is_recorded_with_what_the_server_said(play: Play) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no replica is ready")

    [record] = await play(handler, [script(0, "One?")])
    assert (record.error, record.replica, record.exchange) == ("status 503: no replica is ready", "", None)


async def test_a_server_that_is_not_there_is_recorded_too() -> None:
    [record] = await play_all("http://127.0.0.1:1", "m", [script(0, "One?")])
    assert record.error is not None
    assert record.error.startswith("ClientConnectorError")
