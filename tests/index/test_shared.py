"""Routers that share a store, on real servers, through everything that can happen to one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.index.shared import LAYOUT, Busy, Member, Options, Shared
from router.index.shared_codec import Others, Told
from router.index.shared_known import ToldKnown
from router.index.shared_link import Target, tls_context
from tests.index.servers import Cluster, Server, binaries
from tests.index.test_shared_scripts import chain

VALKEY = binaries()["valkey-9"]
TLS = Path(__file__).parent.parent / "data" / "tls"
DOCS = Path(__file__).parent.parent.parent / "docs" / "redis.md"
PATIENT_MS = 5000.0


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came true: {what}") from None


class Router:
    """One router's share, over replicas that the test describes."""

    def __init__(self, target: Target, **options: Any) -> None:
        self.members = {name: Member(name, "100.5", 10_000) for name in ("a", "b", "c")}
        self.busy: list[Busy] = []
        chosen = {"timeout_ms": PATIENT_MS, "retry_seconds": 0.05, "lease_seconds": 1.0} | options
        self.shared = Shared(Options([target], **chosen), members=self.members.values, loads=lambda now: self.busy)

    def hear(self, *names: str) -> dict[str, ToldKnown]:
        """Its events are heard, all of them."""
        heard = {name: ToldKnown(10_000, 10_000) for name in names}
        for name, known in heard.items():
            known.trust()
            self.shared.hear(name, known)
        return heard

    def record(self, name: str, keys: Sequence[int]) -> None:
        self.shared.record(name, keys, ended=False, prompt_end=len(keys) - 1)

    async def depths(self, keys: Sequence[int]) -> list[int] | None:
        found = await self.shared.consult([(keys, list(self.members))])
        return None if found is None else [found.matches[name][0][0].depth for name in self.members]

    async def until_depths(self, keys: Sequence[int], expected: list[int]) -> None:
        try:
            async with asyncio.timeout(60):
                while await self.depths(keys) != expected:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"never {expected}, but {await self.depths(keys)}") from None

    async def told_of(self, keys: Sequence[int], name: str) -> Told:
        found = await self.shared.consult([(keys, [name])])
        return Told(-1) if found is None else found.matches[name][0][0]

    async def until_told(self, keys: Sequence[int], name: str, expected: Told) -> None:
        try:
            async with asyncio.timeout(60):
                while await self.told_of(keys, name) != expected:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"never {expected}, but {await self.told_of(keys, name)}") from None

    async def told(self) -> None:
        await until(lambda: self.shared.online and self.shared.waiting_blocks == 0, "all is told")

    async def die(self) -> None:
        """As kill -9 does: nothing is said any more."""
        for task in self.shared._tasks:
            task.cancel()
        await asyncio.gather(*self.shared._tasks, return_exceptions=True)
        if self.shared._link is not None:
            self.shared._link.lost = None
            self.shared._link.close()

    def restart(self, name: str, start: str) -> None:
        self.members[name] = self.members[name]._replace(start=start)
        self.shared.restarted(name)


class House:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack

    async def server(self, *flags: str, binary: str = VALKEY, port: int = 0) -> Server:
        return await self.stack.enter_async_context(Server(binary, *flags, port=port))

    async def router(self, target: Target, **options: Any) -> Router:
        router = Router(target, **options)
        await router.shared.start()
        self.stack.push_async_callback(router.shared.stop)
        return router


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "warmroute.shared"]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.shared")


@pytest.mark.parametrize("kind", sorted(binaries()))
async def test_what_one_router_learns_the_other_knows(house: House, kind: str) -> None:
    server = await house.server(binary=binaries()[kind])
    one, two = await house.router(server.target), await house.router(server.target)
    prompt = chain(1, 3000)
    one.record("a", prompt)
    one.shared.record("b", prompt[:100], ended=True, prompt_end=49)
    await one.told()
    found = await two.shared.consult([(prompt, ["a", "b", "c"]), (prompt[:60], ["b"])])
    assert found is not None
    assert found.matches == {
        "a": [[Told(3000)]],
        "b": [[Told(100, continues=True)], [Told(60, continues=True)]],
        "c": [[Told(0)]],
    }
    one.shared.forget("a", prompt[700:])
    await one.told()
    assert await two.depths(prompt) == [700, 100, 0]


async def test_who_is_named_twice_is_asked_for_once(house: House) -> None:
    router = await house.router((await house.server()).target)
    prompt, other = chain(1, 40), chain(2, 40)
    router.record("a", prompt)
    await router.told()
    found = await router.shared.consult([(prompt, ["a", "b", "a"]), (other, ["a"])])
    assert found is not None
    assert found.matches == {"a": [[Told(40)], [Told(0)]], "b": [[Told(0)]]}


async def test_long_chains_that_go_on_from_others_are_told_whole(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    prompt = chain(1, 700)
    answered, other = prompt + chain(2, 90), prompt[:650] + chain(3, 100)
    one.record("a", prompt)
    one.shared.record("a", answered, ended=True, prompt_end=699)
    one.record("b", other)
    one.record("c", prompt[:600])
    await one.told()
    assert await two.depths(answered + chain(4, 9)) == [790, 650, 600]
    assert await two.depths(other) == [650, 750, 600]
    assert await two.depths(prompt) == await one.depths(list(prompt)) == [700, 650, 600]


async def test_a_router_that_takes_over_finds_everything(house: House) -> None:
    server = await house.server()
    first = await house.router(server.target)
    prompts = [chain(n, 50 + n) for n in range(100)]
    for n, prompt in enumerate(prompts):
        first.record("abc"[n % 3], prompt)
    await first.told()
    await first.die()
    second = await house.router(server.target)
    for n, prompt in enumerate(prompts):
        assert await second.depths(prompt) == [len(prompt) if n % 3 == i else 0 for i in range(3)]


async def test_the_load_of_others_is_seen_and_a_dead_routers_expires(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    one.busy = [Busy("b", Others(4, 3, 250.0, 1000.0), 0.0)]
    one.shared.load_changed()
    await until(lambda: two.shared.others == {"b": Others(4, 3, 250.0, 1000.0)}, "the load is seen")
    found = await two.shared.consult([])
    assert found is not None
    assert found.loads == {"b": Others(4, 3, 250.0, 1000.0)}
    await one.die()
    await until(lambda: two.shared.others == {}, "the lease is over")


async def test_no_block_is_seen_before_the_work_that_brings_it(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    for n in range(1, 101):
        keys = chain(n, 40)
        one.busy = [Busy("a", Others(n, 0, 0.0, 0.0), 0.0)]
        one.record("a", keys)  # as in a decision: booked and recorded in one breath
        one.shared.load_changed()
        found = await two.shared.consult([(keys, ["a"])])
        while found is not None and found.matches["a"][0][0].depth == 0:
            found = await two.shared.consult([(keys, ["a"])])
        assert found is not None
        assert found.loads["a"].in_flight == n


def store(known: ToldKnown, keys: Sequence[int], first: int = 0) -> None:
    known.stored(keys[first:], keys[first - 1] if first else None, medium="GPU", group=0, scale=1)


def remove(known: ToldKnown, keys: Sequence[int]) -> None:
    known.removed(keys, medium="GPU", group=0)


async def test_each_replica_has_one_writer_and_another_takes_over(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    deaf = await house.router(server.target)
    heard = one.hear("a", "b", "c")
    await until(lambda: all(map(one.shared.is_writer, "abc")), "one writes")
    also = two.hear("a", "b", "c")
    prompt = chain(1, 3000)
    for known in (heard["a"], also["a"]):
        store(known, prompt)
    await deaf.until_told(prompt, "a", Told(3000, exact=True))
    await until(lambda: two.shared._claimed == {"a", "b", "c"}, "two asked")
    assert not any(map(two.shared.is_writer, "abc"))
    await one.die()
    remove(also["a"], prompt[:1999:-1])  # what nobody told yet
    await until(lambda: all(map(two.shared.is_writer, "abc")), "two writes")
    assert not any(map(one.shared.is_writer, "abc"))
    await deaf.until_told(prompt, "a", Told(2000, exact=True))


async def test_who_hears_no_more_gives_up_and_who_does_takes_over(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target, lease_seconds=600.0)
    deaf = await house.router(server.target)
    mine, yours = one.hear("a")["a"], two.hear("a")["a"]
    prompt = chain(1, 100)
    store(mine, prompt)
    store(yours, prompt)
    await deaf.until_told(prompt, "a", Told(100, exact=True))
    first, second = (one, two) if one.shared.is_writer("a") else (two, one)
    lost = mine if first is one else yours
    lost.presume()  # a gap, or silence
    await until(lambda: not first.shared.is_writer("a"), "it gives up")
    second.shared._to_publish.set()
    await until(lambda: second.shared.is_writer("a") or second.shared._claimed == {"a"}, "the other is there")
    lost.trust()
    await until(lambda: first.shared.is_writer("a") or second.shared.is_writer("a"), "one of them writes")
    await deaf.until_told(prompt, "a", Told(100, exact=True))


async def test_a_router_that_hears_nothing_knows_what_is_there(house: House) -> None:
    """And one that begins later, and after the cache was cleared, and when the store has lost everything."""
    server = await house.server()
    one, deaf = await house.router(server.target), await house.router(server.target)
    known = one.hear("a")["a"]
    prompt, other = chain(1, 500), chain(2, 70)
    store(known, prompt)
    deaf.record("a", other)  # it was wrong about this one
    await deaf.until_told(prompt, "a", Told(500, exact=True))
    await deaf.until_told(other, "a", Told(0, exact=True))
    remove(known, prompt[:299:-1])
    await deaf.until_told(prompt, "a", Told(300, exact=True))
    late = await house.router(server.target)
    assert await late.told_of(prompt, "a") == Told(300, exact=True)
    known.cleared()
    await late.until_told(prompt, "a", Told(0, exact=True))
    store(known, other)
    await late.until_told(other, "a", Told(70, exact=True))
    link = await server.link()
    await link.call(b"FLUSHALL")
    link.close()
    await late.until_told(other, "a", Told(70, exact=True))
    await deaf.until_told(other, "a", Told(70, exact=True))


async def test_a_full_store_is_told_the_contents_when_it_takes_writes_again(house: House) -> None:
    server = await house.server("--maxmemory-policy", "noeviction")
    one, deaf = await house.router(server.target), await house.router(server.target)
    known = one.hear("a")["a"]
    prompt, other = chain(1, 200), chain(2, 100)
    store(known, prompt)
    await deaf.until_told(prompt, "a", Told(200, exact=True))
    link = await server.link()
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    remove(known, prompt[:119:-1])
    store(known, other)
    # Without a lease, which cannot be renewed either, what was told is presumed.
    async with asyncio.timeout(60):
        while (await deaf.told_of(prompt, "a")).exact:
            await asyncio.sleep(0.005)
    assert (await deaf.told_of(prompt, "a")).depth in (120, 200)
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"0")
    await deaf.until_told(prompt, "a", Told(120, exact=True))
    await deaf.until_told(other, "a", Told(100, exact=True))
    link.close()


async def test_a_store_that_hung_is_told_what_happened_meanwhile(house: House) -> None:
    server = await house.server()
    one = await house.router(server.target, timeout_ms=25.0)
    deaf = await house.router(server.target, timeout_ms=25.0)
    known = one.hear("a")["a"]
    prompt = chain(1, 200)
    store(known, prompt)
    await until(lambda: one.shared.is_writer("a") and not one.shared.untold_pages, "it is told")
    server.signal(signal.SIGSTOP)
    await one.depths(prompt)
    await deaf.depths(prompt)
    remove(known, prompt[:119:-1])
    store(known, chain(2, 100))
    server.signal(signal.SIGCONT)
    await deaf.until_told(prompt, "a", Told(120, exact=True))
    await deaf.until_told(chain(2, 100), "a", Told(100, exact=True))


async def test_a_restart_seen_in_the_events_reaches_the_store_at_once(house: House) -> None:
    server = await house.server()
    one, two, deaf = [await house.router(server.target) for _ in range(3)]
    for router in (one, two):
        router.members["a"] = router.members["a"]._replace(heard="101.0")
    mine, yours = one.hear("a")["a"], two.hear("a")["a"]
    prompt = chain(1, 100)
    store(mine, prompt)
    store(yours, prompt)
    await deaf.until_told(prompt, "a", Told(100, exact=True))
    await until(lambda: one.shared.is_writer("a") or two.shared.is_writer("a"), "one writes")
    writer, known = (one, mine) if one.shared.is_writer("a") else (two, yours)
    before = writer.shared._seats["a"].epoch
    # Both see it; probes do not yet.
    for router, each in ((one, mine), (two, yours)):
        each.restart()
        router.shared.published_anew("a")
    await until(lambda: not writer.shared._undeclared, "it is told")
    assert (await deaf.told_of(prompt, "a")).depth == 0
    assert writer.shared._seats["a"].epoch == before + 1
    # The first batch of the new process, and then its start time, are no further restarts.
    for router, each in ((one, mine), (two, yours)):
        each.trust()
        router.members["a"] = router.members["a"]._replace(heard="202.0")
        router.shared.changed("a")
    fresh = chain(2, 50)
    store(mine, fresh)
    store(yours, fresh)
    for router in (one, two, deaf):
        router.restart("a", "200.5")
    await until(lambda: not any(each.shared._undeclared for each in (one, two, deaf)), "all have told")
    assert {each.shared._seats["a"].epoch for each in (one, two, deaf)} == {before + 1}
    await deaf.until_told(fresh, "a", Told(50, exact=True))
    assert known.trusted


async def test_the_ranks_of_a_replica_are_caches_of_their_own(house: House) -> None:
    server = await house.server()
    one, deaf = await house.router(server.target), await house.router(server.target)
    one.members |= {f"a/{rank}": Member(f"a/{rank}", "100.5", 10_000) for rank in range(2)}
    heard = one.hear("a/0", "a/1")
    prompts = [chain(1, 100), chain(2, 60)]
    for known, prompt in zip(heard.values(), prompts, strict=True):
        store(known, prompt)

    async def seen(prompt: Sequence[int]) -> list[Told]:
        found = await deaf.shared.consult([(prompt, ["a"])])
        return [] if found is None else list(found.matches["a"][0])

    async with asyncio.timeout(60):
        while [told.exact for told in await seen(prompts[0])] != [False, True, True]:
            await asyncio.sleep(0.005)
    assert await seen(prompts[0]) == [Told(0), Told(100, exact=True, rank=0), Told(0, exact=True, rank=1)]
    assert await seen(prompts[1]) == [Told(0), Told(0, exact=True, rank=0), Told(60, exact=True, rank=1)]


async def test_what_others_sent_is_followed_for_a_while(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    known = one.hear("a")["a"]
    prompt = chain(1, 900)
    store(known, prompt[:50])
    await two.until_told(prompt, "a", Told(50, exact=True))
    two.shared.record("a", prompt, ended=False, prompt_end=899, soon_seconds=60.0)
    await two.told()
    assert await one.told_of(prompt, "a") == Told(50, exact=True, soon_from=48, soon=900)
    two.shared.forget("a", prompt[50:])
    await two.told()
    assert await one.told_of(prompt, "a") == Told(50, exact=True)


async def test_a_writer_that_was_held_up_tells_nothing_any_more(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    known = one.hear("a")["a"]
    await until(lambda: one.shared.is_writer("a"), "one writes")
    # As if it had slept over its lease: it believes that it is the writer.
    two.hear("a")
    link = await server.link()
    await link.call(b"SET", b"{warmroute}:%d:writer:0" % LAYOUT, two.shared._me)
    one.shared._writes["a"] = float("inf")
    store(known, chain(1, 100))
    await until(lambda: not one.shared.is_writer("a"), "it is told off")
    assert (await one.told_of(chain(1, 100), "a")).depth == 0
    link.close()


async def test_a_replicas_restart_is_one_epoch_for_all_routers(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    old, new = chain(1, 100), chain(2, 100)
    two.record("a", old)
    await two.told()
    one.restart("a", "200.5")
    assert await one.depths(old) == [0, 0, 0]  # at once, told or not
    await until(lambda: not one.shared._undeclared, "the restart is told")
    assert await two.depths(old) == [0, 0, 0]
    two.record("a", old)  # sent to the process that is gone
    await two.told()
    assert await one.depths(old) == [0, 0, 0]
    await until(lambda: not two.shared._undeclared, "two has told what it believes")
    two.restart("a", "200.5")
    one.restart("a", "200.5")
    await until(lambda: not two.shared._undeclared and not one.shared._undeclared, "both agree")
    one.record("a", new)
    await one.told()
    await two.until_depths(new, [100, 0, 0])


async def test_a_restart_that_no_router_saw_is_found_by_the_next(house: House) -> None:
    server = await house.server()
    first = await house.router(server.target)
    first.record("a", chain(1, 100))
    await first.told()
    await first.die()
    later = Router(server.target)
    later.members["a"] = Member("a", "300.0", 10_000)
    await later.shared.start()
    assert await later.depths(chain(1, 100)) == [0, 0, 0]
    await later.shared.stop()


@pytest.mark.fault("hung store", "log per request")
async def test_a_store_that_hangs_costs_one_wait(house: House, caplog: pytest.LogCaptureFixture) -> None:
    server = await house.server()
    one = await house.router(server.target, timeout_ms=25.0, lease_seconds=60.0)
    prompt = chain(1, 500)
    server.signal(signal.SIGSTOP)
    assert await asyncio.gather(*(one.depths(prompt) for _ in range(50))) == [None] * 50
    assert one.shared.timeouts == 1
    assert not one.shared.online
    with pytest.raises(StopIteration):  # without waiting for anything at all
        one.shared.consult([(prompt, ["a"])]).send(None)
    one.record("a", prompt)
    server.signal(signal.SIGCONT)
    await one.told()
    two = await house.router(server.target)
    await two.until_depths(prompt, [500, 0, 0])
    said = lines(caplog)
    assert len(said) == 4
    assert said[1].endswith("cannot be used: no answer within 25 ms; going on from what is known here")
    assert "is back after" in said[2]


async def test_a_store_that_comes_back_empty_is_told_again(house: House, caplog: pytest.LogCaptureFixture) -> None:
    server = await house.server()
    one = await house.router(server.target)
    prompts = [chain(n, 200) for n in range(40)]
    for prompt in prompts:
        one.record("a", prompt)
    await one.told()
    one.record("b", prompts[0])
    await server.stop()
    await until(lambda: not one.shared.online, "it is noticed")
    assert await one.depths(prompts[0]) is None
    one.restart("a", "200.5")
    one.record("a", prompts[1])
    for _ in range(3):
        assert await one.shared._attempt() is not None
    await server.start()
    await one.told()
    assert await one.depths(prompts[0]) == [0, 200, 0]
    assert await one.depths(prompts[1]) == [200, 0, 0]
    assert await one.depths(prompts[2]) == [0, 0, 0]
    said = lines(caplog)
    assert len(said) == 3
    assert "is shared" in said[0]
    assert "cannot be used: the connection was lost" in said[1]
    assert "is back after" in said[2]
    assert "told again" in said[2]


@pytest.mark.parametrize("command", [b"FLUSHALL", b"SCRIPT FLUSH"])
async def test_a_store_that_is_emptied_meanwhile(house: House, command: bytes) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target)
    prompt = chain(1, 300)
    one.record("a", prompt)
    await one.told()
    link = await server.link()
    await link.call(*command.split())
    await one.depths(prompt)
    await one.told()
    await one.until_depths(prompt, [300, 0, 0])
    await two.until_depths(prompt, [300, 0, 0])
    link.close()


async def test_a_full_store_still_answers(house: House, caplog: pytest.LogCaptureFixture) -> None:
    server = await house.server("--maxmemory-policy", "noeviction")
    one = await house.router(server.target)
    known = chain(1, 300)
    one.record("a", known)
    await one.told()
    link = await server.link()
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    one.record("a", chain(2, 300))
    await until(lambda: one.shared.dropped_blocks > 0, "writes are refused")
    assert one.shared.online
    assert await one.depths(known) == [300, 0, 0]
    one.restart("a", "200.5")
    for _ in range(5):  # what cannot be told is not believed either
        assert await one.depths(known) == [0, 0, 0]
    await link.call(b"CONFIG", b"SET", b"maxmemory", b"0")
    await until(lambda: not one.shared._undeclared, "it is told")
    one.record("a", chain(3, 300))
    await one.told()
    assert await one.depths(chain(3, 300)) == [300, 0, 0]
    said = lines(caplog)
    assert [line for line in said if "OOM" in line] == [said[1]]
    assert said[2:] == [f"{server.target} takes writes again"]
    link.close()


@pytest.mark.parametrize("password", ["", "wrong"])
async def test_a_password_that_is_missing_or_wrong(
    house: House, password: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = await house.server("--requirepass", "right")
    path = server.target.path
    one = await house.router(Target(path=path, password=password))
    assert not one.shared.online
    assert await one.depths(chain(1, 10)) is None
    for _ in range(3):
        assert await one.shared._attempt() is not None
    assert len(lines(caplog)) == 1
    assert ("WRONGPASS" if password else "NOAUTH") in lines(caplog)[0]
    assert "right" not in caplog.text
    two = await house.router(Target(path=path, password="right"))
    assert await two.depths(chain(1, 10)) == [0, 0, 0]
    three = await house.router(Target(path=path, user="default", password="right", database=2))
    assert await three.depths(chain(1, 10)) == [0, 0, 0]


@pytest.mark.parametrize("kind", sorted(binaries()))
async def test_a_user_who_may_do_no_more_than_the_docs_say(house: House, kind: str) -> None:
    text = DOCS.read_text().split("The user needs")[1].split("A server of its own")[0]
    named = " ".join(re.findall("`([^`]+)`", text)).replace("{namespace}*", "")
    commands = named.replace("SCRIPT LOAD", "SCRIPT|LOAD").replace("CLUSTER SLOTS", "CLUSTER|SLOTS").split()
    server = await house.server(binary=binaries()[kind])
    link = await server.link()
    allowed = [f"+{command.lower()}".encode() for command in commands]
    await link.call(b"ACL", b"SETUSER", b"router", b"on", b">secret", b"~{warmroute}*", *allowed)
    link.close()
    one = await house.router(Target(path=server.target.path, user="router", password="secret"))
    one.record("a", chain(1, 100))
    one.shared.forget("a", chain(1, 100)[60:])
    await one.told()
    assert await one.depths(chain(1, 100)) == [60, 0, 0]
    known = one.hear("a", "b", "c")["a"]
    await until(lambda: all(map(one.shared.is_writer, "abc")), "it writes")
    store(known, chain(2, 100))
    await one.until_told(chain(2, 100), "a", Told(100, exact=True))
    one.record("a", chain(2, 150))
    one.shared.record("a", chain(2, 120), ended=True, prompt_end=110)
    remove(known, chain(2, 100)[60:])
    await one.told()
    await one.until_told(chain(2, 100)[:60], "a", Told(60, exact=True))
    assert one.shared.faults == 0


async def test_over_tls(house: House) -> None:
    """No server in a wheel is built with TLS; one stands before it."""
    server = await house.server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(server.target.path)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(pass_on(reader, inner_writer), pass_on(inner_reader, writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    house.stack.callback(front.close)
    target = Target("127.0.0.1", front.sockets[0].getsockname()[1], tls=True)
    one = await house.router(target, tls=tls_context(str(TLS / "server.pem")))
    assert await one.depths(chain(1, 10)) == [0, 0, 0]
    two = await house.router(target, tls=tls_context(""))
    assert not two.shared.online  # nobody known vouches for it


async def test_two_fleets_in_one_store_do_not_meet(house: House) -> None:
    server = await house.server()
    one, two = await house.router(server.target), await house.router(server.target, namespace="other")
    one.record("a", chain(1, 50))
    one.busy = [Busy("a", Others(1, 0, 5.0, 1.0), 0.0)]
    one.shared.load_changed()
    await one.told()
    assert await two.depths(chain(1, 50)) == [0, 0, 0]
    assert two.shared.others == {}


async def test_a_cluster_whichever_node_is_named(house: House) -> None:
    cluster = await house.stack.enter_async_context(Cluster(VALKEY))
    routers = [await house.router(node.target) for node in cluster.nodes]
    assert all(router.shared.online for router in routers)
    routers[0].record("a", chain(1, 2000))
    await routers[0].told()
    for router in routers:
        assert await router.depths(chain(1, 2000)) == [2000, 0, 0]


async def test_a_cluster_fails_over(house: House, caplog: pytest.LogCaptureFixture) -> None:
    cluster = await house.stack.enter_async_context(Cluster(VALKEY, replicas=True))
    one = await house.router(cluster.nodes[0].target)
    prompt = chain(1, 200)
    one.record("a", prompt)
    await one.told()
    owner = await cluster.owner(b"{warmroute}:f")
    await owner.stop()
    await until(lambda: not one.shared.online, "it is noticed")
    assert await one.depths(prompt) is None
    one.record("b", prompt)
    await one.told()
    await one.until_depths(prompt, [200, 200, 0])
    said = lines(caplog)
    assert len(said) == 3
    assert "is back after" in said[2]


async def test_more_than_the_queue_holds_is_dropped_and_counted(house: House) -> None:
    server = await house.server()
    one = await house.router(server.target, queue_blocks=1024)
    await server.stop()
    await until(lambda: not one.shared.online, "it is noticed")
    for n in range(20):
        one.record("a", chain(n, 100))
    assert one.shared.waiting_blocks == 1000
    assert one.shared.dropped_blocks == 1000
    await server.start()
    await one.told()
    assert [await one.depths(chain(n, 100)) for n in (0, 9, 10, 19)] == [[0, 0, 0]] * 2 + [[100, 0, 0]] * 2


async def test_something_else_that_listens_there(house: House, caplog: pytest.LogCaptureFixture) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        one = await house.router(Target("127.0.0.1", port))
        assert not one.shared.online
        assert "does not speak Redis's protocol" in lines(caplog)[0]
        await one.shared.stop()
