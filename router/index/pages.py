"""What an engine holds, cut into pages as the shared store keeps them: up to 16 consecutive blocks of a chain, from a
multiple of 16 on, named by the first. No I/O, no clock.

A page is told as a whole, as it is at that moment, so that many events in a page cost one message, none depends on the
one before, and what was lost is made good by telling it again. Only what can be reached from the root is told: leading
blocks on the device, then what goes on from there in lower tiers. A block that went while its children are held hides
these, until it is back.

About 90 bytes a block, beside what `Known` takes.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PAGE_BLOCKS = 16
KEPT = 8
"""Paths of one page that are told: where many chains part in one page, those that were stored last. Each path beyond
makes the page longer for every question about it."""


class Page(NamedTuple):
    """`paths`: the leading blocks that are held of each chain through this page. `more`: there are others. `removed`:
    some blocks went since it was told last."""

    name: int
    paths: list[list[int]]
    more: bool
    removed: bool


class _Path:
    """One way through a page. `up`: the path that it goes on from, None at the root. `below`: names of pages that go on
    from it. `reach`: how many of its leading blocks can be reached; `device`: all of these are on the device."""

    __slots__ = ("below", "device", "keys", "reach", "up")

    def __init__(self, keys: list[int], up: _Path | None) -> None:
        self.keys = keys
        self.up = up
        self.below: set[int] | None = None
        self.reach = 0
        self.device = True


class _Due:
    """Why a page is to be told. `paths`: those of which something changed; None: all."""

    __slots__ = ("paths", "removed")

    def __init__(self, paths: set[_Path] | None, *, removed: bool) -> None:
        self.paths = paths
        self.removed = removed


_ALL = _Due(None, removed=False)
_ALL_AND_REMOVED = _Due(None, removed=True)


class Pages:
    """`reach`: how many of some keys, that go on from what is on the device (or not all of it), can be reached, and
    whether these are all on the device. `holds`: whether a block is held anywhere. `bound`: the most blocks that are
    remembered; others are passed over."""

    def __init__(
        self,
        reach: Callable[[Sequence[int], bool], tuple[int, bool]],
        holds: Callable[[int], bool],
        bound: int,
    ) -> None:
        self._reach = reach
        self._holds = holds
        self._bound = bound
        self.arrived = 0
        """Blocks that were stored so far, with every copy counted."""
        self.clear()

    def clear(self) -> None:
        """Nothing is held."""
        self._at: dict[int, _Path] = {}
        self._pages: dict[int, list[_Path]] = {}
        self._due: dict[int, _Due] = {}

    def __len__(self) -> int:
        """Blocks whose place in a chain is known."""
        return len(self._at)

    @property
    def waiting(self) -> int:
        """Pages that are to be told."""
        return len(self._due)

    def stored(self, keys: Sequence[int], parent: int | None) -> None:
        """A chain of blocks came, which goes on from `parent`; None: from the root. Where the place of that is not
        known, neither is theirs."""
        path = touched = None if parent is None else self._at.get(parent)
        if touched is not None:
            self._touch(touched)
        self.arrived += len(keys)
        for key in keys:
            at = self._at.get(key)
            if at is not None:
                self._touch(at, key)
            elif path is None and parent is not None:
                continue
            elif len(self._at) >= self._bound:
                return
            else:
                at = self._place(key, path, parent)
                if at is not touched:
                    touched = at
                    self._touch(at)
            path, parent = at, key

    def changed(self, keys: Iterable[int], *, removed: bool) -> None:
        """Blocks went, or came to another tier."""
        for key in keys:
            at = self._at.get(key)
            if at is not None:
                self._touch(at, key, removed=removed)

    def all_again(self) -> int:
        """All pages are to be told, those first that were begun first. Returns how many."""
        due, self._due = self._due, dict.fromkeys(self._pages, _ALL)
        for name, each in due.items():
            self._touch_all(name, removed=each.removed)
        return len(self._due)

    def again(self, pages: Iterable[Page]) -> None:
        """These did not arrive."""
        for page in pages:
            self._touch_all(page.name, removed=page.removed)

    def take(self, count: int) -> list[Page]:
        """The pages that are to be told next, at most so many."""
        taken = []
        for name in list(islice(self._due, count)):
            due = self._due.pop(name)
            changed = list(self._pages.get(name, ())) if due.paths is None else due.paths
            for path in changed:
                self._weigh(path)
            for path in changed:
                self._prune(path)
            told, more = _latest(self._pages.get(name, ()))
            taken.append(Page(name, told, more, due.removed))
        return taken

    # -- places -------------------------------------------------------------------------------------------------

    def _place(self, key: int, path: _Path | None, parent: int | None) -> _Path:
        if path is None:
            new = _Path([key], None)
        elif path.keys[-1] != parent:
            # Another chain went on from there, within the page.
            new = _Path([*path.keys[: path.keys.index(parent) + 1], key], path.up)  # type: ignore[arg-type]
        elif len(path.keys) < PAGE_BLOCKS:
            path.keys.append(key)
            self._at[key] = path
            same = self._pages[path.keys[0]]
            if same[-1] is not path:
                same.remove(path)
                same.append(path)
            return path
        else:
            new = _Path([key], path)
            if path.below is None:
                path.below = set()
            path.below.add(key)
        self._at[key] = new
        self._pages.setdefault(new.keys[0], []).append(new)
        return new

    def _touch(self, path: _Path, key: int | None = None, *, removed: bool = False) -> None:
        """Something changed on a path: at its end, or with a block that others may go through too."""
        name = path.keys[0]
        due = self._due.get(name)
        if due is None:
            due = self._due[name] = _Due(set(), removed=False)
        if due.paths is None:
            if removed:
                self._due[name] = _ALL_AND_REMOVED
            return
        due.removed |= removed
        due.paths.add(path)
        same = self._pages[name]
        if key is not None and len(same) > 1:
            place = path.keys.index(key)
            due.paths.update(each for each in same if len(each.keys) > place and each.keys[place] == key)

    def _touch_all(self, name: int, *, removed: bool = False) -> None:
        due = self._due.get(name)
        self._due[name] = _ALL_AND_REMOVED if removed or (due is not None and due.removed) else _ALL

    def _weigh(self, path: _Path) -> None:
        """How far a path can be reached; where that opens or closes what goes on from it, that is to be told too."""
        if not path.keys:  # gone meanwhile
            return
        before = path.reach, path.device
        up = path.up
        if up is None or up.reach == PAGE_BLOCKS:
            path.reach, path.device = self._reach(path.keys, up is None or up.device)
        else:
            path.reach = 0
        reach, device = path.reach, path.device
        if path.below and before != (reach, device) and PAGE_BLOCKS in (before[0], reach):
            for name in path.below:
                self._touch_all(name)

    def _prune(self, path: _Path) -> None:
        """Forget the places of blocks that went, but for those between others that are held."""
        at, keys = self._at, path.keys
        if not keys:
            return
        name = keys[0]
        while keys and not (path.below or self._holds(keys[-1])):
            key = keys.pop()
            if at.get(key) is path:
                del at[key]
        # What is left of it may be but the beginning that it shared with others.
        if not keys or (not path.below and at.get(keys[-1]) not in (path, None)):
            same = self._pages[name]
            path.keys = []
            same.remove(path)
            if not same:
                del self._pages[name]
                up = path.up
                if up is not None and up.below is not None:
                    up.below.discard(name)
                    if not up.below:
                        self._touch(up)


def _latest(paths: Sequence[_Path]) -> tuple[list[list[int]], bool]:
    """What is held of a page, the last KEPT that are not the beginning of another; and whether there is more."""
    if len(paths) == 1:
        path = paths[0]
        return [path.keys[: path.reach]] if path.reach else [], False
    told: list[list[int]] = []
    within: set[tuple[int, int]] = set()
    for path in reversed(paths):
        reach = path.reach
        if not reach or (reach, path.keys[reach - 1]) in within:
            continue
        if len(told) == KEPT:
            return told[::-1], True
        keys = path.keys[:reach]
        told.append(keys)
        within.update(enumerate(keys, 1))
    return told[::-1], False
