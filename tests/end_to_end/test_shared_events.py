"""Routers that share a store, before replicas that publish KV events: one tells what these say, and others, who hear
nothing or know it already, go by it; all follow the prompts that any of them has just sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from fake_backend.server import Server as Fake
from router.app import Router
from router.index.shared import LAYOUT
from tests.end_to_end.conftest import Fleet
from tests.end_to_end.test_kv_events import SMALL, Client, caught_up, feed, prompts, publishing, restarted
from tests.end_to_end.test_shared import Child
from tests.index.servers import Server, binaries
from tests.wire.scripted import BOUND, until

BATCHES = "warmroute_kv_event_batches"


@pytest.fixture
async def store() -> AsyncIterator[Server]:
    async with Server(binaries()["valkey-9"]) as server:
        yield server


def name_of(fake: Fake) -> str:
    return fake.url.removeprefix("http://")


async def settled(*routers: Router, hearing: Router, fakes: list[Fake]) -> None:
    """Until all that happened is heard, and told."""

    def told() -> bool:
        shared = hearing.shared
        assert shared is not None
        return caught_up(hearing, *fakes) and not shared.untold_pages

    await until(told, "all is told")
    for router in routers:
        await until(lambda router=router: router.shared.waiting_blocks == 0, "all is told")  # type: ignore[misc]
    link = hearing.shared._link if hearing.shared is not None else None
    assert link is not None
    await link.call(b"PING")  # what was on its way is there


async def exactly_told(store: Server, fakes: list[Fake]) -> None:
    """Until the store has the contents of all of them as a writer tells them."""
    link = await store.link()
    async with asyncio.timeout(BOUND):
        while True:
            marks = await link.call(b"GET", b"{warmroute}:%d:f" % LAYOUT) or b""
            values = [int.from_bytes(marks[at + 10 : at + 16], "big") for at in range(16, len(marks) - 15, 16)]
            if sum(value & 1 for value in values) >= len(fakes):
                break
            await asyncio.sleep(0.01)
    link.close()


async def test_a_router_that_hears_nothing_foretells_every_hit(store: Server, fleet: Fleet) -> None:
    fakes = [await fleet.fake(*SMALL, *publishing()) for _ in range(2)]
    hears = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1)
    deaf = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1, kv_events="false")
    clients = [Client(await fleet.openai(router)) for router in (hears, deaf)]
    await clients[0].ask(list(range(100, 140)))
    for number, fake in enumerate(fakes):  # each has told a first block, which proves its names
        control = await fleet.direct(fake)
        control.post("/v1/completions", b'{"prompt": [%d, 2, 3], "max_tokens": 30}' % number)
        assert (await control.reply()).status == 200
    await settled(hears, deaf, hearing=hears, fakes=fakes)
    await exactly_told(store, fakes)
    hits, wrong = 0, []
    for number, prompt in enumerate(prompts(100, 7)):
        predicted, delivered, _ = await clients[number % 2].ask(prompt)
        if predicted != delivered:
            wrong.append((number, predicted, delivered))
        hits += delivered > 0
        await settled(hears, deaf, hearing=hears, fakes=fakes)
    assert wrong == []
    assert hits > 30
    assert all(feed(hears, fake).counts.removed > 0 for fake in fakes)
    # One that comes later, and cannot hear them either.
    late = await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1, kv_events="false")
    client = Client(await fleet.openai(late))
    for prompt in prompts(100, 7)[60:]:
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered
        await settled(hears, deaf, late, hearing=hears, fakes=fakes)


async def test_a_burst_of_equal_prompts_spreads_over_replicas_with_events(store: Server, fleet: Fleet) -> None:
    fakes = [await fleet.fake("--time-scale", "1", *publishing()) for _ in range(4)]
    fronts = [await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1) for _ in range(2)]
    clients = [await fleet.openai(front) for front in fronts]

    async def one(n: int, prompt: list[int]) -> str:
        raw = await clients[n % 2].completions.with_raw_response.create(
            model="Qwen3-0.6B", prompt=prompt, max_tokens=20
        )
        return str(raw.headers["x-warmroute-replica"])

    prompt = [100 + n % 700 for n in range(4000)]
    counts = Counter(await asyncio.gather(*(one(n, prompt) for n in range(64))))
    assert max(counts.values()) <= 1.25 * 64 / 4


async def test_siblings_at_the_other_router_follow_a_long_prompt(store: Server, fleet: Fleet) -> None:
    fakes = [await fleet.fake("--time-scale", "1", *publishing()) for _ in range(3)]
    fronts = [await fleet.router(*fakes, redis=store.url, redis_timeout_ms=5000, admin_port=-1) for _ in range(2)]
    clients = [Client(await fleet.openai(front)) for front in fronts]
    for number, fake in enumerate(fakes):
        control = await fleet.direct(fake)
        control.post("/v1/completions", b'{"prompt": [%d, 2, 3], "max_tokens": 30}' % number)
        assert (await control.reply()).status == 200
    for front in fronts:
        await settled(*fronts, hearing=front, fakes=fakes)
    await exactly_told(store, fakes)
    assert all(front.index.trusted(name_of(fake)) for front in fronts for fake in fakes)
    prompt = [100 + n * n % 797 for n in range(30_000)]
    first = asyncio.create_task(clients[0].ask(prompt, max_tokens=1))
    shared = fronts[0].shared
    assert shared is not None
    await until(lambda: sum(replica.load.in_flight for replica in fronts[0].fleet) == 1, "it is on its way")
    await until(lambda: shared.waiting_blocks == 0, "the others know")
    assert not first.done()
    others = await asyncio.gather(*(clients[1].ask([*prompt, 7, n, 8], max_tokens=1) for n in range(3)))
    _, _, where = await first
    assert [(predicted, replica) for predicted, _, replica in others] == [(30_000, where)] * 3


@pytest.mark.fault("index outlives the cache")
async def test_a_restart_reaches_the_store_before_any_probe(store: Server, fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    hears = await fleet.router(fake, redis=store.url, redis_timeout_ms=5000, admin_port=-1)
    deaf = await fleet.router(fake, redis=store.url, redis_timeout_ms=5000, admin_port=-1, kv_events="false")
    clients = [Client(await fleet.openai(router)) for router in (hears, deaf)]
    prompt = list(range(100, 300))
    await clients[0].ask(prompt)
    await settled(hears, deaf, hearing=hears, fakes=[fake])
    await exactly_told(store, [fake])
    assert (await clients[1].ask(prompt))[:2] == (192, 192)
    began = hears.fleet[name_of(fake)].metrics.started
    shared = hears.shared
    assert shared is not None
    epoch = shared._seats[name_of(fake)].epoch
    feed(hears, fake).restarted(None)  # as a batch numbered 0 would have it; no probe has told
    hears._published_anew(name_of(fake), None)
    await until(lambda: not shared._undeclared, "it is told")
    assert shared._seats[name_of(fake)].epoch == epoch + 1
    deaf_shared = deaf.shared
    assert deaf_shared is not None
    found = await deaf_shared.consult([(list(range(5)), [name_of(fake)])])
    assert found is not None
    assert found.matches[name_of(fake)][0][0].depth == 0
    await fake.restart()
    for router in (hears, deaf):
        await until(lambda router=router: restarted(router, name_of(fake), began), "it is seen")  # type: ignore[misc]
    for again in range(2):
        predicted, delivered, _ = await clients[1].ask(prompt)
        assert predicted == delivered == again * 192
        await settled(hears, deaf, hearing=hears, fakes=[fake])


async def heard(child: Child, fakes: list[Fake]) -> None:
    """Until a router has seen all that the fakes published, by its own count."""
    published = {
        (name_of(fake), rank.publisher.published) for fake in fakes for rank in fake.replica.ranks if rank.publisher
    }
    async with asyncio.timeout(BOUND):
        while {(each.labels["replica"], int(each.value)) for each in await child.samples(BATCHES)} != published:
            await asyncio.sleep(0.005)


@pytest.mark.fault("forgetful restart")
async def test_a_router_that_takes_over_knows_all_at_once(store: Server, fleet: Fleet) -> None:
    """Killed under load: its successor's first decisions are as good as the last ones, though the store takes what the
    dead one told for true and nobody tells it of what has gone since."""
    fakes = [await fleet.fake(*SMALL, *publishing()) for _ in range(2)]
    flags = [*(fake.url for fake in fakes), "--redis", store.url, "--redis-timeout-ms", "5000"]
    flags += ["--redis-lease-seconds", "600"]
    asked = iter(prompts(400, 9))

    async def ask(child: Child, client: Client) -> tuple[int, int, str]:
        await heard(child, fakes)
        return await client.ask(next(asked))

    async with Child(*flags) as child:
        client = Client(await child.client())
        before = [await ask(child, client) for _ in range(100)]
        under_load = [asyncio.create_task(client.ask(next(asked))) for _ in range(20)]
        await asyncio.wait(under_load, return_when=asyncio.FIRST_COMPLETED)
        await child.kill()
        await asyncio.gather(*under_load, return_exceptions=True)
    async with Child(*flags) as child:
        client = Client(await child.client())
        after = [await ask(child, client) for _ in range(100)]
    assert all(predicted == delivered for predicted, delivered, _ in before)
    # Both replicas are used as before, and nothing is foretold that is not there; but a prompt that was cut off counts
    # as there for some seconds.
    assert {replica for _, _, replica in after} == {name_of(fake) for fake in fakes}
    assert sum(predicted <= delivered for predicted, delivered, _ in after) >= 95
    assert sum(delivered > 0 for _, delivered, _ in after) >= 0.9 * sum(delivered > 0 for _, delivered, _ in before)


@pytest.mark.fault("ranks in one")
async def test_ranks_are_told_apart_by_who_hears_nothing_too(store: Server, fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing(), "--data-parallel-size", "2")
    hears = await fleet.router(fake, redis=store.url, redis_timeout_ms=5000, admin_port=-1)
    client = Client(await fleet.openai(hears))
    stems = [[100 + 7 * stem + i for i in range(200)] for stem in range(4)]
    for stem in stems:
        await client.ask(stem)
        await settled(hears, hearing=hears, fakes=[fake])
    await exactly_told(store, [fake, fake])
    deaf = await fleet.router(fake, redis=store.url, redis_timeout_ms=5000, admin_port=-1, kv_events="false")
    client = Client(await fleet.openai(deaf))
    for stem in stems * 2:
        predicted, delivered, _ = await client.ask(stem)
        assert predicted == delivered == 192
        await settled(hears, deaf, hearing=hears, fakes=[fake])
    # New ones go to the rank that was given less.
    for stem in ([500 + 11 * new + i for i in range(100)] for new in range(2)):
        for again in range(2):
            predicted, delivered, _ = await client.ask(stem)
            assert predicted == delivered == again * 96
            await settled(hears, deaf, hearing=hears, fakes=[fake])
