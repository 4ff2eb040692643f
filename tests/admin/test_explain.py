"""What the admin side says: where a request would go and why, and who is there. Nothing of it changes a thing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.app import Router
from router.cli import main
from router.config import ConfigError
from tests.end_to_end.conftest import Fleet
from tests.wire.conftest import settings_for


async def ask(router: Router, body: object, *, path: str = "", token: str = "") -> tuple[int, dict[str, Any]]:
    assert router.admin_address is not None
    host, port = router.admin_address
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{host}:{port}/router/explain", data=data, params={"path": path} if path else {}, headers=headers
        ) as answer,
    ):
        return answer.status, await answer.json()


async def test_it_explains_what_then_happens(fleet: Fleet) -> None:
    fakes = [await fleet.fake() for _ in range(2)]
    router = await fleet.router(*fakes, admin_port=0)
    client = await fleet.openai(router)
    model = next(iter(router.fleet.ready()[0].models))
    body = {"model": model, "messages": [{"role": "user", "content": "tide " * 2000}]}
    status, cold = await ask(router, body)
    assert status == 200
    assert (cold["kind"], cold["unread"], cold["read_as"][:6]) == ("chat", None, "tokens")
    assert [row["cached_tokens"] for row in cold["replicas"]] == [0, 0]
    raw = await client.chat.completions.with_raw_response.create(max_tokens=4, **body)  # type: ignore[call-overload]
    home = raw.headers["x-warmroute-replica"]
    assert home == cold["choice"]
    usage = raw.parse().usage
    assert cold["tokens"] == [usage.prompt_tokens]
    assert cold["blocks"] == {"16": usage.prompt_tokens // 16}
    # Explaining did not count: the same answer twice, and it is what the next request finds.
    (_, warm), (_, again) = await ask(router, body), await ask(router, body)
    assert warm["choice"] == home
    held = {row["replica"]: row["cached_tokens"] for row in warm["replicas"]}
    assert {name: row["total_ms"] for name, row in zip(held, again["replicas"], strict=True)}.keys() == held.keys()
    raw = await client.chat.completions.with_raw_response.create(max_tokens=4, **body)  # type: ignore[call-overload]
    assert int(raw.headers["x-warmroute-predicted-tokens"]) == held[home] > 0
    for part in (home, "is chosen", f"holds {held[home]} of"):
        assert part in warm["words"]
    assert all(replica.load.in_flight == 0 for replica in router.fleet)


async def test_round_robin_does_not_lose_its_turn(fleet: Fleet) -> None:
    router = await fleet.router(*[await fleet.fake() for _ in range(3)], admin_port=0, policy="round_robin")
    choices = [(await ask(router, {"prompt": "a"}))[1]["choice"] for _ in range(4)]
    assert len(set(choices)) == 1


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b'{"messages": 5}', b'{"prompt": {}}', b"\xff"])
async def test_what_cannot_be_read_is_said_to_go_by_load(fleet: Fleet, body: bytes) -> None:
    router = await fleet.router(await fleet.fake(), admin_port=0)
    status, said = await ask(router, body)
    assert status == 200
    assert said["unread"] is not None
    assert "by load alone" in said["words"]


async def test_it_says_what_is_wrong_with_a_body_and_that_nobody_serves_a_model(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake(), admin_port=0)
    for body in (b"not json", b"[1]"):
        _, said = await ask(router, body)
        assert "routed by load alone, since its body is no JSON object; a replica will say so" in said["words"]
    _, said = await ask(router, {"model": "nope", "messages": [{"role": "user", "content": "hi"}]})
    assert said["words"].startswith(
        "chat request, model nope, which no replica serves (it goes to any, and the engine refuses it): "
    )
    model = next(iter(router.fleet.ready()[0].models))
    _, said = await ask(router, {"model": model, "messages": []})
    assert said["unread"] == "its prompt cannot be read"
    _, said = await ask(router, {"model": model}, path="/v1/audio/speech")
    assert said["unread"] == "its route has no prompt"
    assert "no replica serves" not in said["words"]


async def test_without_replicas_it_says_why(fleet: Fleet) -> None:
    fake = await fleet.fake()
    router = await fleet.router(fake, admin_port=0)
    router.fleet.ready()[0].state = router.fleet.ready()[0].state.LOST
    _, said = await ask(router, {"prompt": "a"})
    assert said["choice"] is None
    assert "lost" in said["words"]


async def test_the_admin_side_asks_for_its_token(fleet: Fleet, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    router = await fleet.router(await fleet.fake(), admin_port=0, admin_token_file=secret)
    for token, status in (("", 401), ("wrong", 401), ("s3cret", 200)):
        told, said = await ask(router, {"prompt": "a"}, token=token)
        assert told == status
        assert ("error" in said) is (status == 401)
    with pytest.raises(ConfigError, match="--admin-token-file"):
        Router(settings_for(["http://a:1"], admin_port=0, admin_host="0.0.0.0"))
    secret.write_text("")
    with pytest.raises(ConfigError, match="empty"):
        Router(settings_for(["http://a:1"], admin_port=0, admin_token_file=secret))


async def test_replicas_are_shown_whole_and_other_paths_are_refused(fleet: Fleet) -> None:
    fakes = [await fleet.fake("--block-size", size) for size in ("16", "32")]
    router = await fleet.router(*fakes, admin_port=0)
    assert router.admin_address is not None
    host, port = router.admin_address
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        async with session.get("/router/replicas") as answer:
            shown = (await answer.json())["replicas"]
        async with session.get("/v1/models") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, 404)
    assert [row["block_size"] for row in shown] == [16, 32]
    assert all(row["state"] == "ready" and row["num_gpu_blocks"] > 0 and row["models"] for row in shown)
    # The clients' side knows nothing of it: such a path is a replica's.
    client = await fleet.client(router)
    client.send(b"GET /router/replicas HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.reply()).json == {"detail": "Not Found"}


async def test_the_command_prints_words_or_json(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = await fleet.router(await fleet.fake(), admin_port=0)
    assert router.admin_address is not None
    where = "http://{}:{}".format(*router.admin_address)
    body = tmp_path / "body.json"
    body.write_text('{"prompt": "a"}')

    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, ["explain", str(body), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    status, out, _ = await run("--router", where)
    assert (status, "is chosen" in out) == (0, True)
    status, out, _ = await run("--router", where, "--json")
    assert (status, json.loads(out)["tokens"]) == (0, [1])
    status, _, err = await run("--router", "localhost:1")
    assert (status, "did you mean http://localhost:1" in err) == (1, True)
    status, _, err = await run("--router", "http://127.0.0.1:1")
    assert (status, len(err.strip().splitlines())) == (1, 1)
    body.unlink()
    assert (await run("--router", where))[0] == 1


async def test_the_metrics_page_has_no_twins_and_no_error_of_engines_that_tell_nothing(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake())
    page = router.telemetry.page()
    assert b"_created" not in page
    assert b'warmroute_requests_total{code="2xx",ending="complete"} 0.0' in page
    name = router.fleet.ready()[0].name.encode()
    assert b"warmroute_cache_routing_degraded" in page
    assert b'warmroute_prediction_error{replica="%s"}' % name not in page
    client = await fleet.openai(router)
    model = next(iter(router.fleet.ready()[0].models))
    for _ in range(2):
        await client.completions.create(model=model, prompt="tide " * 200, max_tokens=1)
    assert b'warmroute_prediction_error{replica="%s"} 0.0' % name in router.telemetry.page()
