"""The engine's clock in the real world: seconds since the start, stretched or squeezed by a scale."""

import asyncio
import time


class Clock:
    """``scale`` wall seconds pass for each modelled second: 1 is real time, 0.1 ten times faster, 0 no waiting."""

    def __init__(self, scale: float = 1.0) -> None:
        if scale < 0:
            raise ValueError(f"time scale must not be negative, got {scale}")
        self.scale = scale
        self._start = time.monotonic()
        self._virtual = 0.0

    def now(self) -> float:
        """Modelled seconds since the start."""
        if not self.scale:
            return self._virtual
        return (time.monotonic() - self._start) / self.scale

    async def sleep_until(self, moment: float) -> None:
        """Always lets other tasks run once, even when the moment has passed."""
        if not self.scale:
            self._virtual = max(self._virtual, moment)
            await asyncio.sleep(0)
            return
        await asyncio.sleep(max(0.0, (moment - self.now()) * self.scale))
