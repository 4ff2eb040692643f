"""Hears one publisher of KV events over ZeroMQ and keeps its feed in order. The I/O around `router.index.feed`.

vLLM publishes on a PUB socket and replays on a ROUTER (distributed/kv_events.py `ZmqEventPublisher`). What is published
is read in slices of a millisecond, so that a busy publisher never holds the event loop; while a replay runs it waits in
the socket's own bounded queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_SECONDS = 0.001
"""The event loop is given back after this long."""
CHECK_SECONDS = 1.0
"""How often the publisher is asked for what it published last: nothing else tells of a last batch that was lost."""
CHECK_AGAIN_SECONDS = 30.0
"""How long a publisher that did not answer is not asked again, unless something is missing."""
REPLAY_SECONDS = 5.0
"""Longest wait for a batch of a replay; vLLM looks for such questions every 0.1 s."""
REPLAYING_MS = 20
QUEUE_BATCHES = 10_000
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HEARTBEAT_MS = 5_000


class SourceError(ValueError):
    """A source of events that cannot be used. One clear line."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one data-parallel rank publishes. `binds`: the router's end listens and the engine connects to it."""

    endpoint: str
    replay: str | None = None
    binds: bool = False


class Feed(Protocol):
    """What the batches are given to; see `router.index.feed.Feed`."""

    wanted: bool

    @property
    def holding(self) -> bool: ...
    def live(self, number: int, payload: bytes, now: float, wall: float) -> None: ...
    def ask(self) -> int: ...
    def replayed(self, number: int, payload: bytes) -> bool: ...
    def replay_ended(self) -> None: ...
    def replay_failed(self, why: str) -> None: ...
    def tick(self, now: float) -> None: ...
    def reconnected(self) -> None: ...


def read_sources(page: bytes, host: str) -> dict[int, Source]:
    """The answer to GET /kv_event_sources: a source for each rank, none where events are off. A wildcard stands for the
    replica's own `host`. Raises SourceError."""
    try:
        whole: Any = orjson.loads(page)
    except orjson.JSONDecodeError:
        raise SourceError("/kv_event_sources is no JSON") from None
    if not isinstance(whole, dict):
        raise SourceError("/kv_event_sources names no ranks")
    sources = {}
    for rank, config in whole.items():
        if not isinstance(config, dict) or not config.get("enable_kv_cache_events", True):
            continue
        if config.get("publisher", "zmq") != "zmq":
            continue
        endpoint, replay = config.get("endpoint"), config.get("replay_endpoint")
        if not rank.isdecimal() or not isinstance(endpoint, str) or not isinstance(replay, str | None):
            raise SourceError(f"/kv_event_sources: rank {rank!r} has no endpoint that makes sense")
        sources[int(rank)] = Source(_reachable(endpoint, host), _reachable(replay, host) if replay else None)
    return sources


def _reachable(endpoint: str, host: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "inproc":
        raise SourceError(f"events at {endpoint} never leave the engine's process")
    if scheme != "tcp":
        return endpoint
    name, _, port = rest.rpartition(":")
    if name in ("*", "0.0.0.0", "[::]", "::"):  # noqa: S104  (what the engine listens on)
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"


def parse_sources(text: str) -> dict[str, dict[int, Source]]:
    """The setting `event_sources`: REPLICA[/RANK]=ENDPOINT[,REPLAY], separated by spaces. An endpoint with a wildcard
    is one to listen on. Raises SourceError."""
    found: dict[str, dict[int, Source]] = {}
    for entry in text.split():
        name, equals, endpoints = entry.partition("=")
        endpoint, _, replay = endpoints.partition(",")
        replica, slash, rank = name.partition("/")
        if not equals or "://" not in endpoint or not replica or (slash and not rank.isdecimal()):
            raise SourceError(f"`{entry}` is not REPLICA[/RANK]=ENDPOINT[,REPLAY], as gpu1:8000=tcp://gpu1:5557")
        if replay and "://" not in replay:
            raise SourceError(f"`{entry}`: the replay endpoint must be like tcp://gpu1:5558")
        ranks = found.setdefault(replica, {})
        if int(rank or 0) in ranks:
            raise SourceError(f"`{entry}`: this rank is given twice")
        ranks[int(rank or 0)] = Source(endpoint, replay or None, binds="*" in endpoint)
    return found


class Subscription:
    """One publisher, heard until the task is cancelled. `told` is called with a line about the connection whenever that
    changes."""

    def __init__(self, context: zmq.asyncio.Context, source: Source, feed: Feed, told: Callable[[str], None]) -> None:
        self._context = context
        self._source = source
        self._feed = feed
        self._told = told
        self.connected = False
        self.settled = asyncio.Event()
        """The first replay has ended, or there is none."""
        self._asking: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Never raises for what a publisher does."""
        socket = self._context.socket(zmq.SUB)
        try:
            self._prepare(socket)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                socket.bind(self._source.endpoint) if self._source.binds else socket.connect(self._source.endpoint)
            except zmq.ZMQError as error:
                self._told(f"cannot be heard at {self._source.endpoint}: {error}")
                self.settled.set()
                return
            await self._hear(socket, zmq.Socket.shadow(monitor.underlying))
        finally:
            if self._replaying is not None:
                self._replaying.cancel()
                await asyncio.wait({self._replaying})
            socket.disable_monitor()
            socket.close(linger=0)
            self._hang_up()

    @staticmethod
    def _prepare(socket: zmq.asyncio.Socket) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUE_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)

    async def _hear(self, socket: zmq.asyncio.Socket, monitor: zmq.Socket[bytes]) -> None:
        loop, feed, replay = asyncio.get_running_loop(), self._feed, self._source.replay
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        check_at = loop.time()
        if replay is None:
            self.settled.set()
        while True:
            self._watch(monitor)
            now = loop.time()
            due = now >= check_at
            if due:
                feed.tick(now)
                check_at = now + CHECK_SECONDS
            if self._replaying is not None and self._replaying.done():
                answered, self._replaying = self._replaying.result(), None
                if not answered:
                    check_at = now + CHECK_AGAIN_SECONDS
            if replay is not None and self._replaying is None and (due or feed.wanted):
                self._replaying = asyncio.create_task(self._replay(replay))
            if self._replaying is not None and feed.wanted and feed.holding:
                await asyncio.wait({self._replaying})
            elif await socket.poll(self._patience_ms(check_at - loop.time())):
                self._watch(monitor)  # a new connection has to be known before what comes over it
                self._drain(plain)
                await asyncio.sleep(0)

    def _patience_ms(self, until_check: float) -> int:
        """How long to wait for what is published."""
        busy = self._replaying is not None or (self._feed.wanted and self._source.replay is not None)
        return min(max(0, int(until_check * 1000) + 1), REPLAYING_MS if busy else 1000)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        """What is there, for one slice of time or until it has to wait for a replay."""
        loop, feed = asyncio.get_running_loop(), self._feed
        begun = now = loop.time()
        while now - begun < SLICE_SECONDS and not feed.holding:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                feed.live(int.from_bytes(frames[1], "big"), frames[2], now, time.time())
            now = loop.time()

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        """One line for each change of the connection."""
        connected = self.connected
        with contextlib.suppress(zmq.Again):
            while True:
                frames = monitor.recv_multipart(zmq.NOBLOCK)
                connected = int.from_bytes(frames[0][:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if connected:
                    self._feed.reconnected()
        if connected != self.connected:
            self.connected = connected
            self._told("connected" if connected else "connection lost")

    # -- replay -------------------------------------------------------------------------------------------------

    async def _replay(self, endpoint: str) -> bool:
        """Ask for what came after the last batch that was seen, and that one again, as proof of who answers. Whether
        anyone did."""
        try:
            why = await self._ask(endpoint)
        except zmq.ZMQError as error:
            why = str(error)
        if why:
            # An answer that comes yet would be taken for that to the next question.
            self._hang_up()
            self._feed.replay_failed(f"{endpoint}: {why}")
        self.settled.set()
        return not why

    async def _ask(self, endpoint: str) -> str:
        """Why there is no answer, "" where there was one."""
        loop, feed = asyncio.get_running_loop(), self._feed
        if self._asking is None:
            self._asking = self._context.socket(zmq.DEALER)
            self._prepare(self._asking)
            self._asking.connect(endpoint)
        socket = self._asking
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        # A REQ socket would send the empty frame by itself, but could read one answer only.
        await socket.send_multipart([b"", feed.ask().to_bytes(8, "big")])
        while await socket.poll(int(REPLAY_SECONDS * 1000)):
            begun = loop.time()
            while loop.time() - begun < SLICE_SECONDS:
                try:
                    frames = plain.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) < 2 or len(frames[-2]) != 8:
                    continue
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0:
                    feed.replay_ended()
                    return ""
                if not feed.replayed(number, frames[-1]):
                    # Another process answers: what is still to come of this answer is not wanted.
                    self._hang_up()
                    return ""
            await asyncio.sleep(0)
        return "no answer"

    def _hang_up(self) -> None:
        if self._asking is not None:
            self._asking.close(linger=0)
            self._asking = None
