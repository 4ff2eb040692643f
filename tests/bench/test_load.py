"""`bench load` against servers of the tests' own, and against none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import load
from bench.cli import main, parser
from bench.client import Record, open_session
from bench.load import first_model, line, summary
from bench.processes import free_ports

if TYPE_CHECKING:
    from pathlib import Path


def record(replica: str, *, cached: int = 0, predicted: int | None = None, error: str | None = None) -> Record:
    return Record(
        0, 0, 1.0, 0.02, 2.0, prompt_tokens=100, cached_tokens=cached, predicted_tokens=predicted, replica=replica,
        error=error,
    )  # fmt: skip


def test_a_load_in_one_line() -> None:
    records = [
        record("b:1", cached=50, predicted=50),
        record("a:1", predicted=16),
        record("b:1", cached=50, predicted=50),
        record("", error="status 503: full"),
    ]
    assert line(records) == (
        "4 requests, 1 failed, hit rate 33.3%, 2 predicted exactly, TTFT 20 ms; answered by a:1 1, b:1 2\n"
        "  failed: status 503: full"
    )
    assert summary(records).replicas == {"a:1": 1, "b:1": 2}


def test_a_load_without_requests_in_one_line() -> None:
    assert line([]) == "0 requests, 0 failed, hit rate 0.0%, 0 predicted exactly, TTFT 0 ms"


def test_where_nothing_listens_it_says_what_it_waits_for_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(SystemExit) as end:
        main(["load", f"{url}/", "--seconds", "0.3"])
    # A line as the status: printed to standard error, and the process ends with 1.
    assert isinstance(end.value.code, str)
    assert end.value.code.startswith(f"bench: {url}/v1/models named no model within 0.3 s: Connect call failed")
    assert "\n" not in end.value.code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"waiting up to 0.3 s for {url}/v1/models to name a model\n"


async def test_a_server_that_never_answers_is_waited_for_no_longer() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/v1/models", hang)
    async with TestServer(app) as server, open_session() as session, asyncio.timeout(60):
        with pytest.raises(ValueError, match=r"named no model within 0\.2 s: it did not answer"):
            await first_model(session, str(server.make_url("")).rstrip("/"), 0.2)


@pytest.mark.parametrize("document", [[], {}, {"data": []}, {"data": None}, {"data": [1]}, "text"])
async def test_what_is_no_list_of_models(document: object) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response(document)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, open_session() as session:
        with pytest.raises(ValueError, match="its answer is no list of models"):
            await first_model(session, str(server.make_url("")).rstrip("/"), 1.0)


async def test_the_status_of_a_router_that_is_not_ready_is_named_and_a_later_model_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def models(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked < 3:
            return web.json_response({}, status=503)
        return web.json_response({"data": [{"id": "m"}]})

    monkeypatch.setattr(load, "ASK_EVERY_S", 0.01)
    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server, open_session() as session:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(ValueError, match=r"status 404"):
            await first_model(session, f"{url}/elsewhere", 0.2)
        assert await first_model(session, url, 20.0) == "m"
    assert asked == 3


@pytest.mark.parametrize("answers", [True, False])
async def test_it_ends_after_its_seconds_whether_or_not_requests_do(
    answers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(_: web.Request) -> web.StreamResponse:
        if not answers:
            await asyncio.Event().wait()
        chunk = {"choices": [{"delta": {"content": "ok"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream", headers={"x-warmroute-replica": "r:1"})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        url = str(server.make_url(""))
        arguments = parser().parse_args(
            ["load", url, "--seconds", "1", "--sessions", "2", "--json", "--out", str(tmp_path)]
        )
        status = await load.run(arguments)
    document = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "load.json").read_text()) == document
    assert (document["command"], document["seed"], document["failed"]) == ("load", 0, 0)
    if answers:
        assert status == 0
        assert document["replicas"] == {"r:1": document["requests"]}
        assert document["requests"] >= 2
    else:
        # Nothing failed, and nothing came either.
        assert (status, document["requests"]) == (1, 0)
