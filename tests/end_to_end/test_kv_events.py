"""The router before fakes that publish KV events over real sockets, as vLLM does."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from functools import partial
from typing import Any

import pytest

from fake_backend.server import Server
from router.app import Router
from router.index.feed import Feed, State
from router.index.naming import Mode
from tests.end_to_end.conftest import Fleet
from tests.wire.scripted import until

SMALL = ("--block-size", "16", "--num-gpu-blocks-override", "65", "--max-model-len", "1024")


def publishing(**more: object) -> tuple[str, str]:
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    return "--kv-events-config", json.dumps(config | more)


def feed(router: Router, fake: Server, rank: int = 0) -> Feed:
    assert router.feeds is not None
    return router.feeds._heard[fake.url.removeprefix("http://")][rank].feed


def caught_up(router: Router, *fakes: Server) -> bool:
    """Whether the router has seen all that the fakes published."""
    return all(
        rank.publisher is not None
        and feed(router, fake, rank.number)._sequence.next == rank.publisher.published
        and not feed(router, fake, rank.number).wanted
        for fake in fakes
        for rank in fake.replica.ranks
    )


def restarted(router: Router, name: str, began: float | None) -> bool:
    """Whether another process than that of `began` is known to be there, and takes requests."""
    return router.fleet[name].metrics.started != began and bool(router.fleet.ready())


class Client:
    """Completions of token ids: what was predicted, and what was delivered."""

    def __init__(self, openai: Any) -> None:
        self._openai = openai

    async def ask(self, prompt: list[int], **options: Any) -> tuple[int, int, str]:
        raw = await self._openai.completions.with_raw_response.create(
            model="Qwen3-0.6B", prompt=prompt, max_tokens=options.pop("max_tokens", 4), **options
        )
        details = raw.parse().usage.prompt_tokens_details
        delivered = (details.cached_tokens or 0) if details else 0
        return int(raw.headers["x-warmroute-predicted-tokens"]), delivered, raw.headers["x-warmroute-replica"]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts over a few shared beginnings, far more than a pool of 64 blocks holds."""
    draw = random.Random(seed)
    stems = [[draw.randrange(100, 900) for _ in range(160)] for _ in range(6)]
    return [
        draw.choice(stems)[: 16 * draw.randint(1, 10)]
        + [draw.randrange(100, 900) for _ in range(draw.randint(10, 300))]
        for _ in range(count)
    ]


async def test_every_hit_is_foretold_though_the_pool_is_far_too_small(fleet: Fleet) -> None:
    fakes = [await fleet.fake(*SMALL, *publishing()) for _ in range(2)]
    router = await fleet.router(*fakes)
    client = Client(await fleet.openai(router))
    hits = 0
    for prompt in prompts(150, 1):
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered
        hits += delivered > 0
        await until(lambda: caught_up(router, *fakes), "all events are here")
    assert hits > 50
    assert all(feed(router, fake).state is State.LIVE and feed(router, fake).counts.removed > 0 for fake in fakes)
    assert "KV events: live; block hashes proven: sha256, the default seed" in router.announcement()


@pytest.mark.parametrize("version", ["0.23.0", "0.30.0", "0.32.0"])
@pytest.mark.parametrize("whole", ["0", "1"])
async def test_every_encoding(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, version: str, whole: str) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", whole)
    fake = await fleet.fake(*SMALL, *publishing(), "--vllm-version", version)
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    for again in range(2):
        predicted, delivered, _ = await client.ask(list(range(100, 200)), extra_body={"cache_salt": "tenant"})
        assert predicted == delivered == again * 96
        await until(lambda: caught_up(router, fake), "all events are here")
    assert feed(router, fake).counts.malformed == 0


@pytest.mark.fault("missed events")
@pytest.mark.parametrize("kind", ["events_lost", "events_repeated", "events_reordered"])
async def test_what_the_network_does_to_batches_is_undone(fleet: Fleet, kind: str) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    draw = random.Random(3)
    control = await fleet.direct(fake)
    wrong = asked = 0
    for number, prompt in enumerate(prompts(30, 2)):
        if draw.random() < 0.2:
            rule = {"kind": kind, "times": 1}
            control.post("/fake/faults", json.dumps(rule).encode())
            assert (await control.reply()).status == 200
        predicted, delivered, _ = await client.ask(prompt)
        if number:
            asked += 1
            wrong += predicted != delivered
        # A reordered batch waits for the next one; a check finds it sooner.
        await until(lambda: caught_up(router, fake), "all events are here")
    counts = feed(router, fake).counts
    assert wrong == 0
    assert (counts.gaps if kind != "events_repeated" else counts.repeated) > 0 or counts.replays > 1
    assert counts.lost == 0
    assert feed(router, fake).state is State.LIVE


async def test_history_that_no_replay_brings_back_is_predicted(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing(replay_endpoint=None))
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    first, second = list(range(100, 200)), list(range(300, 400))
    await client.ask(first)
    await until(lambda: feed(router, fake).counts.batches > 0, "heard")
    publisher = fake.replica.ranks[0].publisher
    assert publisher is not None
    publisher.publish(b"lost", "events_lost")
    await client.ask(second)
    await until(lambda: feed(router, fake).state is State.LOST, "a gap is seen")
    # What was known is presumed; what is sent from now on, too.
    for prompt in (first, second):
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered == 96


@pytest.mark.fault("index outlives the cache")
async def test_a_restart_leaves_nothing_of_what_was_there(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    prompt = list(range(100, 300))
    for again in range(2):
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered == again * 192
        await until(lambda: caught_up(router, fake), "all events are here")
    epoch = router.fleet[fake.url.removeprefix("http://")].epoch
    await fake.restart()
    await until(lambda: router.fleet[fake.url.removeprefix("http://")].epoch > epoch, "the restart is seen")
    for again in range(2):
        await until(lambda: bool(router.fleet.ready()), "it is ready again")
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered == again * 192


async def test_a_late_router_learns_what_was_published(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    early = await fleet.router(fake)
    prompt = list(range(100, 300))
    await Client(await fleet.openai(early)).ask(prompt)
    late = await fleet.router(fake)
    assert feed(late, fake).state is State.LIVE
    predicted, delivered, _ = await Client(await fleet.openai(late)).ask(prompt)
    assert predicted == delivered == 192


async def test_a_late_router_predicts_what_it_cannot_learn(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing(buffer_steps=1))
    early = await fleet.router(fake)
    client = Client(await fleet.openai(early))
    for start in (100, 300, 500):
        await client.ask(list(range(start, start + 200)))
    late = await fleet.router(fake)
    assert feed(late, fake).state is State.LOST
    client = Client(await fleet.openai(late))
    prompt = list(range(300, 500))
    assert (await client.ask(prompt))[:2] == (0, 192)
    assert (await client.ask(prompt))[:2] == (192, 192)


@pytest.mark.fault("blind routing")
async def test_an_unknown_seed_is_translated(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "a secret")
    fakes = [await fleet.fake(*SMALL, *publishing()) for _ in range(2)]
    monkeypatch.delenv("PYTHONHASHSEED")
    router = await fleet.router(*fakes)
    client = Client(await fleet.openai(router))
    hits = 0
    for prompt in prompts(100, 4):
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered
        hits += delivered > 0
        await until(lambda: caught_up(router, *fakes), "all events are here")
    assert hits > 30
    for fake in fakes:
        naming = feed(router, fake).naming
        assert naming.mode is Mode.TRANSLATED
        assert naming.translated == len(feed(router, fake).known) <= 64
    assert "translated through token ids" in router.announcement()


async def test_a_seed_other_than_the_configured_one_is_proven(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing(), "--prefix-caching-hash-algo", "sha256_cbor")
    router = await fleet.router(fake, hash_seed="wrong")
    client = Client(await fleet.openai(router))
    prompt = list(range(100, 300))
    for again in range(2):
        predicted, delivered, _ = await client.ask(prompt)
        assert predicted == delivered == again * 192
        await until(lambda: caught_up(router, fake), "all events are here")
    assert feed(router, fake).naming.hashing.seed is None


async def test_one_replica_with_events_and_one_without(fleet: Fleet) -> None:
    told, silent = await fleet.fake(*SMALL, *publishing()), await fleet.fake(*SMALL)
    router = await fleet.router(told, silent)
    client = Client(await fleet.openai(router))
    names = [fake.url.removeprefix("http://") for fake in (told, silent)]
    exact: dict[str, list[bool]] = {name: [] for name in names}
    for prompt in prompts(60, 5):
        predicted, delivered, replica = await client.ask(prompt)
        exact[replica].append(predicted == delivered)
        await until(lambda: caught_up(router, told), "all events are here")
    assert min(len(each) for each in exact.values()) > 10
    assert all(exact[names[0]])
    assert sum(exact[names[1]]) >= 0.9 * len(exact[names[1]])
    assert [bool(router.index.known(name)) for name in names] == [True, False]
    assert "cache contents: predicted" in router.announcement()


@pytest.mark.fault("ranks in one")
async def test_ranks_are_separate_caches_and_requests_name_them(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing(), "--data-parallel-size", "2")
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    stems = [[100 + 7 * stem + i for i in range(200)] for stem in range(4)]
    for again in range(3):
        for stem in stems:
            predicted, delivered, _ = await client.ask(stem)
            assert predicted == delivered == bool(again) * 192
            await until(lambda: caught_up(router, fake), "all events are here")
    known = router.index.known(fake.url.removeprefix("http://"))
    assert {rank: len(cache) for rank, cache in known.items()} == {0: 24, 1: 24}
    # A client that names a rank gets it.
    predicted, delivered, _ = await client.ask(stems[0], extra_headers={"X-data-parallel-rank": "1"})
    predicted_too, delivered_too, _ = await client.ask(stems[1], extra_headers={"X-data-parallel-rank": "1"})
    assert predicted == delivered
    assert predicted_too == delivered_too
    assert {predicted, predicted_too} == {0, 192}


async def test_a_cleared_cache(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    fake = await fleet.fake(*SMALL, *publishing())
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    prompt = list(range(100, 300))
    await client.ask(prompt)
    control = await fleet.direct(fake)
    control.post("/reset_prefix_cache", b"")
    assert (await control.reply()).status == 200
    await client.ask(list(range(400, 440)))  # vLLM tells of it with the next step
    await until(lambda: feed(router, fake).counts.cleared == 1, "it was told")
    assert (await client.ask(prompt))[:2] == (0, 0)


async def test_metrics_tell_of_sources(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    router = await fleet.router(fake)
    await Client(await fleet.openai(router)).ask(list(range(100, 300)))
    await until(lambda: caught_up(router, fake), "all events are here")
    page = router.telemetry.page().decode()
    where = f'rank="0",replica="{fake.url.removeprefix("http://")}"'
    assert f'warmroute_kv_events_total{{{where},type="stored"}} 12.0' in page
    assert f'warmroute_kv_event_source{{{where},state="live"}} 1.0' in page
    assert f"warmroute_kv_event_lag_seconds{{{where}}}" in page
    assert f"warmroute_kv_event_gaps_total{{{where}}} 0.0" in page


async def test_an_engine_that_connects_to_the_router(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fake = await fleet.fake(*SMALL, *publishing(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None))
    name = fake.url.removeprefix("http://")
    router = await fleet.router(fake, event_sources=f"{name}=tcp://*:{port}")
    await until(lambda: router.feeds is not None and router.feeds._heard[name][0].subscription.connected, "connected")
    client = Client(await fleet.openai(router))
    for again in range(2):
        predicted, delivered, _ = await client.ask(list(range(100, 300)))
        assert predicted == delivered == again * 192
        await until(lambda: caught_up(router, fake), "all events are here")
    assert feed(router, fake).state is State.LIVE


async def test_an_endpoint_that_nobody_listens_at_says_what_to_check(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.feeds.SETTLE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Without a `*` the engine connects to its endpoint instead of listening there.
    fake = await fleet.fake(*SMALL, *publishing(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None))
    router = await fleet.router(fake)
    assert f'"endpoint": "tcp://*:{port}", with the `*`' in router.announcement()
    client = Client(await fleet.openai(router))
    for again in range(2):  # predicted all the same
        predicted, delivered, _ = await client.ask(list(range(100, 300)))
        assert predicted == delivered == again * 192


@pytest.mark.fault("blind routing")
async def test_a_publisher_that_says_nothing_is_told_and_replaced_by_predictions(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.index.feed.SILENT_SECONDS", 2.0)
    fake = await fleet.fake(*SMALL, *publishing(replay_endpoint=None))
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    await client.ask(list(range(100, 200)))
    await until(lambda: feed(router, fake).state is State.LIVE, "it is heard")
    control = await fleet.direct(fake)
    control.post("/fake/faults", json.dumps({"kind": "events_lost"}).encode())
    assert (await control.reply()).status == 200
    await client.ask(list(range(300, 500)))
    await until(lambda: feed(router, fake).state is State.SILENT, "it is missed")
    for again in range(2):
        predicted, delivered, _ = await client.ask(list(range(500, 700)))
        assert predicted == delivered == again * 192
    told = [record for record in caplog.records if "requests end, but nothing is published" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    where = f'rank="0",replica="{fake.url.removeprefix("http://")}",state="silent"'
    assert f"warmroute_kv_event_source{{{where}}} 1.0" in router.telemetry.page().decode()


async def test_events_can_be_left_alone(fleet: Fleet) -> None:
    fake = await fleet.fake(*SMALL, *publishing())
    router = await fleet.router(fake, kv_events="false")
    assert router.index.known(fake.url.removeprefix("http://")) == {}
    client = Client(await fleet.openai(router))
    for again in range(2):
        predicted, delivered, _ = await client.ask(list(range(100, 300)))
        assert predicted == delivered == again * 192


async def test_siblings_follow_before_the_engine_has_told(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.fake(*SMALL, *publishing()))
    client = Client(await fleet.openai(router))
    prompt = list(range(100, 900))
    answers = await asyncio.gather(*(client.ask(prompt) for _ in range(3)))
    assert sorted(predicted for predicted, _, _ in answers) == [0, 784, 784]
    assert sorted(delivered for _, delivered, _ in answers) == [0, 784, 784]


async def test_a_restart_between_two_requests_is_never_taken_for_a_full_cache(fleet: Fleet) -> None:
    """At fixed ports, where the new process speaks in the old one's place."""
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [each.getsockname()[1] for each in (one, other)]
    endpoints = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    fake = await fleet.fake(*SMALL, *publishing(**endpoints))
    router = await fleet.router(fake)
    client = Client(await fleet.openai(router))
    name = fake.url.removeprefix("http://")
    mine = prompts(12, 6)
    for life in range(3):
        for prompt in mine:
            predicted, delivered, _ = await client.ask(prompt)
            assert predicted == delivered
            await until(lambda: caught_up(router, fake), "all events are here")
        assert feed(router, fake).state is State.LIVE
        # A long life and short ones: the next process's numbers begin below the last one's, or pass them.
        began = router.fleet[name].metrics.started
        await fake.restart()
        if life == 1:
            direct = await fleet.direct(fake)
            for prompt in mine[::-1] * 2:  # behind the router's back, so that it is further on when it is met
                direct.post("/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 1}).encode())
                assert (await direct.reply()).status == 200
        await until(partial(restarted, router, name, began), "the restart is seen")
        await until(lambda: caught_up(router, fake), "all events are here")
        if life != 1:
            assert len(feed(router, fake).known) == 0


async def test_a_replica_that_does_not_tell_its_sources_is_asked_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.feeds.ASK_AGAIN_SECONDS", 0.05)
    fake = await fleet.fake(*SMALL, *publishing())
    control = await fleet.direct(fake)
    control.post("/fake/faults", json.dumps({"kind": "cut", "path": "/kv_event_sources", "times": 2}).encode())
    assert (await control.reply()).status == 200
    router = await fleet.router(fake)
    name = fake.url.removeprefix("http://")
    assert router.index.known(name) == {}
    await until(lambda: bool(router.index.known(name)), "it told")
    await until(lambda: caught_up(router, fake), "it is heard")
    client = Client(await fleet.openai(router))
    assert (await client.ask(list(range(100, 300))))[:2] == (0, 0)
    await until(lambda: feed(router, fake).state is State.LIVE, "its names are proven")
