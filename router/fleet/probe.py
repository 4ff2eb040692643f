"""Asks each replica who it is and how busy it is, for ever. The I/O around `scrape` and `replica`."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from router.fleet.replica import Card, Replica, State
from router.fleet.scrape import Metrics, read_metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger("warmroute.fleet")

# A /metrics page is tens of KB; a replica that sends more than this is not read further.
MAX_PAGE_BYTES = 2 * 1024 * 1024
# Models change when adapters are loaded; asking each second would be a waste.
MODELS_EVERY = 10
# One failed question is a hiccup, and a server busy tokenizing may miss several: so many in a row, with no byte of any
# answer for so long, and it is silent.
FAILURES_TO_LOSE = 3


class Probe:
    """Keeps one replica's state true, and tells of all that changes what it holds or serves.

    `ready` is awaited before a replica is given requests and returns what is to be said of it. `given_up` is told, with
    each round that failed, of one that is lost or silent and sent no byte for `silence_seconds`: to wait there is vain.
    """

    def __init__(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        *,
        every_seconds: float,
        timeout_seconds: float,
        silence_seconds: float,
        headers: dict[str, str],
        ready: Callable[[Replica], Awaitable[str]],
        restarted: Callable[[Replica], None],
        sized: Callable[[Replica], None],
        given_up: Callable[[Replica, str], None],
    ) -> None:
        self._replica = replica
        self._session = session
        self._every = every_seconds
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._silence = silence_seconds
        self._headers = headers
        self._ready = ready
        self._restarted = restarted
        self._sized = sized
        self._given_up = given_up
        self._failures = 0
        self._rounds = 0
        self._surprises: set[type[Exception]] = set()

    async def run(self, begun: asyncio.Task[None]) -> None:
        """Ask for ever. `begun` is the first round, under way or over."""
        await asyncio.wait([begun])
        while True:
            await asyncio.sleep(self._every)
            await self.once()

    async def once(self) -> None:
        """One round of questions. Never raises for what a replica does."""
        try:
            await self._ask()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                return  # it is we who cannot open a connection
            self._failures += 1
            self._failed(error)
        except Exception as error:
            if type(error) not in self._surprises:
                self._surprises.add(type(error))
                log.exception("asking %s failed in an unforeseen way; later ones are not told", self._replica.name)
            self._failures += 1
            self._failed(error)

    async def _ask(self) -> None:
        replica = self._replica
        refused = replica.state is State.LOST
        read = await self._try_scrape()
        if refused and replica.state is State.LOST and replica.metrics.started is None:
            self._begin_anew()  # nothing tells whether it is the same process; it went away, so it is not
        if replica.state is not State.READY or not read or self._rounds % MODELS_EVERY == 0:
            replica.models = await self._models()
        self._rounds += 1
        self._failures = 0
        if replica.breaker.reached():
            log.info("%s can be reached again: it is given requests as before", replica.name)
        if replica.state is not State.READY:
            said = await self._ready(replica)
            was, replica.state, replica.why = replica.state, State.READY, ""
            log.info("%s is ready%s: %s", replica.name, "" if was is State.UNSEEN else " again", said)

    async def _try_scrape(self) -> bool:
        """Read /metrics; a page that does not come, or makes no sense, says nothing of whether the replica serves."""
        try:
            await self._scrape()
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError):
            self._replica.scraped_at = None
            return False
        return True

    def _failed(self, error: Exception) -> None:
        replica = self._replica
        if isinstance(error, TimeoutError):
            why = "no answer in time"
        elif isinstance(error, aiohttp.ClientConnectorError):
            why = _unconnected(error)
        elif isinstance(error, aiohttp.ClientResponseError):
            why = "it does not speak HTTP"
        else:
            why = str(error) or type(error).__name__
        if replica.state is State.READY:
            replica.scraped_at = None
            state = self._judge(error)
            if state is not State.READY:
                replica.state = state
                log.warning("%s is %s: %s", replica.name, state.value, why)
        elif replica.state is State.SILENT and isinstance(error, aiohttp.ClientConnectorError):
            replica.state = State.LOST
        elif replica.state is State.UNSEEN and why != replica.why:
            log.info("%s is not ready yet: %s", replica.name, why)
        replica.why = why
        # One that is shutting down refuses connections, too, and still ends the answers that it has begun.
        if replica.state in (State.LOST, State.SILENT) and self._quiet >= self._silence:
            self._given_up(replica, f"{why}, and not a byte for {self._silence:g} s (silence_seconds)")

    @property
    def _quiet(self) -> float:
        """Seconds since a byte came from it."""
        return asyncio.get_running_loop().time() - self._replica.heard_at

    def _judge(self, error: Exception) -> State:
        """What a failed question makes of a replica that was ready."""
        if isinstance(error, aiohttp.ClientConnectorError):
            return State.LOST
        if self._failures < FAILURES_TO_LOSE:
            return State.READY
        if not isinstance(error, TimeoutError):
            return State.LOST
        return State.SILENT if self._quiet >= self._silence else State.READY

    async def _scrape(self) -> None:
        """Read /metrics. Its absence is no failure: engines without it are routed with defaults."""
        replica = self._replica
        status, page = await self._get("/metrics")
        if status != 200:
            replica.scraped_at = None
            return
        metrics = read_metrics(page.decode("utf-8", "replace"))
        before = replica.metrics
        replica.scraped(metrics, asyncio.get_running_loop().time())
        replica.heard_at = asyncio.get_running_loop().time()
        if _another_process(before, metrics):
            self._begin_anew()
        if before.cache != metrics.cache:
            self._sized(replica)

    def _begin_anew(self) -> None:
        replica = self._replica
        replica.restarted()
        replica.state = State.UNSEEN  # another process may serve other models
        self._restarted(replica)
        log.warning("%s was restarted: its cache is taken to be empty", replica.name)

    async def _models(self) -> dict[str, Card]:
        status, page = await self._get("/v1/models")
        if status == 401:
            raise ValueError("/v1/models asks for a key: name a file with it in api_key_file")
        if status != 200:
            raise ValueError(f"/v1/models answered {status}")
        return read_models(page)

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(
            self._replica.address.url + path, timeout=self._timeout, headers=self._headers
        ) as response:
            page = await response.content.read(MAX_PAGE_BYTES)
            while len(page) < MAX_PAGE_BYTES and (more := await response.content.read(MAX_PAGE_BYTES - len(page))):
                page += more
            return response.status, page


def _unconnected(error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"nobody that is trusted here vouches for it: {cause.verify_message} (replica_ca_file)"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {(cause.reason or str(cause)).lower().replace('_', ' ')}"
    number = cause.errno
    return (os.strerror(number) if number and number > 0 else str(cause)).lower()


def _another_process(before: Metrics, now: Metrics) -> bool:
    """Whether a replica was restarted between two readings. Its start time says so; where that is missing (Prometheus'
    multiprocess mode), counters that fell do."""
    if before.started is not None and now.started is not None:
        return before.started != now.started
    return before.queries is not None and now.queries is not None and now.queries < before.queries


def read_models(page: bytes) -> dict[str, Card]:
    """The cards of a /v1/models answer. Raises ValueError where it is none."""
    whole: Any = orjson.loads(page)
    entries = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(entries, list):
        raise ValueError("/v1/models has no list of models")
    cards = {}
    for entry in entries:
        if isinstance(entry, dict) and isinstance(name := entry.get("id"), str):
            length = entry.get("max_model_len")
            root, parent = entry.get("root"), entry.get("parent")
            cards[name] = Card(
                id=name,
                root=root if isinstance(root, str) else None,
                parent=parent if isinstance(parent, str) else None,
                max_model_len=length if isinstance(length, int) else None,
                entry=entry,
            )
    if not cards:
        raise ValueError("/v1/models names no model")
    return cards
