"""Several workers on one port: starts them, starts another for one that ends, passes signals on, speaks for all.

Each worker is a whole router in a process of its own (`router.app`). The supervisor carries no request: it holds the
port, the admin side, the store through which the workers share what they know, and what ended workers had counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import orjson
from aiohttp import web

import router
from router import logs
from router.admin.api import application
from router.admin.serving import serve, serve_privately
from router.config import ConfigError, Settings, reloaded
from router.credentials import Credentials
from router.fleet.subscription import SourceError, parse_sources
from router.gathered import Gathered
from router.index.shared_embedded import Embedded
from router.listening import reserve, url
from router.worker import ask, socket_of, write_settings

log = logging.getLogger("warmroute.supervisor")

# A worker that ends at once would end at once again: the next one waits, ever longer.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
# One that has run this long ended for another reason than its start.
STEADY_SECONDS = 30.0
# What a worker may take beyond grace and drain before it is killed.
LEAVING_SECONDS = 10.0
# What a worker counts within this time may be lost if it is killed.
GATHER_SECONDS = 5.0
# The status of a worker whose settings cannot work: another one would fail alike.
UNFIT = 2


class Supervisor:
    """`async with Supervisor(settings) as supervisor: await supervisor.done.wait()`."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError."""
        self.settings = settings
        self._credentials = Credentials.read(settings)
        _check_sources(settings)
        self._embedded, self.shares = _store(settings)
        """`shares`: how the workers know of each other, for people."""
        self._gathered = Gathered()
        self._gathering = asyncio.Lock()  # an older page must not come after a newer one
        self._fixed: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self._directory = Path()
        self.announcement = ""
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._ready: dict[int, asyncio.Event] = {
            number: asyncio.Event() for number in range(1, settings.listen.workers + 1)
        }
        self._serving: set[int] = set()
        self._said = ""
        self._leaving = asyncio.Event()
        self.done = asyncio.Event()
        """Set when nothing is left to supervise."""
        self.status = 0

    async def __aenter__(self) -> Supervisor:
        try:
            await self._open()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _open(self) -> None:
        settings = self.settings
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
        held = self._stack.enter_context(contextlib.closing(reserve(settings.listen.host, settings.listen.port)))
        fixed = {"port": held.getsockname()[1], "redis": settings.shared.redis}
        if self._embedded is not None:
            fixed["redis"] = str(await self._stack.enter_async_context(self._embedded))
        self._fixed = fixed
        self._tell_settings()
        own = web.Application()
        own.router.add_get("/metrics", self._serve_metrics)
        own.router.add_post("/workers/{number}/ready", self._serve_ready)
        await serve_privately(self._stack, own, socket_of(self._directory, 0))
        admin, where = settings.admin, ""
        if admin.admin_port >= 0:
            app = application(
                token=lambda: self._credentials.admin_token,
                explain=self._explain,
                replicas=self._replicas,
                metrics=self._metrics,
                max_body_bytes=settings.listen.max_body_bytes,
            )
            where = f"\n  admin side on {url(await serve(self._stack, app, admin.admin_host, admin.admin_port))}"
        self._keepers = [asyncio.create_task(self._keep(number)) for number in self._ready]
        self._stack.push_async_callback(_cancelled, asyncio.create_task(self._gather_for_ever()))
        await self._all_ready()
        first, _, rest = self._said.partition("\n")
        workers = f"{settings.listen.workers} workers, each with the bounds below; {self.shares}"
        self.announcement = f"{first}{where}\n  {workers}\n{rest}"

    def _tell_settings(self) -> None:
        settings, fixed = self.settings, self._fixed
        write_settings(
            self._directory,
            msgspec.structs.replace(
                settings,
                listen=msgspec.structs.replace(settings.listen, port=fixed["port"]),
                shared=msgspec.structs.replace(settings.shared, redis=fixed["redis"]),
            ),
        )

    async def _all_ready(self) -> None:
        async def all_ready() -> None:
            for each in self._ready.values():
                await each.wait()

        tasks = [asyncio.create_task(all_ready()), asyncio.create_task(self._done())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _done(self) -> None:
        await self.done.wait()

    # -- the workers --------------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """One worker after the other, until the end."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while not self._leaving.is_set():
            began = loop.time()
            process = self._running[number] = await self._start(number)
            status = await process.wait()
            del self._running[number]
            self._serving.discard(number)
            self._gathered.ended(number)
            came_up = self._ready[number].is_set()
            if self._leaving.is_set():
                return
            if status == UNFIT and not came_up:
                self.status = UNFIT  # it has said why
                self.done.set()
                return
            if loop.time() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            log.error("worker %d (process %d) %s; another is started in %g s", number, process.pid, how, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        # The package that runs here, wherever it lies; never one that happens to lie where the user stands.
        where = str(Path(router.__file__).parents[1])
        path = os.pathsep.join([where, *filter(None, [os.environ.get("PYTHONPATH")])])
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "router", "worker", str(number), str(self._directory), str(os.getpid())),
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor; it passes it on
        )

    def _send(self, number: signal.Signals) -> None:
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        """Pass on that the end has come. A second call means now, at the workers too."""
        if not self._leaving.is_set():
            self._leaving.set()
            listen = self.settings.listen
            grace = listen.grace_seconds if number is signal.SIGTERM else 0.0
            bound = grace + listen.drain_seconds + LEAVING_SECONDS
            log.info("waiting up to %g s for %d workers to end", bound, len(self._running))
            task = asyncio.create_task(self._await_end(bound))
            self._stack.push_async_callback(_cancelled, task)
        self._send(number)

    async def _await_end(self, bound: float) -> None:
        left = [asyncio.create_task(process.wait()) for process in self._running.values()]
        if left and (await asyncio.wait(left, timeout=bound))[1]:
            log.warning("killing workers that did not end in time: %s", ", ".join(map(str, sorted(self._running))))
            self._send(signal.SIGKILL)
        self.done.set()

    async def _end(self) -> None:
        self._leaving.set()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._send(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in self._running.values()))
        await self._stack.aclose()

    def reload(self, settings: Settings) -> None:
        """Let the workers read the settings anew, which have been found to make sense. Raises ConfigError."""
        settings, _, fixed = reloaded(self.settings, settings)
        self._credentials = Credentials.read(settings)
        for name in fixed:
            log.warning("%s is read at start alone: a restart is needed for another one", name)
        self.settings = settings
        logs.set_level(settings.log.log_level)
        self._tell_settings()
        self._send(signal.SIGHUP)

    # -- what others ask ----------------------------------------------------------------------------------------

    async def _gather_for_ever(self) -> None:
        while True:
            await asyncio.sleep(GATHER_SECONDS)
            await self._gather()

    async def _gather(self) -> None:
        async with self._gathering:
            asked = dict(self._running)
            for number, page in (await self._ask_all("GET", "/metrics")).items():
                if self._running.get(number) is asked[number]:
                    self._gathered.heard(number, page.decode())

    async def _ask_all(self, method: str, path: str) -> dict[int, bytes]:
        """What the workers answer; one that is starting, ending or stuck is left out."""
        numbers = sorted(self._running)
        answers = await asyncio.gather(
            *(ask(socket_of(self._directory, number), method, path) for number in numbers), return_exceptions=True
        )
        return {number: said for number, said in zip(numbers, answers, strict=True) if isinstance(said, bytes)}

    async def _metrics(self) -> bytes:
        await self._gather()
        running = float(len(self._serving))
        return (
            self._gathered.page()
            + "# HELP warmroute_workers Processes that serve.\n# TYPE warmroute_workers gauge\n"
            + f"warmroute_workers {running!r}\n"
        ).encode()

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._metrics())

    async def _serve_ready(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        self._said = self._said or (await request.read()).decode()
        self._ready[number].set()
        self._serving.add(number)
        return web.Response()

    async def _explain(self, path: str, body: bytes) -> dict[str, Any]:
        """As the first worker that answers sees it; what another has in flight it knows as routers do, by the store."""
        for number in sorted(self._running):
            with contextlib.suppress(OSError):
                where = socket_of(self._directory, number)
                said: dict[str, Any] = orjson.loads(
                    await ask(where, "POST", f"/router/explain?path={quote(path)}", body)
                )
                return said
        raise web.HTTPServiceUnavailable(reason="No worker answers")

    async def _replicas(self) -> list[dict[str, Any]]:
        """As the first worker sees them, with what all workers have in flight there."""
        whole: dict[str, dict[str, Any]] = {}
        for said in (await self._ask_all("GET", "/router/replicas")).values():
            for each in orjson.loads(said)["replicas"]:
                known = whole.setdefault(each["replica"], each)
                if known is not each:
                    for name in ("in_flight", "decoding", "waiting_ms"):
                        known[name] += each[name]
        return list(whole.values())


def _store(settings: Settings) -> tuple[Embedded | None, str]:
    """The store that is to be started for the workers, if so, and what is to be said of it. Raises ConfigError."""
    if settings.shared.redis == "embedded":
        return Embedded(), "they share what they know through a private store"
    if settings.shared.redis:
        return None, "they share what they know through the store, with other routers"
    return None, "they tell each other what they know"


def _check_sources(settings: Settings) -> None:
    try:
        sources = parse_sources(settings.events.event_sources)
    except SourceError as error:
        raise ConfigError(f"--event-sources {error}") from None
    for name, ranks in sources.items():
        for source in ranks.values():
            if source.binds:
                raise ConfigError(
                    f"--event-sources {name}={source.endpoint}: of {settings.listen.workers} workers only one could "
                    "listen there; let the engine listen, and name its address"
                )


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
