"""`warmroute serve` as a process of its own, and what it says."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

from tests.wire.scripted import BOUND


class Running:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = b""

    @classmethod
    async def start(cls, *arguments: str) -> Running:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "serve", *arguments, stderr=asyncio.subprocess.PIPE
        )
        return cls(process)

    async def until_said(self, text: bytes) -> None:
        """Read on until it says so."""
        assert self.process.stderr is not None
        before = len(self.said)
        while text not in self.said[before:]:
            line = await asyncio.wait_for(self.process.stderr.readline(), 2 * BOUND)
            assert line, self.said.decode()
            self.said += line

    @property
    def address(self) -> tuple[str, int]:
        found = re.search(rb"listens on http://127.0.0.1:(\d+)", self.said)
        assert found is not None
        return "127.0.0.1", int(found[1])

    async def kill(self) -> None:
        if self.process.returncode is None:
            # Not at once: what it started ends with it.
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(self.process.wait(), BOUND)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

    async def ended(self) -> int:
        """Wait for its end, and hear all that it has to say until then."""
        assert self.process.stderr is not None
        async with asyncio.timeout(2 * BOUND):
            self.said += await self.process.stderr.read()
            return await self.process.wait()
