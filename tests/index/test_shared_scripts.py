"""The scripts on real servers, against the index of one process as the model."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest

from router.index.memory import Index, Match
from router.index.shared import SCRIPTS, script
from router.index.shared_backlog import Backlog, Entry
from router.index.shared_codec import (
    AGAIN,
    ENDED,
    FORGET,
    RECORD,
    Others,
    Seat,
    Told,
    add_load,
    pack_keys,
    pack_load,
    pack_question,
    pack_seat,
    pack_slots,
    read_matches,
)
from router.index.shared_contents import Contents
from router.index.shared_known import ToldKnown
from router.index.shared_link import Link, RefusedError
from tests.index.servers import Server, binaries

STORE = b"0123456789abcdef"


class Store:
    """The scripts, called one by one."""

    def __init__(self, link: Link, scripts: dict[str, bytes]) -> None:
        self.link = link
        self._scripts = scripts
        self.seats: dict[str, Seat] = {}

    async def run(self, script: str, *arguments: bytes) -> list:  # type: ignore[type-arg]
        return await self.link.call(b"EVALSHA", self._scripts[script], b"1", b"{test}", *arguments)  # type: ignore[no-any-return]

    async def join(
        self, name: str, start: str = "1", pool: int = 100_000, *, anew: bool = False, heard: str = ""
    ) -> Seat:
        fields = (name.encode(), start.encode(), heard.encode(), b"%d" % pool, b"1" if anew else b"")
        store, slot, epoch, _ = await self.run("join", STORE, *fields)
        assert store == STORE
        self.seats[name] = Seat(slot, epoch)
        return self.seats[name]

    async def tell(
        self, name: str, kind: int, keys: Sequence[int], prompt_end: int, *, pages: int = 64, soon_ms: int = 0
    ) -> list[str]:
        backlog = Backlog(1 << 30)
        backlog.push(Entry(kind, name, 0, pack_keys(keys), prompt_end, soon_ms=soon_ms))
        stale: list[str] = []
        while parts := backlog.next_slice(lambda entry: self.seats[entry.replica], pages):
            arguments = [piece for part in parts for piece in (part.head, part.keys)]
            stale += backlog.told(parts, await self.run("record", STORE, b"3600", *arguments))
        return stale

    async def ask(self, keys: Sequence[int], *names: str) -> list[Match]:
        slots = pack_slots(self.seats[name].slot for name in names)
        reply = await self.run("consult", STORE, b"me", slots, *pack_question(pack_keys(keys)))
        found = [told for told, _ in read_matches(reply[0], reply[1], len(names))]
        return [Match(told.depth, told.continues) for told in found]

    async def told(self, keys: Sequence[int], *names: str) -> list[Told]:
        slots = pack_slots(self.seats[name].slot for name in names)
        reply = await self.run("consult", STORE, b"me", slots, *pack_question(pack_keys(keys)))
        return [told for told, _ in read_matches(reply[0], reply[1], len(names))]


@pytest.fixture(params=sorted({"redis-6.2", "valkey-9", "system"} & set(binaries())))
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async with Server(binaries()[request.param]) as server:
        link = await server.link()
        loaded = {name: await link.call(b"SCRIPT", b"LOAD", script(name)) for name in SCRIPTS}
        yield Store(link, loaded)
        link.close()


def chain(seed: int, length: int, onto: Sequence[int] = ()) -> list[int]:
    draw = random.Random(seed)
    return [*onto, *(draw.getrandbits(64) for _ in range(length))]


async def test_depths_are_exact_to_the_block(store: Store) -> None:
    keys = chain(1, 1000)
    lengths = [0, 1, 2, 15, 16, 17, 31, 32, 33, 500, 767, 768, 999, 1000]
    names = [f"r{n}" for n in lengths]
    for name, length in zip(names, lengths, strict=True):
        await store.join(name)
        if length:
            await store.tell(name, RECORD, keys[:length], length - 1)
    for asked in (1, 16, 40, 1000):
        assert [match.depth for match in await store.ask(keys[:asked], *names)] == [min(n, asked) for n in lengths]
    assert [match.depth for match in await store.ask(keys + chain(2, 300), *names)] == lengths
    assert [match.depth for match in await store.ask(keys[1:], *names)] == [0] * len(names)


async def test_the_end_of_a_chain_is_found_in_few_pages(store: Store) -> None:
    """Where its last request went to its end, which is most often where it is; by bisection else."""
    keys = chain(1, 6000)
    await store.join("a")
    await store.join("b")
    await store.tell("a", RECORD, keys[:4001], 4000)
    await store.tell("b", RECORD, keys[:3200] + chain(2, 999), 4198)

    async def pages(name: str) -> tuple[int, int]:
        await store.link.call(b"CONFIG", b"RESETSTAT")
        depth = (await store.ask(keys, name))[0].depth
        stats: bytes = await store.link.call(b"INFO", b"commandstats")
        return depth, int(stats.split(b"cmdstat_get:calls=")[1].split(b",")[0]) - 1  # the marks

    assert await pages("a") == (4001, 2)
    depth, asked = await pages("b")
    assert depth == 3200
    assert asked <= 2 + 9


async def test_within_a_page_two_bytes_stand_for_a_key(store: Store) -> None:
    keys = chain(1, 40)
    await store.join("a")
    await store.tell("a", RECORD, keys, 39)
    alike = [key ^ 1 << 16 for key in keys]
    assert (await store.ask(keys[:33] + alike[33:], "a"))[0].depth == 40
    assert (await store.ask(keys[:32] + alike[32:], "a"))[0].depth == 32  # a page's name counts whole
    assert (await store.ask(keys[:35] + [key ^ 1 << 15 for key in keys[35:]], "a"))[0].depth == 35
    assert (await store.ask(keys[:35] + [key ^ 1 for key in keys[35:]], "a"))[0].depth == 35


async def test_a_long_chain_in_slices_is_the_same_as_in_one(store: Store) -> None:
    keys = chain(3, 5000)
    await store.join("a")
    await store.join("b")
    await store.tell("a", RECORD, keys, 4999, pages=7)
    await store.tell("b", RECORD, keys, 4999, pages=10_000)
    assert [match.depth for match in await store.ask(keys, "a", "b")] == [5000, 5000]


@pytest.mark.parametrize("replicas", [5, 30])
async def test_random_traffic_as_in_the_index_of_one_process(store: Store, replicas: int) -> None:
    """Conversations that share heads of every length, with turns, branches, failed prompts and shared ends. Few
    replicas are looked for one by one, many together."""
    draw = random.Random(11)
    index = Index()
    names = [f"r{n}" for n in range(replicas)]
    for name in names:
        await store.join(name)
        index.size(name, 100_000)
    heads = [chain(100 + n, length) for n, length in enumerate((0, 3, 14, 16, 40, 61))]
    talks = [chain(200 + n, draw.randint(1, 40), draw.choice(heads)) for n in range(24)]
    for step in range(400):
        which = draw.randrange(len(talks))
        name = names[which % (replicas - 2)] if draw.random() < 0.8 else draw.choice(names)
        keys = talks[which]
        before = index.match(name, keys).depth
        index.record(name, keys)
        await store.tell(name, RECORD, keys, len(keys) - 1)
        if draw.random() < 0.2:
            if before < len(keys):
                index.forget(name, keys[before:])
                await store.tell(name, FORGET, keys, before)
        else:
            whole = chain(1000 + step, draw.choice((0, 1, 5, 20)), keys)
            prompt_end = max(0, index.match(name, whole).depth - 1)
            index.record(name, whole, ended=True)
            await store.tell(name, ENDED, whole, prompt_end)
            if draw.random() < 0.7:
                talks[which] = chain(5000 + step, draw.randint(0, 30), whole)
        asked = draw.choice(talks) + chain(9000 + step, 5)
        assert [match.depth for match in await store.ask(asked, *names)] == [
            index.match(each, asked).depth for each in names
        ]


async def test_a_turn_that_ended_is_told_from_one_that_others_share(store: Store) -> None:
    await store.join("a")
    prompt, other = chain(1, 20), chain(2, 8, chain(1, 20))
    answered = chain(3, 6, prompt)
    await store.tell("a", RECORD, prompt, 19)
    assert await store.ask(prompt + chain(9, 3), "a") == [Match(20, False)]
    await store.tell("a", ENDED, answered, 19)
    assert await store.ask(answered + chain(9, 3), "a") == [Match(26, True)]
    assert await store.ask(answered[:22] + chain(9, 3), "a") == [Match(22, True)]
    assert await store.ask(prompt[:10] + chain(9, 3), "a") == [Match(10, False)]
    following = chain(4, 40, answered)
    await store.tell("a", RECORD, following, len(following) - 1)
    assert await store.ask(answered + chain(9, 3), "a") == [Match(26, False)]
    await store.tell("a", RECORD, other, len(other) - 1)
    await store.tell("a", ENDED, other, len(other) - 1)
    assert await store.ask(other, "a") == [Match(28, True)]
    assert await store.ask(prompt + chain(9, 3), "a") == [Match(20, False)]
    await store.tell("a", RECORD, other, len(other) - 1)
    await store.tell("a", ENDED, other, len(other) - 1)
    assert await store.ask(other, "a") == [Match(28, False)]  # two conversations ended there


async def test_what_is_told_again_is_held_as_before(store: Store) -> None:
    await store.join("a")
    keys = chain(1, 30)
    for _ in range(2):
        await store.tell("a", AGAIN, keys, 19)
        assert await store.ask(keys, "a") == [Match(30, True)]
        assert await store.ask(keys[:15], "a") == [Match(15, False)]


async def test_a_pool_holds_what_was_touched_last(store: Store) -> None:
    """1/64 of the pool is how fine the order is: 2 blocks of 128."""
    await store.join("a", pool=128)
    hot, chains = chain(0, 32), [chain(n, 16) for n in range(1, 20)]
    for each in chains:
        await store.tell("a", RECORD, hot, 31)
        await store.tell("a", RECORD, each, 15)
    assert [(await store.ask(each, "a"))[0].depth for each in chains] == [0] * 13 + [16] * 6
    assert (await store.ask(hot, "a"))[0].depth == 32


async def test_the_head_outlives_the_tail(store: Store) -> None:
    await store.join("a", pool=128)
    first, second = chain(1, 96), chain(2, 64)
    await store.tell("a", RECORD, first, 95)
    await store.tell("a", RECORD, second, 63)
    assert [(await store.ask(each, "a"))[0].depth for each in (first, second)] == [64, 64]


async def test_never_more_than_the_pool_whatever_happens(store: Store) -> None:
    draw = random.Random(5)
    await store.join("a", pool=200)
    seen: list[list[int]] = [chain(0, 20)]
    for step in range(300):
        keys = chain(step + 1, draw.randint(1, 60), draw.choice(seen)[: draw.randint(0, 120)])
        await store.tell("a", draw.choice((RECORD, ENDED)), keys, draw.randrange(len(keys)))
        assert (await store.ask(keys, "a"))[0].depth == len(keys)
        seen.append(keys)
    held = set()
    for keys in seen:
        held.update(keys[: (await store.ask(keys, "a"))[0].depth])
    assert 100 <= len(held) <= 200


async def test_a_restarted_replica_holds_nothing_and_late_writes_are_refused(store: Store) -> None:
    keys = chain(1, 100)
    old = await store.join("a", start="100.5")
    await store.tell("a", RECORD, keys, 99)
    assert await store.join("a", start="100.5") == old
    assert await store.join("a", start="") == old
    assert (await store.ask(keys, "a"))[0].depth == 100
    new = await store.join("a", start="200.25")
    assert new == Seat(old.slot, old.epoch + 1)
    assert (await store.ask(keys, "a"))[0].depth == 0
    store.seats["a"] = old
    assert await store.tell("a", RECORD, keys, 99) == ["a"]
    assert (await store.ask(keys, "a"))[0].depth == 0
    store.seats["a"] = new
    assert await store.tell("a", RECORD, keys[:50], 49) == []
    assert (await store.ask(keys, "a"))[0].depth == 50
    assert (await store.join("a", start="200.25", anew=True)).epoch == new.epoch + 1
    assert (await store.ask(keys, "a"))[0].depth == 0


async def test_pages_that_outlive_their_state_are_dead(store: Store) -> None:
    """A store that evicts by itself may lose what it knew of a replica before it loses the replica's pages."""
    keys = chain(1, 100)
    await store.join("a")
    await store.tell("a", RECORD, keys, 99)
    state = [key for key in await store.link.call(b"KEYS", b"*") if b":p:" not in key]
    await store.link.call(b"DEL", *state)
    begun = await store.link.call(b"TIME")
    while (await store.link.call(b"TIME"))[1][:-3] == begun[1][:-3]:
        pass  # the next millisecond
    with pytest.raises(RefusedError, match="NOSTORE"):
        await store.ask(keys, "a")
    await store.join("a")
    assert (await store.ask(keys, "a"))[0].depth == 0


async def test_every_key_ends_and_lies_in_one_slot(store: Store) -> None:
    await store.join("a")
    await store.tell("a", RECORD, chain(1, 100), 99)
    keys = await store.link.call(b"KEYS", b"*")
    assert all(key.startswith(b"{test}:") for key in keys)
    pages = [key for key in keys if b":p:" in key]
    assert len(pages) == 7
    for key in pages:
        assert 0 < await store.link.call(b"TTL", key) <= 3600


async def test_a_popular_page_stays_small(store: Store) -> None:
    names = [f"r{n}" for n in range(8)]
    for name in names:
        await store.join(name)
    head = chain(1, 6)
    for step in range(400):
        keys = chain(10 + step, 30, head)
        await store.tell(names[step % 8], RECORD, keys, 35)
    page = b"{test}:p:" + pack_keys(head[:1])
    assert await store.link.call(b"STRLEN", page) <= 8 * 8 * (3 + 128 + 11)
    for step in range(400):  # and nobody lost what it holds
        keys = chain(10 + step, 30, head)
        assert (await store.ask(keys, names[step % 8]))[0].depth == 36


async def test_one_call_does_so_much_and_leaves_the_rest(store: Store) -> None:
    """A page of many paths takes longer than one of one path: the script counts, not who calls it."""
    names = [f"r{n}" for n in range(64)]
    for name in names:
        await store.join(name)
    head = chain(1, 5)
    prompts = [chain(10 + n, 10, head) for n in range(400)]
    for n, keys in enumerate(prompts):
        await store.tell(names[n % 64], RECORD, keys, 14)
    backlog = Backlog(1 << 30)
    for n, keys in enumerate(prompts):
        backlog.push(Entry(RECORD, names[n % 64], 0, pack_keys(keys), 14))
    calls = 0
    while parts := backlog.next_slice(lambda entry: store.seats[entry.replica]):
        assert len(parts) == min(64, len(backlog))
        arguments = [piece for part in parts for piece in (part.head, part.keys)]
        done = await store.run("record", STORE, b"3600", *arguments)
        assert 2 <= len(done) < 2 * 16
        backlog.told(parts, done)
        calls += 1
    assert calls > 400 / 16
    page = b"{test}:p:" + pack_keys(head[:1])
    assert await store.link.call(b"STRLEN", page) <= 65 * (3 + 128 + 11)
    assert [(await store.ask(prompts[n], names[n % 64]))[0].depth for n in range(336, 400)] == [15] * 64


async def test_loads_are_leased_and_others_only(store: Store) -> None:
    await store.join("a")
    load = pack_load([(0, Others(3, 2, 50.0, 7.5), 20.0)])
    assert await store.run("publish", STORE, b"me", b"60000", load, b"", b"") == [b"", 1]
    assert await store.run("publish", STORE, b"you", b"60000", b"", b"", b"") == [b"", 1, load]
    assert (await store.run("consult", STORE, b"you", pack_slots([0]), *pack_question(pack_keys([1]))))[2:] == [load]
    assert (await store.run("consult", STORE, b"me", pack_slots([0]), *pack_question(pack_keys([1]))))[2:] == [b""]
    for each, lease in ((b"me", b"0"), (b"you", b"60000")):
        last = await store.run("publish", STORE, each, lease, b"", b"", b"")
    assert last == [b"", 1]


async def test_a_replica_has_one_writer(store: Store) -> None:
    async def claim(router: bytes, slots: Sequence[int], lease: bytes = b"60000") -> list[int]:
        return list((await store.run("publish", STORE, router, lease, b"", pack_slots(slots), b""))[0])

    await store.join("a")
    assert await claim(b"me", [1, 2]) == [1, 1]
    assert await claim(b"you", [1, 2, 3]) == [0, 0, 1]
    assert await claim(b"me", [1, 2, 3]) == [1, 1, 0]
    await store.run("publish", STORE, b"me", b"0", b"", b"", pack_slots([1, 2, 3]))
    assert await claim(b"you", [1, 2, 3]) == [1, 1, 1]


class Writer:
    """Tells what an engine holds, as its events would say."""

    def __init__(self, store: Store, name: str, router: bytes = b"me") -> None:
        self.store = store
        self.name = name
        self.router = router
        self.known = ToldKnown(100_000, 100_000)
        self.known.trust()
        self.contents = Contents(self.known)

    async def claim(self, lease: bytes = b"60000") -> bool:
        slots = pack_slots([self.store.seats[self.name].slot])
        return bool((await self.store.run("publish", STORE, self.router, lease, b"", slots, b""))[0][0])

    async def give_up(self) -> None:
        slots = pack_slots([self.store.seats[self.name].slot])
        await self.store.run("publish", STORE, self.router, b"60000", b"", b"", slots)

    async def tell(self, lease: bytes = b"60000") -> int:
        done = 0
        while self.contents.waiting(seat := self.store.seats[self.name], 0.0, 1e9):
            pieces = self.contents.next_slice(0.0)
            done = await self.store.run("contents", STORE, b"3600", self.router, lease, pack_seat(seat), *pieces)
            self.contents.told(done)
            if done < 0:
                break
        return done

    def stored(self, keys: Sequence[int], first: int = 0) -> None:
        self.known.stored(keys[first:], keys[first - 1] if first else None, medium="GPU", group=0, scale=1)

    def removed(self, *keys: int) -> None:
        self.known.removed(keys, medium="GPU", group=0)


async def writer(store: Store, name: str = "a") -> Writer:
    await store.join(name)
    made = Writer(store, name)
    assert await made.claim()
    return made


async def test_contents_are_what_events_said(store: Store) -> None:
    one = await writer(store)
    keys = chain(1, 700)
    one.stored(keys)
    await one.tell()
    assert await store.told(keys, "a") == [Told(700, exact=True)]
    one.removed(*keys[:349:-1])
    await one.tell()
    assert await store.told(keys, "a") == [Told(350, exact=True)]
    one.removed(keys[100])
    await one.tell()
    assert await store.told(keys, "a") == [Told(100, exact=True)]
    one.stored(keys[:101], 100)
    await one.tell()
    assert await store.told(keys, "a") == [Told(350, exact=True)]


async def test_what_was_presumed_goes_when_all_is_told(store: Store) -> None:
    keys, real = chain(1, 300), chain(2, 40)
    await store.join("a")
    await store.join("b")
    for name in ("a", "b"):
        await store.tell(name, RECORD, keys, 299)
    one = await writer(store)
    one.stored(real)
    assert await store.told(keys, "a", "b") == [Told(300), Told(300)]
    await one.tell()
    assert await store.told(keys, "a", "b") == [Told(0, exact=True), Told(300)]
    assert await store.told(real, "a") == [Told(40, exact=True)]
    state = f"{{test}}:r:{store.seats['a'].slot}"
    assert await store.link.call(b"HGET", state.encode(), b"total") == b"40"


async def test_a_prompt_on_its_way_counts_for_a_while_and_never_longer(store: Store) -> None:
    one = await writer(store)
    keys = chain(1, 700)
    one.stored(keys[:133])
    await one.tell()
    await store.tell("a", RECORD, keys, 699, soon_ms=60_000)
    # It goes on from the page in which what is held ends.
    assert await store.told(keys, "a") == [Told(133, exact=True, soon_from=128, soon=700)]
    other = keys[:500] + chain(2, 100)
    assert await store.told(other, "a") == [Told(133, exact=True, soon_from=128, soon=500)]
    assert await store.told(chain(3, 30), "a") == [Told(0, exact=True)]
    # What is computed after all is told, and when it goes nobody waits for it any more.
    one.stored(keys[:400], 133)
    await one.tell()
    assert await store.told(keys, "a") == [Told(400, exact=True, soon_from=128, soon=700)]
    one.stored(keys, 400)
    one.removed(*keys[:299:-1])
    await one.tell()
    assert await store.told(keys, "a") == [Told(300, exact=True)]
    # Over by itself.
    fresh = chain(4, 100)
    await store.tell("a", RECORD, fresh, 99, soon_ms=1)
    begun = await store.link.call(b"TIME")
    while (await store.link.call(b"TIME"))[0] == begun[0]:
        pass
    assert await store.told(fresh, "a") == [Told(0, exact=True)]
    assert [key for key in await store.link.call(b"KEYS", b"*:s:*") if pack_keys(fresh[:1]) in key] == []


async def test_a_prompt_that_is_taken_back_is_waited_for_no_longer(store: Store) -> None:
    one = await writer(store)
    keys = chain(1, 300)
    one.stored(keys[:50])
    await one.tell()
    await store.tell("a", RECORD, keys, 299, soon_ms=60_000)
    await store.tell("a", FORGET, keys, 50)
    assert await store.told(keys, "a") == [Told(50, exact=True)]
    one.removed(*keys[49:39:-1])
    await one.tell()
    assert await store.told(keys, "a") == [Told(40, exact=True)]


async def test_a_restart_ends_what_was_on_its_way_too(store: Store) -> None:
    one = await writer(store)
    keys = chain(1, 100)
    one.stored(keys)
    await one.tell()
    await store.tell("a", RECORD, keys + chain(2, 50), 149, soon_ms=60_000)
    old = store.seats["a"]
    new = await store.join("a", start="2")
    assert await store.told(keys, "a") == [Told(0)]
    store.seats["a"] = old
    one.contents.anew()
    assert await one.tell() == -1
    store.seats["a"] = new
    one.known.restart()
    one.known.trust()
    assert await one.tell() > 0
    assert await store.told(keys + chain(2, 50), "a") == [Told(0, exact=True)]


async def test_turns_that_end_are_told_from_what_others_share(store: Store) -> None:
    one = await writer(store)
    prompt = chain(1, 20)
    answered = chain(2, 11, prompt)
    one.stored(answered)
    await one.tell()
    await store.tell("a", ENDED, answered, 19)
    assert await store.told(answered + chain(3, 5), "a") == [Told(31, continues=True, exact=True)]
    assert await store.told(prompt, "a") == [Told(20, exact=True)]
    await store.tell("a", RECORD, answered + chain(3, 5), 35, soon_ms=60_000)
    assert await store.told(answered + chain(4, 5), "a") == [Told(31, exact=True)]


async def test_only_the_writer_tells(store: Store) -> None:
    one = await writer(store)
    keys = chain(1, 40)
    one.stored(keys)
    await one.tell()
    two = Writer(store, "a", b"you")
    assert not await two.claim()
    two.stored(keys[:10])
    assert await two.tell() == -2
    assert await store.told(keys, "a") == [Told(40, exact=True)]
    await one.give_up()
    # Nobody tells: what was told is presumed.
    assert await store.told(keys, "a") == [Told(40)]
    assert await two.claim()
    assert await store.told(keys, "a") == [Told(40)]
    await two.tell()
    assert await store.told(keys, "a") == [Told(10, exact=True)]
    one.stored(keys[:11], 10)
    assert await one.tell() == -2


async def test_what_a_writer_told_is_presumed_when_it_is_gone(store: Store) -> None:
    await store.join("a", pool=640)
    one = Writer(store, "a")
    assert await one.claim()
    chains = [chain(n, 40) for n in range(16)]
    for keys in chains:
        one.stored(keys)
    await one.tell()
    await one.give_up()
    assert [told.depth for keys in chains for told in await store.told(keys, "a")] == [40] * 16
    # The pool is full: what comes now takes the place of what was stored first.
    await store.tell("a", RECORD, chain(99, 80), 79)
    assert await store.told(chain(99, 80), "a") == [Told(80)]
    depths = [(await store.told(keys, "a"))[0].depth for keys in chains]
    assert depths[0] < 40
    assert depths[4:] == [40] * 12


async def test_a_page_where_many_chains_part_says_that_there_is_more(store: Store) -> None:
    one = await writer(store)
    head = chain(1, 5)
    for n in range(20):
        one.stored(head + chain(10 + n, 4), 5 if n else 0)
    await one.tell()
    assert await store.told(head + chain(29, 4), "a") == [Told(9, exact=True, open=True)]
    assert await store.told(head + chain(10, 4), "a") == [Told(5, exact=True, open=True)]


async def test_random_lives_of_engines_are_told_exactly(store: Store) -> None:
    """Two replicas with events and one without; passes at any time; what is asked is as it is known."""
    draw = random.Random(23)
    writers = [await writer(store, name) for name in ("a", "b")]
    await store.join("c")
    index = Index()
    index.size("c", 100_000)
    chains: list[list[int]] = [chain(0, 37)]
    for step in range(250):
        keys = chain(step + 1, draw.randint(1, 50), draw.choice(chains)[: draw.randint(0, 120)])
        chains.append(keys)
        which = draw.choice(writers)
        held = which.known.depth(keys, 0.0)
        which.stored(keys, held)
        if draw.random() < 0.5:
            victim = draw.choice(chains)
            depth = which.known.depth(victim, 0.0)
            which.removed(*victim[draw.randint(0, depth) : depth][::-1])
        if draw.random() < 0.3:
            index.record("c", keys)
            await store.tell("c", RECORD, keys, len(keys) - 1)
        if draw.random() < 0.05:
            which.contents.anew()
        if draw.random() < 0.4:
            for each in writers:
                await each.tell()
            for keys in draw.sample(chains, min(len(chains), 5)):
                told = await store.told(keys, "a", "b", "c")
                for each, found in zip(writers, told, strict=False):
                    truth = each.known.depth(keys, 0.0)
                    assert found.exact
                    assert found.depth == truth or (found.open and found.depth < truth)
                assert told[2].depth <= index.match("c", keys).depth


def test_a_load_ages() -> None:
    loads: dict[int, Others] = {}
    packed = pack_load([(5, Others(2, 1, 100.0, 8.0), 30.0)])
    add_load(packed, 10.0, loads)
    assert loads == {5: Others(2, 1, 90.0, 8.0)}
    add_load(packed, 500.0, loads)
    assert loads == {5: Others(4, 2, 160.0, 16.0)}
    with pytest.raises(ValueError, match="no load"):
        add_load(packed[:-1], 0.0, loads)
