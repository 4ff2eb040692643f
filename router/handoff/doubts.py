"""Which prefill replicas computed prompts lately that nobody could fetch. No clock: `now` in seconds, of any.

Such a replica is well, and its breaker says so; but each prompt that it computes is computed twice. So after a
hand-over that failed it is given none for a pause, then one. Where that arrives, all is forgotten; else the pause
doubles.
"""

from __future__ import annotations

from dataclasses import dataclass

# A router that was restarted with its fleet meets engines that are not through with their handshakes.
FIRST_PAUSE_SECONDS = 1.0
# A missing connector or a closed port stays so until somebody mends it; one prompt a minute finds out.
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(slots=True)
class Doubt:
    pause: float
    until: float
    trial: bool = False
    """One is under way that finds out."""


class Doubts:
    """By the names of replicas."""

    def __init__(self) -> None:
        self._doubts: dict[str, Doubt] = {}

    def doubted(self, replica: str, now: float) -> bool:
        """Whether it is to be given no prompt to hand over."""
        doubt = self._doubts.get(replica)
        return doubt is not None and now < doubt.until

    def begin(self, replica: str, now: float) -> None:
        """It is given one. Where there was a doubt, others wait for what that shows, a pause long."""
        if (doubt := self._doubts.get(replica)) is not None:
            doubt.trial, doubt.until = True, now + doubt.pause

    def failed(self, replica: str, now: float) -> None:
        """What it handed over did not arrive."""
        doubt = self._doubts.get(replica)
        if doubt is None:
            self._doubts[replica] = Doubt(FIRST_PAUSE_SECONDS, now + FIRST_PAUSE_SECONDS)
        elif doubt.trial:
            pause = min(2 * doubt.pause, LONGEST_PAUSE_SECONDS)
            self._doubts[replica] = Doubt(pause, now + pause)
        # Else it was under way when the doubt arose, and shows nothing new.

    def arrived(self, replica: str) -> None:
        """Its KV got there, or another process is there now."""
        self._doubts.pop(replica, None)
