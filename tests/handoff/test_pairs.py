"""A prompt is computed by one fake and answered by another, and the client sees an answer like any other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from fake_backend.server import Server
from router.app import Router
from router.choose.split import Always, Cost
from router.config import HandOff
from router.journey import split_decider
from tests.end_to_end.conftest import Fleet
from tests.handoff.pairs import PROMPT, chat, completion, consumer, nothing_pinned, producer, text, transfers
from tests.wire.scripted import until

pytestmark = pytest.mark.usefixtures("pairs")
NAME = b"x-warmroute-replica"
PREFILL = b"x-warmroute-prefill"
CHAT = "/v1/chat/completions"
SLOW = ("--time-scale", "1")
"""In life's own time a lease of 200 s outlasts every bound here: blocks that are free were let go."""


async def split(fleet: Fleet, prefill: Server, decode: Server, **settings: Any) -> Router:
    router = await fleet.router(prefill=prefill.url, decode=decode.url, **{"split": "always", **settings})
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    return router


def names(*fakes: Server) -> list[str]:
    return [fake.url.removeprefix("http://") for fake in fakes]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), ("/v1/completions", completion)])
async def test_a_split_answer_is_the_whole_ones(fleet: Fleet, path: str, body: Any, stream: bool) -> None:
    prefill, decode, alone = await producer(fleet), await consumer(fleet), await fleet.fake()
    client = await fleet.client(await split(fleet, prefill, decode))
    sent = body(stream=stream)
    client.post(path, sent)
    reply = await client.reply()
    assert [reply.header(PREFILL), reply.header(NAME)] == [name.encode() for name in names(prefill, decode)]
    direct = await fleet.direct(alone)
    direct.post(path, sent)
    assert text(reply) == text(await direct.reply()) != ""
    assert len(transfers(decode).counts.transfers) == 1
    await nothing_pinned(prefill)


async def test_roles_that_fakes_show_are_enough(fleet: Fleet) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet)
    router = await fleet.router(prefill, decode, split="always")
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")
    client = await fleet.client(router)
    client.post(CHAT, chat())
    assert (await client.reply()).header(PREFILL) == names(prefill)[0].encode()


async def test_a_burst_of_split_requests(fleet: Fleet) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet)
    router = await split(fleet, prefill, decode)

    async def one(number: int) -> str:
        client = await fleet.client(router)
        client.post(CHAT, chat(f"{number} {PROMPT}", stream=number % 2 == 0))
        reply = await client.reply()
        assert reply.header(PREFILL) is not None
        return text(reply)

    assert all(await asyncio.gather(*(one(number) for number in range(24))))
    await nothing_pinned(prefill)
    assert transfers(prefill).counts.late_notifications == transfers(prefill).counts.expired == 0
    assert [each.load.in_flight for each in router.fleet] == [0, 0]
    assert router._journey is not None
    assert router._journey.divided.pinned == {}


async def test_usage_tells_what_was_cached_where_the_prompt_was_computed(fleet: Fleet) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet, "--no-enable-prefix-caching")
    client = await fleet.client(await split(fleet, prefill, decode))
    told = []
    for number in (1, 2):
        client.post(CHAT, chat(f"{PROMPT} {number}"))
        reply = await client.reply()
        usage = json.loads(reply.body)["usage"]
        told.append((int(reply.header(b"x-warmroute-predicted-tokens") or 0), usage["prompt_tokens_details"]))
    (_, first), (predicted, second) = told
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == predicted > 300


async def test_both_sides_are_known_to_hold_the_prompt(fleet: Fleet) -> None:
    """By prediction here and by KV events below: the next turn finds its past wherever it goes."""
    prefill, decode = await producer(fleet), await consumer(fleet)
    router = await split(fleet, prefill, decode)
    client = await fleet.client(router)
    client.post(CHAT, chat())
    await client.reply()
    held = [router.index.blocks(name) for name in names(prefill, decode)]
    assert held[0] > 20
    assert held[1] >= held[0]


async def test_events_of_both_sides_feed_the_index(fleet: Fleet) -> None:
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    events = ("--kv-events-config", json.dumps(config))
    prefill, decode = await producer(fleet, *events), await consumer(fleet, *events)
    router = await split(fleet, prefill, decode)
    assert router.feeds is not None
    feeds = router.feeds
    client = await fleet.client(router)
    client.post(CHAT, chat())
    await client.reply()
    for fake, name in zip((prefill, decode), names(prefill, decode), strict=True):
        blocks = fake.replica.ranks[0].engine.pool.cached_keys
        await until(lambda name=name, blocks=blocks: router.index.blocks(name) == blocks > 20, "all of it is known")  # type: ignore[misc]
        await until(lambda name=name: feeds.live(name), "its hashes are proven")  # type: ignore[misc]


async def test_the_measured_link_is_the_deciders(fleet: Fleet) -> None:
    """A prompt of 16 MB and more over a slow link: measured, told in the metrics, and believed by the next decision."""
    prefill = await producer(fleet, *SLOW)
    decode = await consumer(fleet, *SLOW, "--kv-link", "0.1,0")
    router = await split(fleet, prefill, decode, kv_bytes_per_token=114_688, kv_link="45,0.1")
    client = await fleet.client(router)
    client.post(CHAT, chat(stream=True))
    text(await client.reply())
    ((first, second, link),) = router.links.measured()
    assert [first, second] == names(prefill, decode)
    # 460 tokens take half a second; what else there is to a first token makes the link look slower, never faster.
    assert 0.005e9 < link.bandwidth < 0.11e9
    assert not link.fast
    page = router.telemetry.page().decode()
    assert f'warmroute_split_link_bytes_per_second{{decode="{second}",prefill="{first}"}}' in page
    assert f'warmroute_split_prefill_seconds_count{{replica="{first}"}} 1.0' in page
    assert "warmroute_split_fetch_seconds_count 1.0" in page
    assert f'warmroute_split_fetched_bytes_total{{replica="{second}"}}' in page
    assert 'warmroute_split_decisions_total{decision="split"} 1.0' in page


async def test_by_cost_nothing_is_split_over_a_slow_link_and_explain_says_why(fleet: Fleet) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet)
    router = await split(fleet, prefill, decode, split="cost", kv_link="tcp", split_min_tokens=0, admin_port=0)
    client = await fleet.client(router)
    client.post(CHAT, chat())
    assert (await client.reply()).header(PREFILL) is None
    assert router.admin_address is not None
    host, port = router.admin_address
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{host}:{port}/router/explain", data=chat("another " + PROMPT)) as answer,
    ):
        document = await answer.json()
    told = document["split"]
    assert (told["decision"], told["prefill"], told["decode"]) == ("local", None, names(decode)[0])
    assert (told["pair"]["prefill"], told["pair"]["decode"]) == tuple(names(prefill, decode))
    assert told["pair"]["total_ms"] > told["local_ms"]
    assert (told["pair"]["link_bytes_per_second"], told["pair"]["link_is_fast"]) == (2_500_000_000, False)
    assert document["choice"] == names(decode)[0]
    assert "computes and" in document["words"]
    assert "does all of it" in document["words"]


def test_the_guards_of_a_split_are_settings() -> None:
    guards = {"split_min_tokens": 300, "split_min_ratio": 1.5, "split_slow_links": True}
    told = HandOff(split="cost", **guards)
    assert split_decider(told) == Cost(least_uncached=300, least_ratio=1.5, force=True)
    assert split_decider(HandOff(split="always", split_min_tokens=300)) == Always()


async def test_explain_says_who_would_compute_and_who_would_answer(fleet: Fleet) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet)
    router = await split(fleet, prefill, decode, admin_port=0)
    assert router.admin_address is not None
    host, port = router.admin_address
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{host}:{port}/router/explain", data=chat()) as answer,
    ):
        document = await answer.json()
    assert [document["split"][name] for name in ("decision", "prefill", "decode")] == ["split", *names(prefill, decode)]
    assert f"{names(prefill)[0]} computes the prompt, {names(decode)[0]} answers: always split" in document["words"]


class TestLettingGo:
    """Long before a lease ends."""

    async def test_a_client_that_leaves_while_the_kv_is_on_its_way(self, fleet: Fleet) -> None:
        prefill = await producer(fleet, *SLOW)
        decode = await consumer(fleet, *SLOW, "--kv-link", "0.0001,0")
        client = await fleet.client(await split(fleet, prefill, decode))
        client.post(CHAT, chat())
        await until(lambda: transfers(decode).link.next_event() is not None, "it is being read")
        assert len(transfers(prefill).pinned) == 1
        client.leave()
        await nothing_pinned(prefill)

    @pytest.mark.interpreted
    async def test_a_client_that_leaves_before_the_other_one_is_reached(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, decode = await producer(fleet, *SLOW), await consumer(fleet, *SLOW)
        router = await split(fleet, prefill, decode)
        pool, trying = router._pools[names(decode)[0]], asyncio.Event()
        reached = pool.connect

        async def late() -> Any:
            if not trying.is_set():
                trying.set()
                await asyncio.Event().wait()
            return await reached()

        monkeypatch.setattr(pool, "connect", late)
        client = await fleet.client(router)
        client.post(CHAT, chat())
        await asyncio.wait_for(trying.wait(), 60)
        assert len(transfers(prefill).pinned) == 1
        client.leave()
        await nothing_pinned(prefill)
        assert transfers(decode).counts.transfers == []

    async def test_the_one_that_was_to_fetch_is_gone_and_another_says_so(self, fleet: Fleet) -> None:
        prefill = await producer(fleet, *SLOW)
        gone, left = await consumer(fleet, *SLOW), await consumer(fleet, *SLOW)
        router = await fleet.router(
            split="always", prefill=prefill.url, decode=f"{gone.url} {left.url}", probe_seconds=60
        )
        await until(lambda: len(router.fleet.ready()) == 3, "all are ready")
        await gone.listener.close()
        client = await fleet.client(router)
        client.post(CHAT, chat())
        reply = await client.reply()
        assert [reply.header(PREFILL), reply.header(NAME)] == [name.encode() for name in names(prefill, left)]
        await nothing_pinned(prefill)

    async def test_a_request_that_is_turned_away(self, fleet: Fleet) -> None:
        """The first leg drops what the second one refuses; the client is told as if nothing had been split."""
        prefill, decode = await producer(fleet, *SLOW), await consumer(fleet, *SLOW)
        client = await fleet.client(await split(fleet, prefill, decode))
        client.post(CHAT, chat(min_tokens=99))
        reply = await client.reply()
        direct = await fleet.direct(decode)
        direct.post(CHAT, chat(min_tokens=99))
        assert (reply.status, reply.body) == (400, (await direct.reply()).body)
        await nothing_pinned(prefill)
