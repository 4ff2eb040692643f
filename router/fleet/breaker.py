"""When to leave a replica alone that fails, and when to try it again. No clock here: `now` in seconds, of any
monotonic clock.

Probes tell whether a replica can be reached; this tells whether it answers requests. After a few failures in a row it
is given none for a pause, then a single one, the trial. That one's answer closes the breaker; another failure doubles
the pause. Only what is a replica's own doing counts: no client's error, no client that left, no "busy" (429, 503).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

# One failure is chance and costs a client nothing, since another replica is asked; five without an answer in between
# are a pattern.
FAILURES_TO_OPEN: Final = 5
# A process that was restarted by its supervisor needs some seconds; one that stays broken is asked twice a minute.
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 30.0


class Condition(Enum):
    """What the breaker lets through: everything, nothing, or the one request that finds out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One replica's. Callers tell it of each request: `begin`, then what became of it."""

    __slots__ = ("_failures", "_next_trial", "_pause", "_unreachable", "_until")

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS  # of the next opening
        self._until: float | None = None  # None: closed
        self._next_trial = 0.0  # one is on its way until then
        self._unreachable = False  # the last failure was that there was no connection at all

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    @property
    def closed(self) -> bool:
        """Whether all is well."""
        return self._until is None

    def state(self, now: float) -> Condition:
        if self._until is None:
            return Condition.CLOSED
        return Condition.OPEN if now < self._until else Condition.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may be sent there now. Changes nothing."""
        return self._until is None or now >= max(self._until, self._next_trial)

    def seconds_left(self, now: float) -> float:
        """Until a request may be tried again; 0 where that may be now, or one is on its way, which settles it any
        moment."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def begin(self, now: float) -> bool:
        """A request is sent. True: it is the trial, and `end` must be told of it."""
        if self._until is None or not self.admits(now):
            return False
        # A long prompt, or an answer that is not streamed, may take minutes; the others are not to wait for it.
        self._next_trial = now + LONGEST_PAUSE_SECONDS
        return True

    def end(self, *, trial: bool) -> None:
        """The request is over, whatever came of it: a trial that proved nothing makes way for the next one."""
        if trial:
            self._next_trial = 0.0

    def answering(self) -> bool:
        """A sound answer has begun. Returns whether that closed the breaker: from here on requests go there, but until
        an answer is whole the next failure opens it again."""
        if self._until is None:
            return False
        self._until, self._next_trial = None, 0.0
        self._failures = FAILURES_TO_OPEN - 1
        return True

    def answered(self) -> None:
        """An answer is whole: what failed before it is forgotten."""
        if self._until is None:
            self._failures = 0
            self._pause = FIRST_PAUSE_SECONDS

    def failed(self, now: float, *, trial: bool = False, unreachable: bool = False) -> float | None:
        """A request failed, and the replica is to blame. Returns the pause in seconds if that opened the breaker.

        `unreachable`: there was no connection to be had, so that a probe that gets one proves the opposite."""
        if self._until is not None and not trial:
            return None  # of those that were under way when it opened
        self._failures += 1
        self._unreachable = unreachable
        if self._failures < FAILURES_TO_OPEN:
            return None
        pause = self._pause
        self._until, self._next_trial = now + pause, 0.0
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause

    def reached(self) -> bool:
        """A probe got through. Returns whether that closed the breaker, as it does where connecting was what failed."""
        return self._unreachable and self.answering()
