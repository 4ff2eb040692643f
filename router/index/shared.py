"""The index and the load that several routers share over Redis or Valkey.

Each decision asks once and waits a bounded time; all that is to be told goes in the background. What this process knows
itself is kept beside it (`router.index.memory`), so that a store that is slow, full or gone costs one short wait and
after that nothing: decisions go on from local knowledge until the store is back, and is told again what it lost.

    online    connected and joined: every replica has a number and an epoch there
    offline   nothing is asked or told; a connection is tried in the background, ever less often

The first answer that does not come in time ends the connection: answers come in order, and whoever waits behind it
would wait too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from router.index.pages import PAGE_BLOCKS
from router.index.shared_backlog import Backlog, Entry, Part, Recent
from router.index.shared_codec import (
    ENDED,
    FORGET,
    KEY_BYTES,
    RECORD,
    Others,
    Outside,
    Seat,
    Told,
    add_load,
    common_keys,
    pack_keys,
    pack_load,
    pack_question,
    pack_seat,
    pack_slots,
    read_matches,
    read_ranks,
)
from router.index.shared_contents import Contents
from router.index.shared_link import Link, LinkError, RefusedError, Target
from router.names import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from router.index.shared_known import ToldKnown

log = logging.getLogger("warmroute.shared")


def _text(name: str) -> bytes:
    return Path(__file__).with_name(f"shared_{name}.lua").read_bytes()


SCRIPTS: dict[str, tuple[str, ...]] = {
    "join": ("join",),
    "consult": ("consult",),
    "publish": ("publish",),
    "record": ("pages", "record"),
    "contents": ("pages", "contents"),
}
"""The store's side: what each script is made of."""


def script(name: str) -> bytes:
    """The text of one of SCRIPTS."""
    return b"".join(map(_text, SCRIPTS[name]))


LAYOUT = 2
"""Of what is in the store. Routers of another layout do not meet there."""

# A timer may fire before the answer that has long arrived is read, where this process itself was held up.
GRACE_MS = 1.0
# Nobody waits for what is told, so it may take longer; a store that is stuck is noticed by it all the same.
TELL_SECONDS = 0.5
CONNECT_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 0.05
# Load may be told this often; 5 ms of delay cost 2 % of TTFT at the most.
PUBLISH_SECONDS = 0.002
REDIRECTIONS = 5
PACKED = 64
# Blocks from which on it pays to look for what was packed before.
LONG = 256
# What shared_join.lua is told to have happened.
OTHER_PROCESS = b"1"
EMPTIED = b"2"
OTHER_WRITER = -2
"""What the store answers to one whose lease is over."""


Places = list[tuple[str, str, int | None]]
"""Replica, member, and which rank of it that is: who is asked for, in the order of the answers."""


class Member(NamedTuple):
    """A replica as this router sees it. `start`: its process's start time as it reports it, "" where it does not;
    `pool` in blocks, 0 where it is not known; `heard`: the time of its process's first KV events, "" where they are not
    known. A data-parallel rank whose events are heard by itself is a member of its own, NAME/RANK."""

    name: str
    start: str
    pool: int
    heard: str = ""


class Busy(NamedTuple):
    """A replica's load from this router. `head_ms`: what the first prefill in its queue still takes."""

    name: str
    load: Others
    head_ms: float


@dataclass(frozen=True, slots=True)
class Options:
    """`targets` are tried in turn. Times in seconds, but for `timeout_ms`: a decision's wait."""

    targets: Sequence[Target]
    tls: ssl.SSLContext | None = None
    namespace: str = "warmroute"
    timeout_ms: float = 25.0
    retry_seconds: float = 1.0
    ttl_seconds: int = 3600
    lease_seconds: float = 3.0
    queue_blocks: int = 1_000_000


class Shared:
    """One router's part in it. `members` and `loads` are read whenever they are told; `heard` is given the other
    routers' load whenever that is told."""

    def __init__(
        self,
        options: Options,
        *,
        members: Callable[[], Iterable[Member]],
        loads: Callable[[float], Iterable[Busy]],
        heard: Callable[[Mapping[str, Others]], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._members = members
        self._loads = loads
        self._heard = heard
        self._namespace = b"{%s}:%d" % (options.namespace.encode(), LAYOUT)
        self._ttl = b"%d" % options.ttl_seconds
        self._lease = b"%d" % (options.lease_seconds * 1000)
        self._patience = max(0.0, options.timeout_ms - GRACE_MS) / 1000
        self._tell_seconds = max(TELL_SECONDS, options.timeout_ms / 1000)
        self._me = os.urandom(8).hex().encode()
        self._link: Link | None = None
        self._hashes: dict[str, bytes] = {}
        self._hosts: dict[tuple[str, int], Name] = {}
        self._store: bytes | None = None
        self._seats: dict[str, Seat] = {}
        self._names: dict[int, str] = {}
        self._lives: dict[str, int] = {}
        self._undeclared: dict[str, bytes] = {}
        """Members to be told anew, with what is known to have happened. What the store says of them until then is not
        believed."""
        self._disputed: dict[str, float] = {}
        self._backlog = Backlog(options.queue_blocks)
        self._recent = Recent(options.queue_blocks * KEY_BYTES)
        self._packed: dict[int, tuple[Sequence[int], bytes]] = {}
        self._asked: dict[tuple[str, ...], tuple[Places, bytes]] = {}
        """See `_places`; while nobody gets another seat."""
        self._published: dict[bytes, float] = {}
        """The other routers' loads as they came, and when they were first seen."""
        self._ranks: dict[str, list[str]] = {}
        """The members that are a replica's ranks, by its name."""
        self._contents: dict[str, Contents] = {}
        """What this router hears the events of, by member."""
        self._writes: dict[str, float] = {}
        self._claimed: set[str] = set()
        self._told: set[str] = set()
        self._numbered: int | None = None
        self._to_learn = False
        self._owner: Target | None = None
        self._nodes: list[Target] = []
        self._lost: asyncio.Future[str] | None = None
        self._to_tell = asyncio.Event()
        self._to_publish = asyncio.Event()
        self._to_pass_on = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._said_online: bool | None = None
        self._refusing = False
        self._down_since = 0.0
        self._dropped_before = 0
        self.others: dict[str, Others] = {}
        """The other routers' load, as of the last time that anything was told or asked."""
        self.timeouts = 0
        self.faults = 0

    # -- what others ask ----------------------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        return self._link is not None

    @property
    def where(self) -> str:
        """For people: what is shared, with whom, and whether that works."""
        name = f"with the routers of `{self._options.namespace}`"
        if self._owner is not None and self.online:
            return f"{name} through {self._owner}"
        return f"{name} as soon as {', '.join(map(str, self._options.targets))} answers"

    @property
    def waiting_blocks(self) -> int:
        """Blocks that the store is still to be told of."""
        return self._backlog.blocks

    @property
    def untold_pages(self) -> int:
        """Pages of what engines hold that this router is still to tell."""
        return sum(each.untold for name, each in self._contents.items() if each.tellable and self.is_writer(name))

    @property
    def dropped_blocks(self) -> int:
        """Blocks that it will never be told of: too many waited, or it would not take them."""
        return self._backlog.dropped_blocks

    def is_writer(self, replica: str) -> bool:
        """Whether this router is the one that passes the replica's KV events on to the store. True under a lease that
        is renewed while the store answers; a router that dies or loses the store is followed by another."""
        return self._writes.get(replica, 0.0) > asyncio.get_running_loop().time()

    def is_told(self, member: str) -> bool:
        """Whether the store knew what the member holds, by its events, when it was asked last."""
        return member in self._told

    def at_hand(self) -> Outside | None:
        """What `consult` says, as far as nobody has to be asked: nothing."""
        return None

    async def consult(self, asks: Sequence[tuple[Sequence[int], Sequence[str]]]) -> Outside | None:
        """What the store knows of these chains, each given with the replicas that are asked for it, and the load that
        other routers have given to the fleet. None where it does not answer in time, now or any more."""
        link = self._link
        if link is None or self._store is None:
            return None
        arguments: list[bytes] = []
        asked: list[Places] = []
        for keys, replicas in asks:
            places, slots = self._places(replicas)
            asked.append(places)
            arguments += [slots, *pack_question(self._pack(keys))]
        future = self._call(link, "consult", self._store, self._me, *arguments)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience, self._overdue, link, future)
        try:
            reply = await future
        except LinkError:
            return None
        except RefusedError as error:
            self._refused(link, str(error))
            return None
        finally:
            timer.cancel()
        found = iter(read_matches(reply[0], reply[1], sum(map(len, asked))))
        matches: dict[str, list[list[Told]]] = {}
        here: list[Told] = []
        for places in asked:
            for name, member, rank in places:
                told, epoch = next(found)
                seat = self._seats.get(member)
                if seat is None or seat.epoch != epoch:
                    self._dispute(member)
                    told = Told(0)
                elif self._undeclared and (name in self._undeclared or member in self._undeclared):
                    told = Told(0)
                if told.exact:
                    self._told.add(member)
                elif self._told:
                    self._told.discard(member)
                if rank is None:
                    here = [told]
                    matches.setdefault(name, []).append(here)
                else:
                    told.rank = rank
                    here.append(told)
        self._hear(reply[2:], loop.time())
        return Outside(matches, self.others)

    def _places(self, replicas: Sequence[str]) -> tuple[Places, bytes]:
        """Who is asked for, and their numbers, packed: they are the same from one decision to the next."""
        names = tuple(dict.fromkeys(replicas))  # who prefills and answers too is named as both
        known = self._asked.get(names)
        if known is None:
            places: Places = []
            for name in names:
                if name in self._seats:
                    places.append((name, name, None))
                    places += [(name, each, rank) for rank, each in enumerate(self._ranks.get(name, ()))]
            if len(self._asked) >= PACKED:
                self._asked.clear()
            known = self._asked[names] = places, pack_slots(self._seats[each].slot for _, each, _ in places)
        return known

    def untold(self, member: str, keys: Sequence[int], depth: int) -> int:
        """How deep a chain will be there that is there to `depth`, by prompts that the store is still to be told of."""
        waiting = self._backlog.records(member)
        if waiting:
            packed = self._pack(keys)
            for told in waiting:
                depth = max(depth, common_keys(told, packed))
        return depth

    def load_changed(self) -> None:
        """Something was booked, reached its first token or ended: the other routers want to know."""
        self._to_publish.set()

    def record(
        self, replica: str, keys: Sequence[int], *, ended: bool, prompt_end: int, soon_seconds: float = 0.0
    ) -> None:
        """See `Index.record`. `replica`: a member. `prompt_end`: the number of the prompt's last whole block among
        `keys`. `soon_seconds`: for how long a prompt counts as there, where events tell when it is."""
        if keys:
            kind = ENDED if ended else RECORD
            life = self._lives.get(replica, 0)
            entry = Entry(kind, replica, life, self._pack(keys), max(0, min(prompt_end, len(keys) - 1)))
            entry.soon_ms = int(soon_seconds * 1000)
            self._recent.add(entry)
            self._push(entry)

    def forget(self, replica: str, keys: Sequence[int]) -> None:
        """See `Index.forget`. Only what was recorded lately can be taken back."""
        if not keys:
            return
        last = pack_keys(keys[-1:])
        entry = self._recent.find(replica, last)
        kept = len(entry.keys) // KEY_BYTES - len(keys) if entry is not None else -1
        if entry is not None and kept >= 0:
            self._recent.forget(replica, last)
            begin = kept // PAGE_BLOCKS * PAGE_BLOCKS * KEY_BYTES
            self._push(Entry(FORGET, replica, entry.life, entry.keys, kept, done=begin))

    def restarted(self, replica: str) -> None:
        """Another process answers there: what the store holds of the replica and its ranks is dead. All routers notice
        that; the first to tell begins the epoch."""
        for member in self._members_of(replica):
            self._lives[member] = self._lives.get(member, 0) + 1
            self._declare_later(member)

    def published_anew(self, member: str) -> None:
        """Its events are another process's. Its writer begins the epoch at once, by whatever start time or first event
        the process will be known."""
        self._lives[member] = self._lives.get(member, 0) + 1
        self._declare_later(member, OTHER_PROCESS if self.is_writer(member) else b"")

    def changed(self, replica: str) -> None:
        """Its pool became known, or changed, or by which events its process is known."""
        for member in self._members_of(replica):
            self._declare_later(member)

    def _members_of(self, replica: str) -> set[str]:
        heard = [member for member in self._contents if _replica(member) == replica]
        return {replica, *self._ranks.get(replica, ()), *heard}

    def hear(self, member: str, known: ToldKnown) -> None:
        """Its events are heard here: this router may come to tell the others what it holds."""
        self._contents[member] = Contents(known)
        known.changed = self._to_pass_on.set
        known.emptied = lambda: self._emptied(member)
        if member not in self._seats:
            self._declare_later(member)
        self._to_pass_on.set()

    def unhear(self, replica: str) -> None:
        """It does no longer, of the replica and its ranks."""
        for member in [each for each in self._contents if _replica(each) == replica]:
            del self._contents[member]
        self._to_pass_on.set()

    def _emptied(self, member: str) -> None:
        """The engine cleared its cache. As after a restart, nothing counts that was told before; one router says so."""
        if self.is_writer(member):
            self._declare_later(member, EMPTIED)

    def left(self, replica: str) -> None:
        """It is no longer this router's to send to; what the store knows of it is for others to use."""
        for member in self._members_of(replica):
            seat = self._seats.pop(member, None)
            self._asked.clear()
            if seat is not None:
                self._names.pop(seat.slot, None)
            for known in (self._lives, self._undeclared, self._disputed, self._writes, self._contents, self._ranks):
                known.pop(member, None)
            self._told.discard(member)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Try once, so that the first decision already knows what the store knows; go on in the background."""
        first = await self._attempt()
        self._tasks = [
            asyncio.create_task(self._keep(first)),
            asyncio.create_task(self._tell()),
            asyncio.create_task(self._publish()),
            asyncio.create_task(self._pass_on()),
        ]

    async def stop(self) -> None:
        """Leave: what this router has booked is gone, and another may take over what it wrote."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        link, self._link = self._link, None
        if link is not None and self._store is not None:
            slots = pack_slots(seat.slot for seat in self._seats.values())
            with contextlib.suppress(LinkError, RefusedError, TimeoutError):
                async with asyncio.timeout(self._tell_seconds):
                    await self._call(link, "publish", self._store, self._me, b"0", b"", b"", slots)
        if link is not None:
            link.lost = None
            link.close()

    async def _keep(self, why: str | None) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            if why is None:
                began = loop.time()
                assert self._lost is not None
                why = await self._lost
                if loop.time() - began > self._options.retry_seconds:
                    pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._options.retry_seconds)
            why = await self._attempt()

    async def _attempt(self) -> str | None:
        """Connect and join. None, or why that did not work."""
        candidates = [each for each in (self._owner, *self._options.targets, *self._nodes) if each is not None]
        why = "no address"
        for target in dict.fromkeys(candidates):
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._open(target)
                return None
            except TimeoutError:
                why = "it does not answer"
            except (LinkError, RefusedError) as error:
                why = str(error)
            except (ValueError, TypeError, IndexError) as error:
                why = f"it does not answer like Redis: {error}"
        self._owner = None
        self._went_offline(why)
        return why

    async def _open(self, target: Target) -> None:
        for _ in range(REDIRECTIONS):
            host = self._hosts.get((target.host, target.port))
            if host is None and not target.path:
                host = self._hosts[target.host, target.port] = Name(target.host, target.port)
            link = await Link.connect(target, self._options.tls, host)
            try:
                for name in SCRIPTS:
                    self._hashes[name] = await link.call(b"SCRIPT", b"LOAD", script(name))
                store = await self._join(link, list(self._members()), self._undeclared)
                await self._look_round(link, target)
            except RefusedError as error:
                link.close()
                moved = _moved(str(error), target)
                if moved is None:
                    raise
                target = moved
                continue
            except BaseException:
                link.close()
                raise
            if link.closed:
                raise LinkError("the connection was lost")
            self._owner = target
            self._went_online(link, store)
            return
        raise LinkError("its nodes send us in circles")

    async def _join(self, link: Link, members: list[Member], news: Mapping[str, bytes]) -> bytes:
        """Tell which incarnations this router sees and what happened to them; learn numbers and epochs. Returns the
        store's id."""
        told = {member.name: self._lives.get(member.name, 0) for member in members}
        fields = [
            piece
            for member in members
            for piece in (
                member.name.encode(),
                member.start.encode(),
                member.heard.encode(),
                b"%d" % member.pool,
                news.get(member.name, b""),
            )
        ]
        reply = await self._call(link, "join", os.urandom(16), *fields)
        self._asked.clear()
        for i, member in enumerate(members):
            seat = Seat(int(reply[1 + 3 * i]), int(reply[2 + 3 * i]))
            self._seats[member.name] = seat
            self._names[seat.slot] = member.name
            ranks = read_ranks(reply[3 + 3 * i])
            self._ranks[member.name] = [f"{member.name}/{rank}" for rank in range(len(ranks))]
            self._seats.update(zip(self._ranks[member.name], ranks, strict=True))
            if told[member.name] == self._lives.get(member.name, 0):
                self._undeclared.pop(member.name, None)
        return bytes(reply[0])

    async def _look_round(self, link: Link, target: Target) -> None:
        """The nodes of a cluster, to be tried when this one is gone."""
        try:
            slots = await link.call(b"CLUSTER", b"SLOTS")
        except RefusedError:
            return  # no cluster
        self._nodes = [
            replace(target, host=node[0].decode(), port=int(node[1]), path="")
            for entry in slots
            for node in entry[2:]
            if node[0]
        ]

    # -- online and offline -------------------------------------------------------------------------------------

    def _went_online(self, link: Link, store: bytes) -> None:
        self._backlog.restart()
        emptied = self._store is not None and store != self._store
        if emptied or self._backlog.dropped_blocks > self._dropped_before:
            for entry in self._recent.again():
                self._backlog.push(entry)
        self._store = store
        for contents in self._contents.values():
            contents.anew()
        self._published.clear()
        self._refusing = False
        self._lost = asyncio.get_running_loop().create_future()
        self._link = link
        link.lost = self._on_lost
        self._to_tell.set()
        self._to_publish.set()
        if self._said_online is None:
            log.info("%s is shared by the routers of `%s`", self._owner, self._options.namespace)
        elif not self._said_online:
            away = asyncio.get_running_loop().time() - self._down_since
            lost = ", empty; it is told again what is known here" if emptied else ""
            log.info("%s is back after %.1f s%s", self._owner, away, lost)
        self._said_online = True

    def _on_lost(self, why: str) -> None:
        self._link = None
        self._hear((), 0.0)
        self._dropped_before = self._backlog.dropped_blocks
        self._writes.clear()
        self.faults += 1
        self._went_offline(why)
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(why)

    def _went_offline(self, why: str) -> None:
        if self._said_online is not False:
            where = self._owner or ", ".join(map(str, self._options.targets))
            log.warning("%s cannot be used: %s; going on from what is known here", where, why)
            self._down_since = asyncio.get_running_loop().time()
        self._said_online = False

    def _overdue(self, link: Link, future: asyncio.Future[Any], *, twice: bool = False) -> None:
        if future.done():
            return
        if not twice:
            asyncio.get_running_loop().call_later(GRACE_MS / 1000, lambda: self._overdue(link, future, twice=True))
        else:
            self.timeouts += 1
            link.close(f"no answer within {self._options.timeout_ms:g} ms")

    def _refused(self, link: Link, said: str) -> None:
        """An error as an answer. Some concern writes only; after all others the connection is made anew."""
        if any(word in said for word in ("OOM", "MISCONF", "NOREPLICAS")):
            if not self._refusing:
                self._refusing = True
                log.warning("%s takes no writes: %s", self._owner, said)
        elif "NOSTORE" in said or "NOSCRIPT" in said:
            link.close("it was emptied")
        else:
            link.close(said)

    def _taken(self) -> None:
        if self._refusing:
            self._refusing = False
            log.info("%s takes writes again", self._owner)

    # -- what is told -------------------------------------------------------------------------------------------

    def _push(self, entry: Entry) -> None:
        self._backlog.push(entry)
        self._to_tell.set()

    def _declare_later(self, member: str, news: bytes = b"") -> None:
        before = self._undeclared.get(member, b"")
        self._undeclared[member] = OTHER_PROCESS if OTHER_PROCESS in (news, before) else news or before
        self._to_tell.set()

    def _dispute(self, member: str) -> None:
        """The store has another epoch: either it or this router has not noticed a restart yet. Ask, but not always."""
        replica = _replica(member)
        now = asyncio.get_running_loop().time()
        if now - self._disputed.get(replica, float("-inf")) >= self._options.retry_seconds:
            self._disputed[replica] = now
            self._declare_later(replica)

    async def _tell(self) -> None:
        while True:
            await self._to_tell.wait()
            self._to_tell.clear()
            while (link := self._link) is not None and (self._undeclared or self._to_learn or len(self._backlog)):
                parts: list[Part] = []
                try:
                    async with asyncio.timeout(self._tell_seconds):
                        if self._undeclared or self._to_learn:
                            await self._declare(link)
                        else:
                            if self._to_publish.is_set():
                                # Blocks that are seen before the work that brings them look warm and idle.
                                self._to_publish.clear()
                                await self._tell_load(link, ())
                            parts = self._backlog.next_slice(self._seat)
                            await self._send(link, parts)
                    self._taken()
                except TimeoutError:
                    link.close("what is told takes too long")
                except RefusedError as error:
                    self._refused(link, str(error))
                    if self._link is link:
                        self._backlog.refused(parts)
                        await asyncio.sleep(self._options.retry_seconds)
                except LinkError:
                    break

    async def _declare(self, link: Link) -> None:
        wanted, everyone, self._to_learn = dict(self._undeclared), self._to_learn, False
        members = [member for member in self._members() if everyone or member.name in wanted]
        for name in wanted.keys() - {member.name for member in members}:
            del self._undeclared[name]
        if members:
            store = await self._join(link, members, wanted)
            if store != self._store:
                link.close("it was emptied")
            self._to_pass_on.set()

    def _seat(self, entry: Entry) -> Seat | None:
        if entry.life != self._lives.get(entry.replica, 0):
            return None
        return self._seats.get(entry.replica)

    async def _send(self, link: Link, parts: list[Part]) -> None:
        if parts and self._store is not None:
            pieces = [piece for part in parts for piece in (part.head, part.keys)]
            bases = await self._call(link, "record", self._store, self._ttl, *pieces)
            for replica in self._backlog.told(parts, bases):
                self._dispute(replica)

    async def _publish(self) -> None:
        loop = asyncio.get_running_loop()
        every = self._options.lease_seconds / 4
        leased_at = float("-inf")
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._to_publish.wait()
            self._to_publish.clear()
            link = self._link
            if link is None:
                leased_at = float("-inf")
                continue
            now = loop.time()
            claims, gone = self._claims() if now - leased_at >= every or self._claimed_anew() else ([], [])
            try:
                async with asyncio.timeout(self._tell_seconds):
                    mine = await self._tell_load(link, claims, gone)
            except TimeoutError:
                link.close("what is told takes too long")
            except RefusedError as error:
                self._refused(link, str(error))
                await asyncio.sleep(every)
            except LinkError:
                continue
            else:
                if claims or gone or now - leased_at >= every:
                    leased_at = now
                    self._leased(claims, mine, now + self._options.lease_seconds)
                await asyncio.sleep(PUBLISH_SECONDS)

    async def _tell_load(self, link: Link, claims: Sequence[str], gone: Sequence[str] = ()) -> bytes:
        """Tell this router's load, and hear the others'. Returns a byte for each of `claims`: whether this router tells
        its contents for the next lease. `gone`: those of which it can tell no more."""
        loop = asyncio.get_running_loop()
        load = pack_load(
            (self._seats[busy.name].slot, busy.load, busy.head_ms)
            for busy in self._loads(loop.time())
            if busy.name in self._seats
        )
        slots = (pack_slots(self._seats[name].slot for name in names) for names in (claims, gone))
        assert self._store is not None
        reply = await self._call(link, "publish", self._store, self._me, self._lease, load, *slots)
        if reply[1] != self._numbered:
            # Others may have come to hear a replica's ranks one by one.
            self._to_learn = self._numbered is not None
            self._numbered = reply[1]
            self._to_tell.set()
        self._hear(reply[2:], loop.time())
        return bytes(reply[0])

    # -- contents -----------------------------------------------------------------------------------------------

    def _tellable(self) -> set[str]:
        return {name for name, each in self._contents.items() if each.tellable and name in self._seats}

    def _claimed_anew(self) -> bool:
        return self._tellable() != self._claimed

    def _claims(self) -> tuple[list[str], list[str]]:
        """What this router can tell of, and what it could until now."""
        tellable = self._tellable()
        gone = [name for name in self._claimed - tellable if name in self._seats]
        self._claimed = tellable
        for name in gone:
            self._writes.pop(name, None)
        return list(tellable), gone

    def _leased(self, claims: Sequence[str], mine: bytes, until: float) -> None:
        for name, writes in zip(claims, mine, strict=True):
            if writes and not self.is_writer(name):
                self._contents[name].anew()
                self._to_pass_on.set()
            self._writes[name] = until if writes else 0.0

    async def _pass_on(self) -> None:
        """Tell what the engines hold of which this router is the writer, a slice of each in turn."""
        every = self._options.ttl_seconds / 3
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every / 4):
                    await self._to_pass_on.wait()
            self._to_pass_on.clear()
            if self._claimed_anew():
                self._to_publish.set()
            more = True
            while more:
                more = False
                for name, contents in list(self._contents.items()):
                    seat, link = self._seats.get(name), self._link
                    if link is None or seat is None or not (contents.tellable and self.is_writer(name)):
                        more |= contents.pass_over()
                    elif name not in self._undeclared and contents.waiting(seat, loop.time(), every):
                        more |= await self._pass_slice(link, name, contents, seat)
                if more:
                    await asyncio.sleep(0)

    async def _pass_slice(self, link: Link, name: str, contents: Contents, seat: Seat) -> bool:
        """Whether there may be more to tell at once."""
        assert self._store is not None
        pieces = contents.next_slice(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self._tell_seconds):
                done = await self._call(
                    link, "contents", self._store, self._ttl, self._me, self._lease, pack_seat(seat), *pieces
                )
        except TimeoutError:
            link.close("what is told takes too long")
        except RefusedError as error:
            contents.anew()
            self._refused(link, str(error))
            if self._link is link:
                await asyncio.sleep(self._options.retry_seconds)
                self._to_pass_on.set()
        except LinkError:
            pass  # all is told again on the next connection
        else:
            contents.told(done)
            if done >= 0:
                self._taken()
                return True
            if done == OTHER_WRITER:
                self._writes.pop(name, None)
            else:
                self._dispute(name)
        return False

    # -- bytes --------------------------------------------------------------------------------------------------

    def _call(self, link: Link, script: str, *arguments: bytes) -> asyncio.Future[Any]:
        return link.call(b"EVALSHA", self._hashes[script], b"1", self._namespace, *arguments)

    def _pack(self, keys: Sequence[int]) -> bytes:
        """A chain is asked for and then recorded: packed once."""
        known = self._packed.get(id(keys))
        if known is not None and known[0] is keys and len(known[1]) == len(keys) * KEY_BYTES:
            return known[1]
        packed = self._pack_on(keys) if len(keys) > LONG else pack_keys(keys)
        if len(self._packed) >= PACKED:
            del self._packed[next(iter(self._packed))]
        self._packed[id(keys)] = (keys, packed)
        return packed

    def _pack_on(self, keys: Sequence[int]) -> bytes:
        """Most chains go on from one that was packed lately: an answer from its prompt, a turn from the one before.
        Keys name what comes before them: where one is the same, so are all before it."""
        for _, packed in reversed(self._packed.values()):
            done = len(packed) // KEY_BYTES
            if LONG < done <= len(keys) and int.from_bytes(packed[-KEY_BYTES:], "big") == keys[done - 1]:
                return packed + pack_keys(keys[done:])
        return pack_keys(keys)

    def _hear(self, published: Sequence[bytes], now: float) -> None:
        seen = {load: self._published.get(load, now) for load in published}
        self._published = seen
        loads: dict[int, Others] = {}
        for load in published:
            add_load(load, (now - seen[load]) * 1000, loads)
        self.others = {self._names[slot]: load for slot, load in loads.items() if slot in self._names}
        self._heard(self.others)


def _replica(member: str) -> str:
    """The replica that a member is, or is a rank of."""
    return member.partition("/")[0]


def _moved(said: str, target: Target) -> Target | None:
    """Where a cluster's node says that our keys are: "MOVED 866 10.0.0.2:6379", the host empty where it is its own."""
    words = said.split()
    if len(words) != 3 or words[0] != "MOVED":
        return None
    host, _, port = words[2].rpartition(":")
    return replace(target, host=host or target.host, port=int(port), path="")
