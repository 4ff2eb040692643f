"""Replicas and routers as child processes on free ports of this machine, all ended on every way out."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

HOST = "127.0.0.1"
_START_S = 120.0
_STOP_S = 8.0
_POLL_S = 0.1


class StartError(Exception):
    """A child did not come up; the message says which, and what it last said."""


@dataclass(slots=True)
class _Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(f"    {line}" for line in lines[-8:]) or "    (it said nothing)"


class Processes:
    """An async context: what was started inside it is gone when it is left, by return, error or cancellation."""

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._logs = tempfile.TemporaryDirectory(prefix="warmroute-bench-")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not leave children behind: the stop is bounded and runs to its end.
        stopping = asyncio.ensure_future(self._stop())
        cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                cancelled = True
        stopping.result()
        if cancelled:
            raise asyncio.CancelledError

    async def replicas(self, count: int, flags: Sequence[str] = ()) -> list[str]:
        """Start `count` fake replicas with the same vLLM flags; return their base URLs once all answer /health."""
        ports = free_ports(count)
        for port in ports:
            await self.module(f"replica {port}", ["fake_backend", "--host", HOST, "--port", str(port), *flags])
        urls = [f"http://{HOST}:{port}" for port in ports]
        for child, url in zip(self._children[-count:], urls, strict=True):
            await self._answers(child, f"{url}/health")
        return urls

    async def router(self, replicas: Sequence[str], *, policy: str, port: int | None = None) -> str:
        """Start a router before `replicas`; return its base URL once it answers /ready."""
        port = free_ports(1)[0] if port is None else port
        where = ["--host", HOST, "--port", str(port), "--admin-port", "-1", "--policy", policy]
        await self.module(f"router ({policy})", ["router.cli", "serve", *replicas, *where])
        url = f"http://{HOST}:{port}"
        await self._answers(self._children[-1], f"{url}/ready")
        return url

    def ended(self) -> str | None:
        """Name a child that is no longer running, with its last lines; None while all run."""
        for child in self._children:
            if child.process.returncode is not None:
                return f"{child.name} ended with status {child.process.returncode}:\n{child.last_words()}"
        return None

    async def module(self, name: str, arguments: Sequence[str]) -> int:
        """Start a module of Python's with its arguments; return the process's id, without waiting for anything."""
        return await self.program(name, [sys.executable, "-m", *arguments])

    async def program(self, name: str, arguments: Sequence[str]) -> int:
        """Start a program, its whole path first; return the process's id, without waiting for anything."""
        log = Path(self._logs.name) / f"{len(self._children)}.log"
        command = [sys.executable, "-m", "bench.leash", str(os.getpid()), *arguments]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Out of the terminal's group: a Ctrl-C reaches the parent alone, which ends the rest in order.
                start_new_session=True,
            )
        self._children.append(_Child(name, process, log))
        return process.pid

    async def _answers(self, child: _Child, url: str) -> None:
        deadline = asyncio.get_running_loop().time() + _START_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while asyncio.get_running_loop().time() < deadline:
                if child.process.returncode is not None:
                    raise StartError(f"{child.name} did not start:\n{child.last_words()}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(_POLL_S)
        raise StartError(f"{child.name} was not ready within {_START_S:.0f} s:\n{child.last_words()}")

    async def _stop(self) -> None:
        # The routers first (they were started last), so that none sees its replicas die.
        running = [child.process for child in reversed(self._children)]
        for process in running:
            _signal_group(process, signal.SIGTERM)
        late = await _still_running(running, _STOP_S)
        for process in late:
            _signal_group(process, signal.SIGKILL)
        await _still_running(late, _STOP_S)
        self._children.clear()
        self._logs.cleanup()


async def _still_running(
    processes: Sequence[asyncio.subprocess.Process], seconds: float
) -> list[asyncio.subprocess.Process]:
    """Wait until all have ended, `seconds` at most; return those that have not."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    if waits:
        await asyncio.wait(waits, timeout=seconds)
    for wait in waits:
        wait.cancel()
    return [process for process in processes if process.returncode is None]


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def free_ports(count: int) -> list[int]:
    """Return `count` different ports that are free on the loopback address now."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind((HOST, 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
        return True
