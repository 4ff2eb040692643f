"""The order of a publisher's batches: which to apply, which to pass over, when to ask for a replay. No I/O, no clock.

vLLM's publisher numbers its batches from 0 and keeps the last ones for replay (distributed/kv_events.py
`ZmqEventPublisher`). It drops what a subscriber is too slow for, and a new process begins at 0 again.

A number that was seen before is a repetition if its payload is the same, and another process if it is not. So a replay
asks for the last batch seen too: the answer proves that it is still the same process that speaks.
"""

from __future__ import annotations

from enum import Enum

RECENT = 4096
"""Batches of which it is known what they were. What is repeated from before them is taken for another process."""


class Verdict(Enum):
    """What a batch is to whoever applies them in order."""

    NEXT = "next"
    OLD = "seen before, or given up"
    GAP = "some before it are missing"
    LOST = "some before it are missing, and no longer to be had"
    OTHER = "of another process"


class Sequence:
    """One publisher's batches. `next`: the number of the one to come."""

    __slots__ = ("_proof_due", "_recent", "_skipped", "next")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another process: it begins at 0."""
        self.next = 0
        self._recent: dict[int, int] = {}
        self._skipped: dict[int, None] = {}
        self._proof_due = False

    def live(self, number: int, payload: bytes) -> Verdict:
        """A batch as it was published."""
        if number == self.next:
            return Verdict.NEXT
        if number > self.next:
            return Verdict.GAP
        return self._past(number, payload)

    def _past(self, number: int, payload: bytes) -> Verdict:
        seen = self._recent.get(number)
        if seen is None:
            return Verdict.OLD if number in self._skipped else Verdict.OTHER
        return Verdict.OLD if seen == hash(payload) else Verdict.OTHER

    def taken(self, number: int, payload: bytes) -> None:
        """A batch was applied. Those before it that were not are given up."""
        for missing in range(max(self.next, number - RECENT), number):
            self._skipped[missing] = None
        self._recent[number] = hash(payload)
        self.next = number + 1
        for seen in (self._recent, self._skipped):
            while len(seen) > RECENT:
                del seen[next(iter(seen))]

    def ask(self) -> int:
        """A replay is asked for, from this number on: the last batch that was seen."""
        self._proof_due = self.next > 0
        return max(self.next - 1, 0)

    def replayed(self, number: int, payload: bytes) -> Verdict:
        """A batch of a replay, which is in order. Others may have been taken since it was asked for."""
        unproven, self._proof_due = self._proof_due, False
        if number < self.next:
            return self._past(number, payload)
        # Without the last one that was seen nothing says that this is the same process.
        return Verdict.LOST if number > self.next or unproven else Verdict.NEXT

    def replay_ended(self) -> Verdict:
        """OTHER where not even the last batch that was seen is known there."""
        return Verdict.OTHER if self._proof_due else Verdict.NEXT
