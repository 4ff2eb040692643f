"""Replicas that a reload brings or takes away: their events, their blocks, and what is shared of them."""

from __future__ import annotations

from typing import Any

from fake_backend.server import Server
from router.app import Router
from tests.end_to_end.conftest import Fleet
from tests.end_to_end.test_kv_events import Client, caught_up, publishing
from tests.wire.conftest import settings_for
from tests.wire.scripted import until


def name(fake: Server) -> str:
    return fake.url.removeprefix("http://")


async def become(router: Router, *fakes: Server, **changes: Any) -> None:
    await router.reload(settings_for([fake.url for fake in fakes], **changes))


async def test_events_are_heard_of_those_who_come_and_no_more_of_those_who_leave(fleet: Fleet) -> None:
    old, new = [await fleet.fake(*publishing()) for _ in range(2)]
    router = await fleet.router(old)
    client = Client(await fleet.openai(router))
    prompt = list(range(100, 400))
    await client.ask(prompt)
    await until(lambda: caught_up(router, old), "events are heard")
    assert router.index.blocks(name(old)) > 0

    await become(router, old, new)
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    assert router.feeds is not None
    assert sorted(router.feeds._heard) == sorted([name(old), name(new)])
    predicted, delivered, where = await client.ask(prompt)
    assert (predicted, delivered, where) == (288, 288, name(old))

    await become(router, new)
    assert list(router.feeds._heard) == [name(new)]
    assert router.index.blocks(name(old)) == 0
    assert name(old).encode() not in router.telemetry.page()
    predicted, delivered, where = await client.ask(prompt)
    assert (predicted, delivered, where) == (0, 0, name(new))
    await until(lambda: caught_up(router, new), "events are heard")
    assert (await client.ask(prompt))[:2] == (288, 288)

    # Who comes back holds nothing that is believed until it is heard.
    await become(router, new, old)
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    await until(lambda: caught_up(router, old), "its replay has told what it holds")
    assert router.index.known(name(old))[0].trusted


async def test_the_store_is_told_of_those_who_come_and_asked_no_more_of_those_who_leave(fleet: Fleet) -> None:
    one, two = [await fleet.fake() for _ in range(2)]
    router = await fleet.router(one, redis="embedded")
    client = Client(await fleet.openai(router))
    shared = router.shared
    assert shared is not None
    await until(lambda: shared.online, "the store is used")
    await become(router, one, two, redis="embedded")
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    await until(lambda: set(shared._seats) == {name(one), name(two)}, "both have a place in the store")
    await become(router, two, redis="embedded")
    assert set(shared._seats) == {name(two)}
    prompt = list(range(100, 400))
    assert (await client.ask(prompt))[2] == name(two)
    await until(lambda: shared.waiting_blocks == 0, "the store is told of it")
    assert (await client.ask(prompt))[:2] == (288, 288)
    assert shared.online
    assert shared.faults == 0
