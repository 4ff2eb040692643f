"""Records as they are told to a neighbour: without the keys that it was told just before. No I/O.

Prompts begin alike, with a system prompt or with the turns before, and each is told twice: when it is placed, and when
it is answered. So a record names only the keys that are new, and says after which it goes on: those of the record told
before it, or, of an answer, those of its prompt. Both ends remember the same for that, by the same rules: what one of
them was told without the other (who was not reached yet, or did not read) has to be cleared from the teller's memory.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from router.index.gallop import common

if TYPE_CHECKING:
    from router.index.news import Record

MOST_KEYS: Final = 128 * 1024
"""Of prompts that wait for their answer no more are remembered: a megabyte. Others are told whole twice."""


class Abridger:
    """One end's memory: what it told to all of its neighbours, or what it heard from one of them."""

    __slots__ = ("_before", "_placed", "_size")

    def __init__(self) -> None:
        self._before = array("Q")
        self._placed: dict[int, array[int]] = {}  # by the last key, oldest first
        self._size = 0

    def __len__(self) -> int:
        """How many keys are remembered of prompts that wait."""
        return self._size

    def clear(self) -> None:
        """From now on records are told whole, as the first ones."""
        self._before = array("Q")
        self._placed.clear()
        self._size = 0

    def shorten(self, records: list[Record]) -> None:
        """Leave out of each what the other end can put back. Their keys themselves stay as they are."""
        for record in records:
            keys = record.keys
            if not record.forgotten:
                before = self._before
                if record.ended and 0 < record.prompt_blocks <= len(keys):
                    last = keys[record.prompt_blocks - 1]
                    if (prompt := self._take(last)) is not None:
                        before, record.prompt = prompt, last
                record.common = common(keys, before)
                record.keys = keys[record.common :]
            self._remember(record, keys)

    def restore(self, records: list[Record]) -> bool:
        """Put back what was left out. False where one goes on after what was never heard: then the two ends do not
        remember the same, and have to begin anew."""
        for record in records:
            keys = record.keys
            if not record.forgotten:
                before: array[int] | None = self._before
                if record.prompt is not None:
                    before = self._take(record.prompt)
                shared = record.common
                if before is None or not 0 <= shared <= len(before):
                    return False
                # An answer mostly fills no block: then its keys are its prompt's.
                keys = before[:shared] + keys if keys or shared < len(before) else before
                record.keys = keys
            self._remember(record, keys)
        return True

    def _remember(self, record: Record, keys: array[int]) -> None:
        if record.forgotten:
            if keys:
                self._take(keys[-1])
            return
        self._before = keys
        if record.ended or not keys:
            return
        placed, last = self._placed, keys[-1]
        self._take(last)
        placed[last] = keys
        self._size += len(keys)
        while self._size > MOST_KEYS:
            self._take(next(iter(placed)))

    def _take(self, last: int) -> array[int] | None:
        keys = self._placed.pop(last, None)
        if keys is not None:
            self._size -= len(keys)
        return keys
