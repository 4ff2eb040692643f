"""Times at which connections and exchanges want to be looked at: one timer for all that are due at about one time.

A timer of the event loop takes half a kilobyte and two microseconds, and each open stream would have two of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import asyncio

# An alarm comes this much late at the most, and never early.
TICK_SECONDS: Final = 0.025
# Whoever wants to be called later than this is called before, and asks again: so there are few timers.
MOST_SECONDS: Final = 5.0


class Timed(Protocol):
    """Wants to be called at a time. It may be called before, and then asks again."""

    def check_time(self) -> None: ...


Alarm: TypeAlias = set[Timed]
"""Those who are called together. Whoever no longer wants to be leaves it (`discard`)."""


class Alarms:
    """All that a loop has to do at times."""

    __slots__ = ("_last", "_loop", "_set", "_tick")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set: dict[int, Alarm] = {}
        self._tick = -1  # the one that was asked for last, as the next one mostly is too, and who is called then
        self._last: Alarm = set()

    def after(self, seconds: float, timed: Timed) -> Alarm:
        """Call it `seconds` from now, or before."""
        return self.since(self._loop.time(), seconds, timed)

    def since(self, now: float, seconds: float, timed: Timed) -> Alarm:
        """Likewise, where the time is known."""
        tick = math.ceil((now + min(seconds, MOST_SECONDS)) / TICK_SECONDS)
        if tick != self._tick:
            self._last = self._at(tick)
            self._tick = tick
        alarm = self._last
        alarm.add(timed)
        return alarm

    def _at(self, tick: int) -> Alarm:
        alarm = self._set.get(tick)
        if alarm is None:
            alarm = self._set[tick] = set()
            self._loop.call_at(tick * TICK_SECONDS, self._ring, tick, alarm)
        return alarm

    def _ring(self, tick: int, alarm: Alarm) -> None:
        if self._set.get(tick) is alarm:
            del self._set[tick]
            if tick == self._tick:
                self._tick = -1
        try:
            while alarm:
                alarm.pop().check_time()
        finally:
            if alarm:  # one of them failed
                self._loop.call_soon(self._ring, tick, alarm)
