"""Which replicas publish KV events, and who hears them: connects subscriptions, feeds and index."""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import zmq.asyncio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.fleet.subscription import Source, SourceError, Subscription, read_sources
from router.index.feed import Feed, State
from router.index.naming import Mode, Naming
from router.prompt.hashing import Hashing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from router.fleet.replica import Replica
    from router.index.memory import Index

log = logging.getLogger("warmroute.events")

SETTLE_SECONDS = 2.0
"""A replica that becomes ready waits this long for what it published so far."""
ASK_AGAIN_SECONDS = 10.0
MAX_PAGE_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class Listening:
    """One rank that is heard."""

    rank: int
    source: Source
    feed: Feed
    subscription: Subscription
    task: asyncio.Task[None]


class Feeds:
    """`ask`: whether replicas are asked for their sources. `configured`: sources by replica; they win."""

    def __init__(
        self,
        index: Index,
        session: aiohttp.ClientSession,
        *,
        ask: bool,
        configured: dict[str, dict[int, Source]],
        hash_seed: str | None,
        max_blocks: int,
        timeout_seconds: float,
        headers: dict[str, str],
        anew: Callable[[str, int | None], None] = lambda _replica, _rank: None,
        changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`anew` is told of a replica, or one rank of several, in whose place another process publishes; `changed` of a
        replica whose events came to mean something else."""
        self._index = index
        self._tell_anew = anew
        self._tell_changed = changed
        self._session = session
        self._ask = ask
        self._configured = configured
        self._hash_seed = hash_seed
        self._max_blocks = max_blocks
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._headers = headers
        self._context = zmq.asyncio.Context()
        self._heard: dict[str, list[Listening]] = {}
        self._sources: dict[str, dict[int, Source]] = {}
        self._said: dict[str, str] = {}
        self._asking: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._heard):
            await self._stop(name)
        self._context.destroy(linger=0)

    async def attach(self, replica: Replica, *, exact: bool) -> str:
        """Hear a replica that is about to be ready. `exact`: its prompts are read as token ids. What is to be said."""
        why = "it publishes no KV events"
        try:
            sources = await self._find(replica)
        except SourceError as error:
            sources, why = {}, str(error)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # No answer is no news.
            sources, why = self._sources.get(replica.name, {}), f"/kv_event_sources: {error or type(error).__name__}"
            self._ask_again(replica, exact)
        if sources and not exact:
            sources, why = {}, "KV events are of no use without a tokenizer"
        if sources != self._sources.get(replica.name, {}):
            await self._stop(replica.name)
        if not sources:
            replica.hashing = None
            return f"predicted: {why}"
        assumed = Hashing(replica.algorithm, self._hash_seed)
        if replica.name not in self._heard:
            self._start(replica, sources, assumed)
        for each in self._heard[replica.name]:
            naming = each.feed.naming
            if naming.block_size != replica.block_size or (
                naming.mode is Mode.UNPROVEN and naming.hashing.algorithm != assumed.algorithm
            ):
                naming.assume(assumed, replica.block_size)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                for each in self._heard[replica.name]:
                    await each.subscription.settled.wait()
        return self.describe(replica.name)

    async def detach(self, name: str) -> None:
        """Hear a replica no more: it has left."""
        await self._stop(name)
        for label in [label for label in self._said if label == name or label.startswith(f"{name} rank ")]:
            del self._said[label]

    def configure(self, sources: dict[str, dict[int, Source]]) -> list[str]:
        """Other sources hold from now on. Returns the replicas whose sources change: they are to be attached anew."""
        before, self._configured = self._configured, sources
        return [name for name in before | sources if before.get(name) != sources.get(name)]

    async def _find(self, replica: Replica) -> dict[int, Source]:
        if replica.name in self._configured:
            return self._configured[replica.name]
        if not self._ask:
            return {}
        async with self._session.get(
            replica.address.url + "/kv_event_sources", timeout=self._timeout, headers=self._headers
        ) as response:
            if response.status != 200:
                return {}  # engines before this route
            page = b""
            while len(page) < MAX_PAGE_BYTES and (more := await response.content.read(MAX_PAGE_BYTES - len(page))):
                page += more
        return read_sources(page, replica.address.host)

    def _ask_again(self, replica: Replica, exact: bool) -> None:
        """A replica that does not answer is asked once more, a while later and in the background."""

        async def ask() -> None:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            self._asking.discard(replica.name)
            log.info("%s: %s", replica.name, await self.attach(replica, exact=exact))

        if replica.name not in self._asking:
            self._asking.add(replica.name)
            task = asyncio.create_task(ask())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _start(self, replica: Replica, sources: dict[int, Source], assumed: Hashing) -> None:
        blocks = replica.cache.num_gpu_blocks
        bound = min(blocks or self._max_blocks, self._max_blocks)
        known = self._index.listen(replica.name, sources, bound)
        heard = self._heard[replica.name] = []
        self._sources[replica.name] = sources

        def path(adapter: str) -> str | None:
            card = replica.models.get(adapter)
            return card.root if card is not None else None

        def new_process(rank: int) -> None:
            replica.epoch += 1
            self._tell_anew(replica.name, rank if len(sources) > 1 else None)

        for rank, source in sources.items():
            label = replica.name if len(sources) == 1 else f"{replica.name} rank {rank}"
            feed = Feed(
                known[rank],
                Naming(assumed, replica.block_size, path),
                replayable=source.replay is not None,
                new_process=functools.partial(new_process, rank),
                changed=self._changed(replica, label),
            )
            subscription = Subscription(self._context, source, feed, self._connection(label, source))
            task = asyncio.create_task(subscription.run())
            task.add_done_callback(self._ended(label, feed))
            heard.append(Listening(rank, source, feed, subscription, task))

    @staticmethod
    def _ended(label: str, feed: Feed) -> Callable[[asyncio.Task[None]], None]:
        def tell(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                # Nothing is heard any more: what is known must not be believed for ever.
                feed.known.doubt()
                log.error("%s: KV events are no longer heard, a fault of the router", label, exc_info=error)

        return tell

    async def _stop(self, name: str) -> None:
        heard = self._heard.pop(name, [])
        self._sources.pop(name, None)
        for each in heard:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in heard), return_exceptions=True)
        if heard:
            self._index.predict(name)

    def _changed(self, replica: Replica, label: str) -> Callable[[Feed], None]:
        def tell(feed: Feed) -> None:
            replica.hashing = None if feed.naming.mode is Mode.UNPROVEN else feed.naming.hashing
            self._tell_changed(replica.name)
            line = self._line(feed, self._hint(replica.name, feed))
            if self._said.get(label) != line:
                self._said[label] = line
                level = logging.WARNING if feed.state in (State.LOST, State.SILENT, State.UNUSABLE) else logging.INFO
                log.log(level, "%s: KV events: %s", label, line)

        return tell

    def _hint(self, name: str, feed: Feed) -> str:
        for each in self._heard.get(name, []):
            if each.feed is feed and feed.state is State.JOINING:
                return _check(each.source, name, connected=each.subscription.connected)
        return ""

    @staticmethod
    def _line(feed: Feed, hint: str = "") -> str:
        naming = feed.naming
        state = f"{feed.state.value}{f' ({feed.why})' if feed.why else ''}{f'; {hint}' if hint else ''}"
        if naming.mode is Mode.UNPROVEN:
            return state
        if naming.mode is Mode.TRANSLATED:
            return f"{state}; block hashes have a seed that is not known here, translated through token ids"
        seed = "the default seed" if naming.hashing.seed is None else f"PYTHONHASHSEED={naming.hashing.seed}"
        tags = "" if naming.hashing.tagged else ", extra keys untagged"
        return f"{state}; block hashes proven: {naming.hashing.algorithm}, {seed}{tags}"

    def _connection(self, label: str, source: Source) -> Callable[[str], None]:
        def tell(line: str) -> None:
            log.info("%s: KV events at %s: %s", label, source.endpoint, line)

        return tell

    def describe(self, name: str) -> str:
        """For people: how it is known what a replica holds."""
        heard = self._heard.get(name)
        if not heard:
            return "predicted"
        lines = dict.fromkeys(self._line(each.feed, self._hint(name, each.feed)) for each in heard)
        ranks = f"{len(heard)} ranks, " if len(heard) > 1 else ""
        return f"KV events: {ranks}{'; '.join(lines)}"

    def live(self, name: str) -> bool:
        """Whether events alone tell what a replica holds."""
        heard = self._heard.get(name)
        return heard is not None and all(each.feed.state is State.LIVE for each in heard)

    def restarted(self, name: str, began: float | None) -> bool:
        """Another process answers at a replica, since `began`, unix seconds, if known. False where no events are heard
        from it: whoever keeps its blocks has to forget them."""
        for each in self._heard.get(name, []):
            each.feed.restarted(began)
        return name in self._heard

    def first_heard(self, name: str) -> dict[int, float | None]:
        """For each rank that is heard the time of its process's first batch, None where that is not known."""
        return {each.rank: each.feed.first for each in self._heard.get(name, [])}

    def metrics(self) -> Iterable[Metric]:
        labels = ["replica", "rank"]

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"warmroute_kv_{name}", text, labels=labels)

        batches = counter("event_batches", "Batches of KV events applied.")
        gaps = counter("event_gaps", "Times at which batches were missing.")
        replays = counter("event_replays", "Replays asked for: one a second as a check, and one for each gap.")
        lost = counter("event_losses", "Times at which history was lost: the replica is predicted from then on.")
        malformed = counter("events_malformed", "Events or batches that made no sense.")
        repeated = counter("event_batches_repeated", "Batches that came again or too late.")
        restarts = counter("event_restarts", "Other processes seen to publish in a replica's place.")
        events = CounterMetricFamily(
            "warmroute_kv_events", "Blocks stored and removed, caches cleared.", labels=[*labels, "type"]
        )
        lag = GaugeMetricFamily(
            "warmroute_kv_event_lag_seconds", "From the last batch's time to its arrival, by two clocks.", labels=labels
        )
        state = GaugeMetricFamily(
            "warmroute_kv_event_source", "1 for the state that a source is in.", labels=[*labels, "state"]
        )
        for name, heard in self._heard.items():
            for each in heard:
                where, feed = [name, str(each.rank)], each.feed
                counts = feed.counts
                batches.add_metric(where, counts.batches)
                gaps.add_metric(where, counts.gaps)
                replays.add_metric(where, counts.replays)
                lost.add_metric(where, counts.lost)
                malformed.add_metric(where, counts.malformed)
                repeated.add_metric(where, counts.repeated)
                restarts.add_metric(where, counts.restarts)
                events.add_metric([*where, "stored"], counts.stored)
                events.add_metric([*where, "removed"], counts.removed)
                events.add_metric([*where, "cleared"], counts.cleared)
                if feed.lag is not None:
                    lag.add_metric(where, feed.lag)
                for known in State:
                    state.add_metric([*where, known.name.lower()], float(feed.state is known))
        yield from (batches, gaps, replays, lost, malformed, repeated, restarts, events, lag, state)


def _check(source: Source, replica: str, *, connected: bool) -> str:
    """What to look at where nothing is heard. vLLM listens where an endpoint has a `*`, and else connects to it
    (distributed/kv_events.py `ZmqEventPublisher`)."""
    port = source.endpoint.rpartition(":")[2]
    if source.binds:
        return (
            "" if connected else f"no engine connects to {source.endpoint}: its endpoint must be this router's address"
        )
    for endpoint in (source.endpoint, source.replay):
        if endpoint is not None and _loopback(endpoint.partition("://")[2]) and not _loopback(replica):
            return f"{endpoint} is an address within the engine's own machine: with `*` in place of it all can hear"
    if not connected:
        return (
            f"nobody listens at {source.endpoint} as seen from here: its port must be open, and the engine's "
            f'--kv-events-config needs "endpoint": "tcp://*:{port}", with the `*`'
        )
    if source.replay is not None:
        port = source.replay.rpartition(":")[2]
        return f'{source.replay} must be open too, and "replay_endpoint" needs the `*`, as in "tcp://*:{port}"'
    return ""


def _loopback(where: str) -> bool:
    host = where.rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or host.startswith("127.")
