"""What one router tells the store of what an engine holds: everything at first, then what changes. Pure.

Pages are told as they are, so that whatever went wrong is made good by telling all of them again; what is not told
again is then dead. That is done to begin with, after the store lost something, when a pool's worth of blocks has come
since, and every so often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.shared_codec import BEGIN, WHOLE, pack_page

if TYPE_CHECKING:
    from router.index.pages import Page
    from router.index.shared_codec import Seat
    from router.index.shared_known import ToldKnown

SLICE = 16
"""Pages that are offered in one call; the script stops where it has done enough."""


class Contents:
    """Of one engine: a replica, or one data-parallel rank of it. Its writer asks for the next slice until there is
    none; `seat` is the place in the store that the last one was for."""

    def __init__(self, known: ToldKnown) -> None:
        self.known = known
        self.seat: Seat | None = None
        self._due = True
        self._left: int | None = None  # pages of those that are told again; None: that is not under way
        self._since = 0  # blocks that had arrived by then
        self._told_at = 0.0
        self._parts: list[Page | None] = []

    @property
    def tellable(self) -> bool:
        return self.known.tellable

    @property
    def untold(self) -> int:
        """Pages, and steps of telling everything, that are still to come."""
        return self.known.pages.waiting + len(self._parts) + self._due + (self._left is not None)

    def anew(self) -> None:
        """Everything has to be told again."""
        self._due = True

    def waiting(self, seat: Seat, now: float, every: float) -> bool:
        """Whether there is something to tell. `every`: seconds after which all is told again."""
        if seat != self.seat:
            self.seat, self._due = seat, True
        if now - self._told_at >= every or self.known.pages.arrived - self._since > max(self.known.capacity, 1024):
            self._due = True
        return self._due or self._left is not None or self.known.pages.waiting > 0

    def next_slice(self, now: float) -> list[bytes]:
        """Heads and bodies of what goes first."""
        pages = self.known.pages
        pieces: list[bytes] = []
        self._parts = []
        if self._due:
            self._due, self._since, self._told_at = False, pages.arrived, now
            self._left = pages.all_again()
            pieces += [BEGIN, b""]
            self._parts.append(None)
        again = self._left is not None
        count = SLICE if self._left is None else min(SLICE, self._left)
        for page in pages.take(count):
            pieces += pack_page(page, again=again)
            self._parts.append(page)
        if self._left is not None:
            self._left -= count
            if self._left == 0:
                self._left = None
                pieces += [WHOLE, b""]
                self._parts.append(None)
        return pieces

    def pass_over(self) -> bool:
        """Somebody else tells, or nobody: what changed is not kept, for whoever begins to tell begins with everything.
        Whether there is more to pass over."""
        self._due = True
        self.known.pages.take(SLICE)
        return self.known.pages.waiting > 0

    def told(self, done: int) -> None:
        """So much of the last slice was done; the rest is told with the next one. Less than 0: nothing can be told now,
        and all has to be told again."""
        if done < 0:
            self._due = True
        parts, self._parts = self._parts[max(done, 0) :], []
        if not parts:
            return
        rest = [page for page in parts if page is not None]
        self.known.pages.again(rest)
        if parts[-1] is None:  # the end of telling again was not told
            self._left = len(rest)
        elif self._left is not None:
            self._left += len(rest)
