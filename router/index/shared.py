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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from router.index.memory import Match
from router.index.shared_backlog import Backlog, Entry, Part, Recent
from router.index.shared_codec import (
    ENDED,
    FORGET,
    KEY_BYTES,
    PAGE_BLOCKS,
    RECORD,
    Others,
    Outside,
    Seat,
    add_load,
    pack_keys,
    pack_load,
    pack_slots,
    read_matches,
)
from router.index.shared_link import Link, LinkError, RefusedError, Target
from router.names import Name

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Mapping, Sequence

log = logging.getLogger("warmroute.shared")

_SCRIPTS = {name: Path(__file__).with_name(f"shared_{name}.lua") for name in ("join", "record", "consult", "publish")}
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


class Member(NamedTuple):
    """A replica as this router sees it. `start`: its process's start time as it reports it, "" where it does not;
    `pool` in blocks, 0 where it is not known."""

    name: str
    start: str
    pool: int


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
        self._namespace = b"{%s}" % options.namespace.encode()
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
        self._undeclared: dict[str, bool] = {}
        """Replicas to be told anew, with whether that begins an epoch in any case. What the store says of them until
        then is not believed."""
        self._disputed: dict[str, float] = {}
        self._backlog = Backlog(options.queue_blocks)
        self._recent = Recent(options.queue_blocks * KEY_BYTES)
        self._packed: dict[int, tuple[Sequence[int], bytes]] = {}
        self._published: dict[bytes, float] = {}
        """The other routers' loads as they came, and when they were first seen."""
        self._writes: dict[str, float] = {}
        self._owner: Target | None = None
        self._nodes: list[Target] = []
        self._lost: asyncio.Future[str] | None = None
        self._to_tell = asyncio.Event()
        self._to_publish = asyncio.Event()
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
    def dropped_blocks(self) -> int:
        """Blocks that it will never be told of: too many waited, or it would not take them."""
        return self._backlog.dropped_blocks

    def is_writer(self, replica: str) -> bool:
        """Whether this router is the one that passes the replica's KV events on to the store. True under a lease that
        is renewed while the store answers; a router that dies or loses the store is followed by another."""
        return self._writes.get(replica, 0.0) > asyncio.get_running_loop().time()

    async def consult(self, asks: Sequence[tuple[Sequence[int], Sequence[str]]]) -> Outside | None:
        """What the store knows of these chains, each given with the replicas that are asked for it, and the load that
        other routers have given to the fleet. None where it does not answer in time, now or any more."""
        link = self._link
        if link is None or self._store is None:
            return None
        arguments: list[bytes] = []
        named: list[list[str]] = []
        for keys, replicas in asks:
            known = [name for name in replicas if name in self._seats]
            named.append(known)
            arguments += [pack_slots(self._seats[name].slot for name in known), self._pack(keys)]
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
        found = read_matches(reply[0], sum(map(len, named)))
        matches: dict[str, list[Match]] = {}
        at = 0
        for names in named:
            for name in names:
                match, epoch = found[at]
                at += 1
                seat = self._seats.get(name)
                if seat is None or seat.epoch != epoch:
                    self._dispute(name)
                    match = _NOTHING
                elif name in self._undeclared:
                    match = _NOTHING
                matches.setdefault(name, []).append(match)
        self._hear(reply[1:], loop.time())
        return Outside(matches, self.others)

    def load_changed(self) -> None:
        """Something was booked, reached its first token or ended: the other routers want to know."""
        self._to_publish.set()

    def record(self, replica: str, keys: Sequence[int], *, ended: bool, prompt_end: int) -> None:
        """See `Index.record`. `prompt_end`: the number of the prompt's last whole block among `keys`."""
        if keys:
            kind = ENDED if ended else RECORD
            life = self._lives.get(replica, 0)
            entry = Entry(kind, replica, life, self._pack(keys), max(0, min(prompt_end, len(keys) - 1)))
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

    def restarted(self, replica: str, *, anew: bool = False) -> None:
        """Another process answers there: what the store holds of the replica is dead. All routers notice that; the
        first to tell begins the epoch, and `anew` begins one even if the start time is not known to have changed."""
        self._lives[replica] = self._lives.get(replica, 0) + 1
        self._declare_later(replica, anew=anew)

    def sized(self, replica: str) -> None:
        """Its pool became known, or changed."""
        self._declare_later(replica, anew=False)

    def left(self, replica: str) -> None:
        """It is no longer this router's to send to; what the store knows of it is for others to use."""
        seat = self._seats.pop(replica, None)
        if seat is not None:
            self._names.pop(seat.slot, None)
        for known in (self._lives, self._undeclared, self._disputed, self._writes):
            known.pop(replica, None)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Try once, so that the first decision already knows what the store knows; go on in the background."""
        first = await self._attempt()
        self._tasks = [
            asyncio.create_task(self._keep(first)),
            asyncio.create_task(self._tell()),
            asyncio.create_task(self._publish()),
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
                    await self._call(link, "publish", self._store, self._me, b"0", b"", slots)
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
                for name, path in _SCRIPTS.items():
                    self._hashes[name] = await link.call(b"SCRIPT", b"LOAD", path.read_bytes())
                anew = {name for name, wanted in self._undeclared.items() if wanted}
                store = await self._join(link, list(self._members()), anew)
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

    async def _join(self, link: Link, members: list[Member], anew: Iterable[str] = ()) -> bytes:
        """Tell which incarnations this router sees; learn numbers and epochs. Returns the store's id."""
        told = {member.name: self._lives.get(member.name, 0) for member in members}
        fields = [
            piece
            for member in members
            for piece in (
                member.name.encode(),
                member.start.encode(),
                b"%d" % member.pool,
                b"1" if member.name in anew else b"",
            )
        ]
        reply = await self._call(link, "join", os.urandom(16), *fields)
        for i, member in enumerate(members):
            seat = Seat(int(reply[1 + 2 * i]), int(reply[2 + 2 * i]))
            self._seats[member.name] = seat
            self._names[seat.slot] = member.name
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

    def _declare_later(self, replica: str, *, anew: bool) -> None:
        self._undeclared[replica] = anew or self._undeclared.get(replica, False)
        self._to_tell.set()

    def _dispute(self, replica: str) -> None:
        """The store has another epoch: either it or this router has not noticed a restart yet. Ask, but not always."""
        now = asyncio.get_running_loop().time()
        if now - self._disputed.get(replica, float("-inf")) >= self._options.retry_seconds:
            self._disputed[replica] = now
            self._declare_later(replica, anew=False)

    async def _tell(self) -> None:
        while True:
            await self._to_tell.wait()
            self._to_tell.clear()
            while (link := self._link) is not None and (self._undeclared or len(self._backlog)):
                parts: list[Part] = []
                try:
                    async with asyncio.timeout(self._tell_seconds):
                        if self._undeclared:
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
        wanted = dict(self._undeclared)
        members = [member for member in self._members() if member.name in wanted]
        for name in wanted.keys() - {member.name for member in members}:
            del self._undeclared[name]
        if members:
            store = await self._join(link, members, {name for name, anew in wanted.items() if anew})
            if store != self._store:
                link.close("it was emptied")

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
            names = list(self._seats) if now - leased_at >= every else []
            try:
                async with asyncio.timeout(self._tell_seconds):
                    mine = await self._tell_load(link, names)
            except TimeoutError:
                link.close("what is told takes too long")
            except RefusedError as error:
                self._refused(link, str(error))
                await asyncio.sleep(every)
            except LinkError:
                continue
            else:
                if names:
                    leased_at = now
                    for name, writes in zip(names, mine, strict=True):
                        self._writes[name] = now + self._options.lease_seconds if writes else 0.0
                await asyncio.sleep(PUBLISH_SECONDS)

    async def _tell_load(self, link: Link, names: Sequence[str]) -> bytes:
        """Tell this router's load, and hear the others'. Returns a byte for each of `names`: whether this router writes
        its events for the next lease."""
        loop = asyncio.get_running_loop()
        load = pack_load(
            (self._seats[busy.name].slot, busy.load, busy.head_ms)
            for busy in self._loads(loop.time())
            if busy.name in self._seats
        )
        slots = pack_slots(self._seats[name].slot for name in names)
        assert self._store is not None
        reply = await self._call(link, "publish", self._store, self._me, self._lease, load, slots)
        self._hear(reply[1:], loop.time())
        return bytes(reply[0])

    # -- bytes --------------------------------------------------------------------------------------------------

    def _call(self, link: Link, script: str, *arguments: bytes) -> asyncio.Future[Any]:
        return link.call(b"EVALSHA", self._hashes[script], b"1", self._namespace, *arguments)

    def _pack(self, keys: Sequence[int]) -> bytes:
        """A chain is asked for and then recorded: packed once."""
        known = self._packed.get(id(keys))
        if known is not None and known[0] is keys and len(known[1]) == len(keys) * KEY_BYTES:
            return known[1]
        packed = pack_keys(keys)
        if len(self._packed) >= PACKED:
            del self._packed[next(iter(self._packed))]
        self._packed[id(keys)] = (keys, packed)
        return packed

    def _hear(self, published: Sequence[bytes], now: float) -> None:
        seen = {load: self._published.get(load, now) for load in published}
        self._published = seen
        loads: dict[int, Others] = {}
        for load in published:
            add_load(load, (now - seen[load]) * 1000, loads)
        self.others = {self._names[slot]: load for slot, load in loads.items() if slot in self._names}
        self._heard(self.others)


_NOTHING = Match(0, False)


def _moved(said: str, target: Target) -> Target | None:
    """Where a cluster's node says that our keys are: "MOVED 866 10.0.0.2:6379", the host empty where it is its own."""
    words = said.split()
    if len(words) != 3 or words[0] != "MOVED":
        return None
    host, _, port = words[2].rpartition(":")
    return replace(target, host=host or target.host, port=int(port), path="")
