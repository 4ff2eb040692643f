"""What comes in one turn of the event loop is begun together, and what is answered in one is ended together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.app import Router
from router.turn import LONG_BYTES, MOST
from router.wire.front import Front
from tests.wire.conftest import Bench
from tests.wire.scripted import BODY, Raw, hang, until
from tests.wire.test_access_log import told
from tests.wire.test_passage import load, passages


def post(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


REQUEST = post(BODY)


async def clients(bench: Bench, router: Router, count: int) -> tuple[list[Raw], list[Front]]:
    """So many, and the router's ends of their connections, in the same order."""
    assert router.door is not None
    found: list[Raw] = []
    fronts: list[Front] = []
    for _ in range(count):
        client = await bench.client(router)
        await until(lambda: len(router.door.connections) == len(found) + 1, "the connection is there")  # type: ignore[union-attr]
        found.append(client)
        fronts += [each for each in router.door.connections if each not in fronts]
    return found, fronts


def fail(_: object) -> None:
    raise ZeroDivisionError


class Steps:
    """Notes which step of the journey is taken for which client, and fails one of them where that is wanted."""

    BEGIN = ("look", "read", "hash", "choose", "send")
    NAMES = ("prepare", *BEGIN, "judge", "finish")

    def __init__(self, router: Router, fronts: list[Front], monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[str, int]] = []
        self.fails: tuple[str, int] | None = None
        self._fronts = fronts
        for name in self.NAMES:
            monkeypatch.setattr(router._journey, name, self._noted(name, getattr(router._journey, name)))

    def _noted(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def noted(whose: Any, *more: Any) -> Any:
            client = self._fronts.index(whose.client)
            self.taken.append((name, client))
            if (name, client) == self.fails:
                raise ZeroDivisionError
            return step(whose, *more)

        return noted

    def of(self, client: int) -> list[str]:
        return [name for name, whose in self.taken if whose == client]


@pytest.mark.interpreted
async def test_each_step_is_taken_for_all_that_came_before_the_next_one_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await bench.router(await bench.replica())
    callers, fronts = await clients(bench, router, 4)
    steps = Steps(router, fronts, monkeypatch)
    for front in fronts:
        front.data_received(REQUEST)
    # The first one was alone.
    assert [step for step in steps.taken if step[0] in Steps.BEGIN] == [(name, 0) for name in Steps.BEGIN]
    for client in callers:
        assert (await client.reply()).status == 200
    await until(lambda: not passages(router), "all are over")
    begun = [step for step in steps.taken if step[0] in Steps.BEGIN and step[1] > 0]
    assert begun == [(name, client) for name in Steps.BEGIN for client in range(1, 4)]
    assert all(steps.of(client) == list(Steps.NAMES) for client in range(4))


@pytest.mark.interpreted
async def test_of_many_so_many_are_begun_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await bench.router(await bench.replica())
    callers, fronts = await clients(bench, router, MOST + 2)
    steps = Steps(router, fronts, monkeypatch)
    for front in fronts:
        front.data_received(REQUEST)
    await until(lambda: ("send", MOST + 1) in steps.taken, "all are begun")
    assert steps.taken.index(("look", MOST)) < steps.taken.index(("send", 1))
    assert steps.taken.index(("send", MOST)) < steps.taken.index(("look", MOST + 1))
    for client in callers:
        assert (await client.reply()).status == 200


@pytest.mark.interpreted
async def test_nobody_waits_for_a_long_prompt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await bench.router(await bench.replica())
    callers, fronts = await clients(bench, router, 5)
    steps = Steps(router, fronts, monkeypatch)
    long = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"long " * (LONG_BYTES // 5))
    for client, front in enumerate(fronts):
        front.data_received(post(long) if client in (1, 3) else REQUEST)
    for caller in callers:
        assert (await caller.reply()).status == 200
    sent = [client for name, client in steps.taken if name == "send"]
    assert sent == [0, 2, 4, 1, 3]
    assert steps.taken.index(("send", 4)) < steps.taken.index(("read", 1))
    assert steps.taken.index(("send", 1)) < steps.taken.index(("read", 3))


async def test_who_is_called_off_before_it_was_begun_reaches_no_replica(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    (_, client, _), fronts = await clients(bench, router, 3)
    for front in fronts:
        front.data_received(REQUEST)
    task = fronts[1]._task
    assert task is not None
    assert task.cancel()
    assert not task.cancel()
    assert await client.closed() == b""
    await until(lambda: not passages(router), "all are over")
    assert len(replica.received) == 2
    assert load(router) == [0]
    assert router.door is not None
    assert router.door.held_bytes == 0


async def test_who_is_called_off_before_it_was_begun_is_told_of_like_any_other(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    router = await bench.router(await bench.replica(), access_log=file, otlp_endpoint="http://127.0.0.1:9")
    callers, fronts = await clients(bench, router, 3)
    for front in fronts:
        front.data_received(REQUEST)
    assert [each.span is not None for each in passages(router)] == [True] * 3
    assert router.door is not None
    router.door.cut()
    ids = []
    for client in callers:
        reply = await client.reply()
        assert reply.status == 503
        ids += reply.headers(b"x-request-id")
    assert len(set(ids)) == 3
    assert {line["request_id"].encode() for line in await told(file, 3)} == set(ids)


@pytest.mark.interpreted
@pytest.mark.parametrize("step", Steps.NAMES)
async def test_what_fails_for_one_fails_for_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    router = await bench.router(await bench.replica())
    callers, fronts = await clients(bench, router, 4)
    steps = Steps(router, fronts, monkeypatch)
    steps.fails = (step, 2)
    for front in fronts:
        front.data_received(REQUEST)
    told = [(await client.reply()).status for client in callers]
    assert told == [200, 200, 200 if step in ("judge", "finish") else 500, 200]
    await until(lambda: not passages(router), "all are over")
    assert load(router) == [0]
    assert all(steps.of(client) == list(Steps.NAMES) for client in (0, 1, 3))


@pytest.mark.interpreted
async def test_what_cannot_even_be_called_off_is_ended_and_stops_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = await bench.router(await bench.replica())
    callers, fronts = await clients(bench, router, 4)
    Steps(router, fronts, monkeypatch).fails = ("send", 2)
    monkeypatch.setattr(router._journey, "left", fail)
    for front in fronts:
        front.data_received(REQUEST)
    assert [(await client.reply()).status for client in callers] == [200, 200, 500, 200]
    await until(lambda: not passages(router), "all are over")
    assert "a request could not be called off" in caplog.text
    assert router._journey._turn._open == 0
    assert router.door is not None
    assert router.door.held_bytes == 0


@pytest.mark.interpreted
async def test_who_leaves_and_cannot_be_called_off_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    (client,), _ = await clients(bench, router, 1)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200  # by an errand, which made the connection to the replica
    replica.script = hang
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(replica.received) == 2, "the replica has the request")
    monkeypatch.setattr(router._journey, "left", fail)
    client.leave()
    await until(lambda: router._journey._turn._open == 0, "it is over")
    assert router.door is not None
    assert router.door.held_bytes == 0


@pytest.mark.interpreted
async def test_a_connection_that_fails_as_its_request_ends_is_broken_and_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = await bench.router(await bench.replica())
    (first, second), fronts = await clients(bench, router, 2)

    monkeypatch.setattr(fronts[0], "_told", fail)
    for front in fronts:
        front.data_received(REQUEST)
    assert (await first.reply()).status == 200
    assert await first.closed() == b""
    for _ in range(2):
        assert (await second.reply()).status == 200
        second.post("/v1/chat/completions", BODY)
    assert "a connection failed inside the router" in caplog.text
    assert load(router) == [0]


@pytest.mark.interpreted
async def test_who_leaves_as_its_answer_is_ended_is_not_called_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered: the replica has nothing left to be called off."""
    router = await bench.router(await bench.replica())
    (client,), (front,) = await clients(bench, router, 1)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200  # by an errand, which made the connection to the replica
    asked = []
    judge = router._journey.judge

    def leave(*about: Any) -> Any:
        assert front._task is not None
        asked.append(front._task.cancel())
        return judge(*about)

    monkeypatch.setattr(router._journey, "judge", leave)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200
    await until(lambda: not passages(router), "it is over")
    assert asked == [False]
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200
