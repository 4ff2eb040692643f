"""A request that is served without a coroutine: what becomes of it on every way out."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from router.app import Router
from router.course import Course
from router.passage import Passage
from router.wire.attempts import Attempt
from tests.wire.conftest import Bench
from tests.wire.scripted import BODY, hang, until, within


def load(router: Router) -> list[int]:
    return [replica.load.in_flight for replica in router.fleet]


def passages(router: Router) -> list[Any]:
    assert router.door is not None
    return [front._task for front in router.door.connections if front._task is not None]


async def test_the_first_request_waits_for_a_connection_and_the_next_ones_for_nothing(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    for _ in range(3):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 200
    assert len(replica.received) == 3
    assert len(router._pools[replica.name].open) == 1


async def test_nothing_of_an_answered_request_is_left(bench: Bench) -> None:
    """Neither to the garbage collector, nor until some alarm rings."""
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            client.post("/v1/chat/completions", BODY)
            assert (await client.reply()).status == 200
        await until(lambda: not passages(router), "the request is over")
        assert not [each for each in gc.get_objects() if isinstance(each, Passage | Course | Attempt)]
    finally:
        gc.enable()


async def test_who_leaves_while_a_kept_connection_is_at_work_is_followed(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200
    replica.script = hang
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(replica.received) == 2, "the replica has the request")
    assert load(router) == [1]
    client.leave()
    await within(replica.received[1].aborted.wait())
    await until(lambda: load(router) == [0], "nothing is in flight")


@pytest.mark.interpreted
@pytest.mark.parametrize("step", ["_depart", "judge", "finish"])
async def test_a_failure_inside_the_router_is_told_and_books_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 200

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(router._journey, step, fail)
    client.post("/v1/chat/completions", BODY)
    # Before the answer there is one of the router's own; what fails over a whole one is for the log alone.
    assert (await client.reply()).status == (500 if step == "_depart" else 200)
    await until(lambda: not passages(router), "the request is over")
    assert load(router) == [0]


@pytest.mark.interpreted
async def test_a_failure_as_an_errand_sets_out_books_nothing_either(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await bench.router(await bench.replica())
    client = await bench.client(router)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(router._journey, "look", lambda _: False)
    monkeypatch.setattr(router._journey, "_attempt", fail)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 500
    await until(lambda: not passages(router), "the request is over")
    assert calls
    assert load(router) == [0]
