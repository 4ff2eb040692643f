"""Blocks that an engine has dropped lately: prompts that were sent before bring them no more. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.soon import PRESENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_BLOCKS = 20_000
"""Twice as many may be remembered, about 100 bytes each. An engine computes fewer in five seconds."""


class Gone:
    """Each is remembered for one to two times as long as a prompt counts beyond its prefill; where that were too many,
    only the last ones are."""

    __slots__ = ("_before", "_lately", "_turned")

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._lately: set[int] = set()
        self._turned = 0.0

    def add(self, keys: Iterable[int]) -> None:
        self._lately.update(keys)
        if len(self._lately) > MOST_BLOCKS:
            self._turn()

    def tick(self, now: float) -> None:
        """Now and then. `now`: seconds."""
        if now - self._turned >= PRESENT_SECONDS:
            self._turned = now
            self._turn()

    def clear(self) -> None:
        self._before, self._lately = set(), set()

    def before(self, keys: Sequence[int], begin: int, end: int) -> int:
        """Where the first of these is among `keys[begin:end]`; `end` where none is."""
        if self._before or self._lately:
            for at in range(begin, end):
                if keys[at] in self._lately or keys[at] in self._before:
                    return at
        return end

    def _turn(self) -> None:
        self._before, self._lately = self._lately, set()
