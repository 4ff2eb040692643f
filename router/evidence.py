"""What one request's fate says of the replicas that it was sent to: who is spared for a moment, whose breaker counts.

A failure over a request that the replica had begun (a 500, a connection that broke before its answer) may be that
request's own doing. It counts only once another replica has given the same request a sound answer: else one client
could close every door of the fleet.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from router.wire.attempts import Ending, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.fleet.replica import Replica

log = logging.getLogger("warmroute.fleet")

# After a failed connection, or a "busy", other replicas are preferred this long; the next probe settles it sooner.
SHUN_SECONDS = 1.0
# How an engine says that its queue is full, or that it is asleep: no failure, but no replica to prefer either.
BUSY: Final = 503


class Evidence:
    """One request's. Tell it `sent`, then `ended` or `left`, and `sound` when an answer begins."""

    __slots__ = ("_clock", "_suspects", "_trials")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspects: list[tuple[Replica, bool, str]] | None = None  # most requests have neither
        self._trials: list[Replica] | None = None

    def sent(self, replica: Replica) -> None:
        if not replica.breaker.closed and replica.breaker.begin(self._clock()):
            self._trials = [*(self._trials or ()), replica]

    def sound(self, replica: Replica) -> None:
        """The head of an answer that blames nobody but perhaps the client."""
        if replica.breaker.answering():
            log.info("%s answers again: it is given requests as before", replica.name)
        if self._suspects is not None:
            for suspect, trial, why in self._suspects:
                self._blame(suspect, why, trial=trial)
            self._suspects = None

    def left(self, replica: Replica) -> None:
        """The client left: that proves nothing."""
        replica.breaker.end(trial=self._take_trial(replica))

    def ended(self, replica: Replica, outcome: Outcome) -> None:
        """The request is over at this replica; perhaps it goes elsewhere."""
        trial = self._take_trial(replica)
        ending, status = outcome.ending, outcome.status or 0
        if ending in (Ending.UNREACHED, Ending.SILENT):
            self._shun(replica, outcome.why)
        elif status == BUSY:
            self._shun(replica, None)
        if ending in (Ending.BROKEN, Ending.CUT, Ending.SILENT) or (ending == Ending.UNREACHED and not outcome.begun):
            self._blame(replica, outcome.why, trial=trial, unreachable=ending == Ending.UNREACHED)
            return
        if ending == Ending.UNREACHED or (status >= 500 and status != BUSY):
            self._suspects = [*(self._suspects or ()), (replica, trial, outcome.why)]
        elif ending == Ending.COMPLETE and status != BUSY:
            replica.breaker.answered()
        replica.breaker.end(trial=trial)

    def _take_trial(self, replica: Replica) -> bool:
        if self._trials is None or replica not in self._trials:
            return False
        self._trials.remove(replica)
        return True

    def _blame(self, replica: Replica, why: str, *, trial: bool, unreachable: bool = False) -> None:
        pause = replica.breaker.failed(self._clock(), trial=trial, unreachable=unreachable)
        if pause is not None:
            log.warning(
                "%s is given no requests for %g s: %d failed in a row, the last one: %s",
                replica.name,
                pause,
                replica.breaker.failures,
                why,
            )
        else:
            replica.breaker.end(trial=trial)

    def _shun(self, replica: Replica, why: str | None) -> None:
        """Prefer others for a moment. One line when it begins: a replica that stays away is the probe's to tell of."""
        now = self._clock()
        if replica.shunned_until <= now and why is not None:
            log.warning("%s gave no answer: %s", replica.name, why)
        replica.shunned_until = now + SHUN_SECONDS
