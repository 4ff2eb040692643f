"""Builds the parts, gives each what it needs, starts them in order and stops them in the other."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from prometheus_client.core import CounterMetricFamily

from router import gauges, logs
from router.access import AccessLog, refused_line
from router.admin.api import application
from router.admin.replicas import listed
from router.admin.serving import serve, serve_privately
from router.announcement import announcement, does
from router.choose.dispatch import Dispatch
from router.choose.policies import policy
from router.config import ConfigError, Settings, reloaded, urls
from router.course import Rules
from router.credentials import Credentials, for_replicas
from router.feeds import Feeds
from router.fleet.discovery import Fleet, members
from router.fleet.links import LinkError, Links, told
from router.fleet.probe import Probe
from router.fleet.rates import Rates
from router.fleet.replica import Role, State
from router.fleet.subscription import SourceError, parse_sources
from router.handoff.bootstrap import engines
from router.handoff.connector import WrongParametersError
from router.handoff.connectors import Connectors
from router.index.feedback import Feedback
from router.index.memory import Index
from router.index.neighbours import Neighbours
from router.index.shared import Busy, Member, Options, Shared
from router.index.shared_codec import Others
from router.index.shared_embedded import Embedded
from router.index.shared_index import ToldIndex, member
from router.index.shared_link import parse_targets, read_password, tls_context
from router.journey import Journey
from router.learning import tell
from router.listening import BACKLOG, loopback, url
from router.listening import listen as bind
from router.prompt.readers import Readers
from router.prompt.tokens import TokenizerError
from router.reading import Reading
from router.roster import Roster
from router.telemetry import Telemetry
from router.tracing import Tracer
from router.wire.attempts import Patience
from router.wire.front import Door, Limits
from router.wire.own import Own
from router.wire.upstream import Pool

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.core import Metric

    from router.choose.policies import Policy
    from router.config import Address
    from router.fleet.replica import Replica
    from router.fleet.subscription import Source
    from router.index.shared_link import Target
    from router.wire.front import Front
    from router.worker import Place

log = logging.getLogger("warmroute")

# Once one replica is ready, the others get this long to be in the start-up block.
LATECOMERS_SECONDS = 0.3
# What clients are told when they are cut gets this long to be read.
LAST_WORDS_SECONDS = 0.5
SWITCH_SECONDS = 0.0005


class Router:
    """A running router. `async with Router(settings) as router:` serves until the block is left."""

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        """`place`: it is one of several workers. Raises ConfigError for settings that cannot work on this machine."""
        self._place = place
        self.settings = settings
        try:
            self.readers = Readers(settings.prompt.tokenizer, settings.prompt.prompt_memory_bytes)
        except TokenizerError as error:
            raise ConfigError(f"--tokenizer {settings.prompt.tokenizer}: {error}") from None
        self._credentials = Credentials.read(settings)
        if settings.trace.otlp_endpoint and not settings.trace.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint {settings.trace.otlp_endpoint} is no URL, as http://collector:4318")
        if settings.listen.port == settings.admin.admin_port > 0:
            raise ConfigError(f"--port and --admin-port are both {settings.listen.port}")
        _check_admin(settings, self._credentials)
        self.fleet = Fleet(
            settings.replicas, prefill=urls(settings.handoff.prefill), decode=urls(settings.handoff.decode)
        )
        self.shared: Shared | None = None
        self.neighbours: Neighbours | None = None
        """The other workers, where these share nothing over a store."""
        self._embedded: Embedded | None = None
        self.index = self._indexed()
        self.feedback = Feedback()
        self.rates = Rates(settings.choice.prefill_tokens_per_second)
        self.telemetry = Telemetry()
        self.telemetry.gauges(self._gauges)
        handoff = settings.handoff
        try:
            self.links = Links(told(handoff.kv_link), bytes_per_token=handoff.kv_bytes_per_token)
        except LinkError as error:
            raise ConfigError(f"--kv-link {error}") from None
        self.connectors = Connectors(handoff.connector)
        self.address = ("", 0)
        self.admin_address: tuple[str, int] | None = None
        self.leaving = False
        self.terminated = False
        """A supervisor ends us: load balancers are given the grace to look elsewhere."""
        self._event_sources = _event_sources(settings)
        self.feeds: Feeds | None = None
        self._stack = AsyncExitStack()
        self._pools: dict[str, Pool] = {}
        self._roster: Roster | None = None
        self._session: aiohttp.ClientSession | None = None
        self._probe_headers = self._credentials.probe_headers
        self._dispatch = Dispatch(self.index, self.rates, _policy(settings))
        self._journey: Journey | None = None
        self._reloading = asyncio.Lock()
        self._listening: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._replica_tls = self._credentials.replicas
        self.door: Door | None = None

    async def __aenter__(self) -> Router:
        try:
            return await self._open()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _open(self) -> Router:
        settings = self.settings
        fleet, listen = settings.fleet, settings.listen
        if self._embedded is not None:
            self._targets[:] = [await self._stack.enter_async_context(self._embedded)]
        reading = Reading(self.fleet, self.readers, settings.prompt.hash_seed)
        self._stack.callback(reading.close)
        journey = Journey(
            fleet=self.fleet,
            pools=self._pools,
            reading=reading,
            dispatch=self._dispatch,
            feedback=self.feedback,
            telemetry=self.telemetry,
            rules=_rules(settings, self._credentials),
            handoff=settings.handoff,
            connectors=self.connectors,
            links=self.links,
            shared=self.shared or self.neighbours,
        )
        self._journey = journey
        if settings.log.access_log:
            journey.access = AccessLog(settings.log.access_log)
        self._stack.callback(self._close_access)
        if settings.trace.otlp_endpoint:
            journey.tracer = Tracer(
                settings.trace.otlp_endpoint,
                ratio=settings.trace.otlp_sample_ratio,
                headers=self._credentials.otlp_headers,
                now=time.time,
                version=version("warmroute"),
            )
            await journey.tracer.start()
            self._stack.push_async_callback(journey.tracer.stop)
        self._stack.push_async_callback(journey.divided.close)
        # A thread that reads a long prompt gives way to the event loop this soon (the default is 5 ms).
        sys.setswitchinterval(SWITCH_SECONDS)
        own = Own(
            journey.serve,
            missing=self._missing,
            lacking=self.fleet.lacking,
            metrics=self._page if self._place is None else self._place.metrics,
            models=self._models,
        )
        self.door = Door(own.serve, _limits(settings), self._refused)
        self.door.keys = self._credentials.clients
        # From here on clients can connect; they are let in once it is known who is there to serve them.
        listening = bind(listen.host, listen.port, together=self._place is not None)
        self._stack.callback(listening.close)
        host, port = listening.getsockname()[:2]
        self.address = (host, port)
        replica_tls = self._credentials.replicas
        session = self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=replica_tls), trust_env=False
            )
        )
        self.feeds = Feeds(
            self.index,
            session,
            ask=settings.events.kv_events,
            configured=self._event_sources,
            hash_seed=settings.prompt.hash_seed,
            max_blocks=settings.choice.max_pool_blocks,
            timeout_seconds=fleet.probe_timeout_seconds,
            headers=self._probe_headers,
            anew=self._published_anew,
            changed=self.shared.changed if self.shared is not None else _ignore,
        )
        self._stack.push_async_callback(self.feeds.close)
        roster = self._roster = Roster(
            fleet=self.fleet,
            index=self.index,
            pools=self._pools,
            feeds=self.feeds,
            feedback=self.feedback,
            rates=self.rates,
            telemetry=self.telemetry,
            shared=self.shared,
            connectors=self.connectors,
            links=self.links,
            blocks=settings.choice.default_pool_blocks,
            pool=lambda address: Pool(
                address,
                connect_seconds=fleet.connect_timeout_seconds,
                idle_seconds=fleet.upstream_idle_seconds,
                tls=replica_tls if address.tls else None,
            ),
            probe=lambda replica: Probe(
                replica,
                session,
                every_seconds=fleet.probe_seconds,
                timeout_seconds=fleet.probe_timeout_seconds,
                silence_seconds=fleet.silence_seconds,
                headers=self._probe_headers,
                ready=self._ready,
                restarted=self._restarted,
                sized=self._sized,
                given_up=self._given_up,
            ),
        )
        self._stack.push_async_callback(roster.close)
        await self._start_admin(journey)
        await self._first_ready([roster.begin(replica) for replica in self.fleet])
        if self.neighbours is not None:
            await self.neighbours.start()
            self._stack.push_async_callback(self.neighbours.stop)
        if self.shared is not None:
            await self.shared.start()
            self._stack.push_async_callback(self.shared.stop)
        sweeping = asyncio.create_task(self._sweep(roster))
        self._stack.push_async_callback(_cancel, [sweeping])
        self._replica_tls, self._listening = replica_tls, listening
        await self._let_in()
        # First of all that is taken down: while answers end, everything else goes on.
        self._stack.push_async_callback(self._stop)
        return self

    async def _let_in(self) -> None:
        """Take clients' connections from now on, with the certificate that holds now. Those that are waiting to be let
        in lose nothing by it: what listens stays the same."""
        assert self.door is not None
        assert self._listening is not None
        before, tls = self._server, self._credentials.front
        self._server = await asyncio.get_running_loop().create_server(
            cast("Callable[[], asyncio.Protocol]", self.door.connection),
            sock=self._listening.dup(),
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.settings.listen.header_timeout_seconds,
        )
        if before is not None:
            before.close()

    async def _first_ready(self, rounds: list[asyncio.Task[None]]) -> None:
        """Wait until a replica is ready, or each has been asked; then a moment more, for the others to be named too."""
        pending = set(rounds)
        while pending and not self.fleet.ready():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=LATECOMERS_SECONDS)

    async def reload(self, wanted: Settings) -> None:
        """Take up other settings, and what the files that they name hold by now. No answer under way notices. Raises
        ConfigError where something is wrong; then all stays as it was."""
        async with self._reloading:
            if self.leaving:
                return
            settings, changed, fixed = reloaded(self.settings, wanted)
            credentials, sources = Credentials.read(settings), _event_sources(settings)
            _check_admin(settings, credentials)
            access = self._journey.access if self._journey is not None else None
            if "access_log" in changed:
                access = AccessLog(settings.log.access_log) if settings.log.access_log else None
            for name in fixed:
                log.warning("%s is read at start alone: a restart is needed for another one", name)
            assert self.door is not None
            assert self._journey is not None
            assert self._roster is not None
            assert self.feeds is not None
            encrypted = self._credentials.front is not None
            self.settings, self._credentials = settings, credentials
            self.door.limits, self.door.keys = _limits(settings), credentials.clients
            self._journey.rules = _rules(settings, credentials)
            if "access_log" in changed:
                self._close_access()
                self._journey.access = access
            elif access is not None:
                access.reopen()
            logs.set_level(settings.log.log_level)
            # Pools and probes hold on to the one context that there is.
            for_replicas(settings, self._replica_tls)
            if encrypted or credentials.front is not None:
                await self._let_in()
            if {"policy", "tie_band_ms"} & set(changed):
                self._dispatch.policy = _policy(settings)
            self._probe_headers.clear()
            self._probe_headers.update(credentials.probe_headers)
            elsewhere = self.feeds.configure(sources)
            come, gone = await self._roster.become(_members(settings))
            for replica in self.fleet.ready():
                if replica.name in elsewhere and replica.name not in come:
                    log.info("%s: %s", replica.name, await self.feeds.attach(replica, exact=self._exact(replica)))
            said = [*(f"+{name}" for name in come), *(f"-{name}" for name in gone), *changed]
            log.info("settings reloaded: %s", ", ".join(said) or "no setting differs; files of keys were read anew")

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start_admin(self, journey: Journey) -> None:
        async def explain(path: str, body: bytes) -> dict[str, Any]:
            return (await journey.explain(path, body)).document()

        async def replicas() -> list[dict[str, Any]]:
            now = asyncio.get_running_loop().time()
            return [
                listed(
                    replica,
                    self.feedback.of(replica.name),
                    blocks=self.index.blocks(replica.name),
                    residency=None if self.feeds is None else self.feeds.describe(replica.name),
                    now=now,
                )
                for replica in self.fleet
            ]

        admin, place = self.settings.admin, self._place
        if place is None and admin.admin_port < 0:
            return
        app = application(
            # The supervisor asks for the token; to it alone a worker's own socket is open.
            token=lambda: self._credentials.admin_token if place is None else None,
            explain=explain,
            replicas=replicas,
            metrics=self._page,
            max_body_bytes=self.settings.listen.max_body_bytes,
        )
        if place is None:
            self.admin_address = await serve(self._stack, app, admin.admin_host, admin.admin_port)
        else:
            await serve_privately(self._stack, app, place.socket)

    def _close_access(self) -> None:
        if self._journey is not None and self._journey.access is not None:
            self._journey.access.close()

    def _refused(self, status: int, client: Front) -> None:
        """A client was turned away before there was a request."""
        self.telemetry.request("refused", status)
        if self._journey is not None and self._journey.access is not None:
            self._journey.access.write(refused_line(client, status, now=time.time()))

    async def _page(self) -> bytes:
        return self.telemetry.page()

    # -- what probes find ---------------------------------------------------------------------------------------

    async def _ready(self, replica: Replica) -> str:
        """A replica told its models: find their tokenizers before it is given requests."""
        self.fleet.settle_roles()
        said = [does(replica)] if self.fleet.divided else []
        for card in replica.models.values():
            if card.parent is None:
                reader = await asyncio.to_thread(self.readers.find, card.id, card.root)
                said.append(f"{card.id}, read as {reader.mode}")
            else:
                said.append(f"{card.id}, an adapter of {card.parent}")
        assert self.feeds is not None
        said.append(await self.feeds.attach(replica, exact=self._exact(replica)))
        if (why := await self._locate(replica)) is not None:
            said.append(f"its KV cannot be fetched yet: {why}")
        return "; ".join(said)

    async def _locate(self, replica: Replica) -> str | None:
        """Where others reach its KV, with a connector whose answers do not tell. Returns what is wrong, if anything."""
        handoff, session = self.settings.handoff, self._session
        if handoff.connector != "mooncake" or not replica.prefills or session is None:
            return None
        if self.connectors.origin(replica.name, None) is not None:
            return None
        timeout = self.settings.fleet.probe_timeout_seconds
        try:
            found = await engines(session, replica.address, handoff.mooncake_bootstrap_port, timeout)
        except WrongParametersError as error:
            return str(error)
        self.connectors.told(replica.name, found)
        return None

    def _exact(self, replica: Replica) -> bool:
        """Whether its prompts are read as token ids."""
        return all(self.readers[card.id].exact for card in replica.models.values() if card.parent is None)

    def _restarted(self, replica: Replica) -> None:
        assert self.feeds is not None
        if not self.feeds.restarted(replica.name, replica.metrics.started):
            self.index.restart(replica.name)
        if self.shared is not None:
            self.shared.restarted(replica.name)
        self.connectors.forget(replica.name)
        self.rates.forget(replica.name)
        self.feedback.forget(replica.name)

    def _given_up(self, replica: Replica, why: str) -> None:
        self._pools[replica.name].lost(why)

    def _published_anew(self, replica: str, rank: int | None) -> None:
        """KV events tell of another process sooner than probes do."""
        if self.shared is not None:
            self.shared.published_anew(member(replica, rank))

    def _sized(self, replica: Replica) -> None:
        choice = self.settings.choice
        pool = replica.cache.capacity or choice.default_pool_blocks
        # What predictions proved too high for is not there for us, whatever the engine says.
        if self.feeds is None or not self.feeds.live(replica.name):
            pool = int(pool * self.feedback.of(replica.name).pool_share)
        self.index.size(replica.name, min(max(1, pool), choice.max_pool_blocks))

    # -- what routers share -------------------------------------------------------------------------------------

    def _indexed(self) -> Index:
        """The index, and beside it, with --redis, what is shared with other routers. Raises ConfigError."""
        chosen = self.settings.shared
        self._targets: list[Target] = []
        if not chosen.redis:
            if self._place is None:
                return Index()
            self.neighbours = Neighbours(
                self._place.directory,
                self._place.number,
                self.settings.listen.workers,
                loads=self._loads,
                heard=self._heard,
            )
            return self.neighbours.index
        password = read_password(chosen.redis_password_file)
        if chosen.redis == "embedded":
            self._embedded = Embedded()
        else:
            self._targets += parse_targets(chosen.redis, password)
        self.shared = Shared(
            Options(
                self._targets,
                tls=tls_context(chosen.redis_ca_file) if any(target.tls for target in self._targets) else None,
                namespace=chosen.redis_namespace,
                timeout_ms=chosen.redis_timeout_ms,
                retry_seconds=chosen.redis_retry_seconds,
                ttl_seconds=chosen.redis_ttl_seconds,
                lease_seconds=chosen.redis_lease_seconds,
                queue_blocks=chosen.redis_queue_blocks,
            ),
            members=self._members,
            loads=self._loads,
            heard=self._heard,
        )
        return ToldIndex(self.shared)

    def _members(self) -> Iterable[Member]:
        for replica in self.fleet:
            # Of one that is lost only the past is known: another router may see its next process already.
            started = None if replica.state is State.LOST else replica.metrics.started
            known = self.index.capacity(replica.name) if replica.cache.capacity else 0
            start = _time(started)
            ranks = self.feeds.first_heard(replica.name) if self.feeds is not None else {}
            if len(ranks) == 1:
                yield Member(replica.name, start, known, _time(*ranks.values()))
                continue
            for rank, first in ranks.items():  # these first, so that they are known to be the replica's
                yield Member(member(replica.name, rank), start, known, _time(first))
            yield Member(replica.name, start, known)

    def _loads(self, now: float) -> Iterable[Busy]:
        for replica in self.fleet:
            load = replica.load
            routed = load.routed(now)
            if load.in_flight or routed >= 1:
                waiting = load.waiting_ms(now)
                yield Busy(replica.name, Others(load.in_flight, load.decoding, waiting, routed), load.head_ms(now))

    def _heard(self, others: Mapping[str, Others]) -> None:
        for replica in self.fleet:
            replica.elsewhere = others[replica.name].in_flight if replica.name in others else 0

    async def _sweep(self, roster: Roster) -> None:
        while True:
            await asyncio.sleep(1.0)
            roster.sweep()
            for pool in self._pools.values():
                pool.close_idle()
            self.fleet.settle_roles()
            for replica in self.fleet.ready():
                self._sized(replica)
                exact, metrics = self._exact(replica), replica.metrics
                change = self.feedback.counted(replica.name, hits=metrics.hits, queries=metrics.queries, exact=exact)
                if change is not None:
                    tell(change)
            await asyncio.gather(*map(self._locate, self.fleet.ready()))

    # -- what others ask ----------------------------------------------------------------------------------------

    def _missing(self) -> list[str]:
        if self.leaving:
            return ["the router is shutting down"]
        return self.fleet.missing()

    def _models(self) -> list[dict[str, Any]] | None:
        """The router's own list of models. Where it is for the replicas to judge clients' keys, one of them has to be
        asked: a stranger is told nothing here."""
        judged_there = self._credentials.clients is None and self._credentials.replica_key is not None
        return None if judged_there else self.fleet.models()

    def _gauges(self) -> Iterable[Metric]:
        now = asyncio.get_running_loop().time()
        yield from gauges.of_replicas(self.fleet, self.index, self.rates, self.feedback, now=now)
        journey = self._journey
        if self.fleet.divided and journey is not None:
            yield from gauges.of_splits(self.fleet, journey.divided.pinned, self.links)
        if self.shared is not None:
            yield from gauges.of_store(self.shared)
        if self.neighbours is not None:
            yield CounterMetricFamily(
                "warmroute_workers_untold", "Messages that another worker had no room for.", self.neighbours.untold
            )
        if self.feeds is not None:
            yield from self.feeds.metrics()
        yield from gauges.of_clients(self.door)
        if journey is not None and (tracer := journey.tracer) is not None:
            yield CounterMetricFamily("warmroute_dropped_spans", "Spans never told.", float(tracer.dropped))
        if journey is not None and (access := journey.access) is not None:
            yield CounterMetricFamily(
                "warmroute_access_log_dropped_lines", "Lines that found no room.", float(access.dropped)
            )

    def announcement(self) -> str:
        """The start-up block."""
        return announcement(
            self.settings,
            self.fleet,
            self.readers,
            self.feeds,
            listens=url(self.address, tls=self._credentials.front is not None),
            admin=None if self.admin_address is None else url(self.admin_address),
            shared=None if self.shared is None else self.shared.where,
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End at once whatever still runs."""
        if self.door is not None:
            self.door.abort()

    async def _stop(self) -> None:
        """Say so on /ready, stop listening, let running answers end, cut what is left after `drain_seconds`."""
        assert self.door is not None
        self.leaving = True
        if self.terminated and self.settings.listen.grace_seconds:
            log.info("not ready from now on, serving %g s more", self.settings.listen.grace_seconds)
            await asyncio.sleep(self.settings.listen.grace_seconds)
        assert self._server is not None
        assert self._listening is not None
        self._server.close()
        self._listening.close()
        self.door.drain()
        drain = self.settings.listen.drain_seconds
        if self.door.connections:
            log.info("waiting up to %g s for %d open connections", drain, len(self.door.connections))
        if not await self._all_gone(self.door, drain):
            log.warning("cutting %d answers that did not end in time", len(self.door.connections))
            self.door.cut()
            await self._all_gone(self.door, LAST_WORDS_SECONDS)
        self.door.abort()
        await asyncio.sleep(0)
        for pool in self._pools.values():
            pool.close_idle(older_than=0.0)

    @staticmethod
    async def _all_gone(door: Door, seconds: float) -> bool:
        """Wait for the clients to go, so long at the most."""
        deadline = asyncio.get_running_loop().time() + seconds
        while door.connections and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - the end is near
            await asyncio.sleep(0.02)
        return not door.connections


def _members(settings: Settings) -> dict[Address, Role | None]:
    return members(settings.replicas, prefill=urls(settings.handoff.prefill), decode=urls(settings.handoff.decode))


def _limits(settings: Settings) -> Limits:
    listen = settings.listen
    return Limits(
        header_bytes=listen.max_header_bytes,
        header_count=listen.max_headers,
        body_bytes=listen.max_body_bytes,
        buffered_bytes=listen.max_buffered_bytes,
        connections=listen.max_connections,
        connections_per_address=listen.max_connections_per_address,
        header_seconds=listen.header_timeout_seconds,
        body_seconds=listen.body_timeout_seconds,
        idle_seconds=listen.keep_alive_seconds,
    )


def _rules(settings: Settings, credentials: Credentials) -> Rules:
    fleet = settings.fleet
    return Rules(
        patience=Patience(
            fleet.first_byte_timeout_seconds, fleet.idle_timeout_seconds, settings.listen.sse_keep_alive_seconds
        ),
        max_attempts=fleet.max_attempts,
        show_choice=settings.listen.show_choice,
        resume=fleet.resume_streams,
        replica_headers=credentials.request_headers,
    )


def _policy(settings: Settings) -> Policy:
    return policy(settings.choice.policy, tie_band_ms=settings.choice.tie_band_ms)


def _event_sources(settings: Settings) -> dict[str, dict[int, Source]]:
    try:
        sources = parse_sources(settings.events.event_sources)
    except SourceError as error:
        raise ConfigError(f"--event-sources {error}") from None
    names = {address.name for address in _members(settings)}
    if unknown := [name for name in sources if name not in names]:
        raise ConfigError(f"--event-sources names {unknown[0]}, which is not among the replicas")
    return sources


def _check_admin(settings: Settings, credentials: Credentials) -> None:
    admin = settings.admin
    if credentials.admin_token is None and admin.admin_port >= 0 and not loopback(admin.admin_host):
        raise ConfigError(f"--admin-host {admin.admin_host} is not loopback: name a token with --admin-token-file")


def _ignore(_: str) -> None:
    pass


def _time(first: float | None) -> str:
    return "" if first is None else repr(first)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
