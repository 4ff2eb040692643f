"""What an engine is known to hold, kept in pages too, for those who do not hear its events. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.known import DEVICE, Known
from router.index.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.index.residency import Residency


class ToldKnown(Known):
    """A `Known`. `changed` is called whenever there is something to tell, `emptied` when the engine has cleared its
    cache."""

    __slots__ = ("_coarse", "changed", "emptied", "pages")

    def __init__(self, capacity: int, bound: int, presumed: Residency | None = None) -> None:
        super().__init__(capacity, bound, presumed)
        # Blocks whose place is known though they went, between others, count too.
        self.pages = Pages(self._reach, self.holds, 2 * bound)
        self.changed: Callable[[], None] = _nothing
        self.emptied: Callable[[], None] = _nothing
        self._coarse = False

    @property
    def tellable(self) -> bool:
        """Whether the pages are all that the engine holds. Those of groups with larger blocks cannot be told: the names
        of the blocks in between are not known."""
        return self.trusted and not self._coarse

    def stored(self, keys: Sequence[int], parent: int | None, *, medium: str, group: int, scale: int) -> None:
        super().stored(keys, parent, medium=medium, group=group, scale=scale)
        self._coarse |= scale != 1
        if medium == DEVICE:
            self.pages.stored(keys, parent)
        else:
            self.pages.changed(keys, removed=False)
        self.changed()

    def removed(self, keys: Sequence[int], *, medium: str, group: int | None) -> list[int]:
        gone = super().removed(keys, medium=medium, group=group)
        self.pages.changed(keys, removed=True)
        self.changed()
        return gone

    def cleared(self) -> None:
        super().cleared()
        self.pages.clear()
        self._coarse = False
        self.emptied()

    def restart(self) -> None:
        emptied, self.emptied = self.emptied, _nothing
        super().restart()  # whoever noticed it tells of it
        self.emptied = emptied

    def trust(self) -> None:
        before = self.trusted
        super().trust()
        if not before:
            self.changed()

    def presume(self) -> None:
        before = self.trusted
        super().presume()
        if before:
            self.changed()

    def doubt(self) -> None:
        super().doubt()
        self.pages.clear()
        self.changed()

    def _reach(self, keys: Sequence[int], device: bool) -> tuple[int, bool]:
        reach = 0
        if device and self._groups:
            reach = min(held.run(keys) for held, _ in self._groups.values())
        if self._tiers and reach < len(keys):
            before, tiers = reach, self._tiers.values()
            while reach < len(keys) and any(keys[reach] in tier for tier in tiers):
                reach += 1
            device = device and reach == before
        return reach, device


def _nothing() -> None:
    pass
