"""Children that can be killed, stopped and started again at the same address; none outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

_PR_SET_PDEATHSIG = 1
_PARENT = os.getpid()
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_START_SECONDS = 60.0


def _die_with_parent() -> None:
    """In the child. SIGKILL, not SIGTERM: a stopped process would never see the latter."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _PARENT:
            os._exit(1)


class Child:
    """`python -m MODULE ARGUMENTS`, its words in `log`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._arguments = arguments
        self.log = log
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def kill(self) -> None:
        if self.process is not None:
            if self.alive:
                self.process.kill()
            await self.process.wait()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Memory of the process itself that lies in RAM (Linux)."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """What it has used of the processors (Linux)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def answers(self, session: aiohttp.ClientSession, url: str) -> None:
        """Wait until it answers 200 there. Raises RuntimeError with its last words where it does not."""
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while self.alive and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{url} did not come up:\n{self.log.read_text(errors='replace')[-2000:]}")


async def series(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """A /metrics page as {series with labels: value}; empty where there is none to be had."""
    try:
        async with session.get(f"{url}/metrics") as response:
            page = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return {}
    found = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def total(found: dict[str, float], name: str) -> float:
    """The sum of a series over its labels."""
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)
