"""Blocks that count as present though no event told of them yet: prompts on their way. No I/O, no clock.

A prompt counts as cached from the decision on, for a few seconds, so that siblings follow it before the engine has told
of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PRESENT_SECONDS = 5.0
"""A prompt counts as cached this long beyond the time at which its prefill should be through."""
MAX_PRESENT_SECONDS = 60.0


def present_until(now: float, until: float) -> float:
    """Until when a prompt counts as cached whose prefill should be through at `until`."""
    return min(max(until, now) + PRESENT_SECONDS, now + MAX_PRESENT_SECONDS)


class Soon:
    """`capacity`: blocks; beyond it the first to come is the first to go, though never part of one prompt."""

    __slots__ = ("_order", "_until", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._until: dict[int, float] = {}
        self._order: deque[tuple[float, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Sequence[int], end: float) -> None:
        self._until.update(dict.fromkeys(keys, end))
        self._order.append((end, keys))
        while len(self._until) > max(self.capacity, len(keys)):
            self._drop_first()

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()
        self._order.clear()

    def beyond(self, keys: Sequence[int], depth: int, now: float) -> int:
        """How deep a chain is there soon, if it is there to `depth`."""
        until = self._until
        if until:
            while self._order and self._order[0][0] <= now:
                self._drop_first()
            while depth < len(keys) and until.get(keys[depth], 0.0) > now:
                depth += 1
        return depth

    def _drop_first(self) -> None:
        end, keys = self._order.popleft()
        until = self._until
        for key in keys:
            if until.get(key) == end:
                del until[key]
