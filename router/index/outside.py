"""What this router knows of a replica and what the store tells of it, put together. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.memory import Match
from router.index.pages import PAGE_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.index.memory import Index
    from router.index.shared_codec import Told


def together(
    index: Index, replica: str, keys: Sequence[int], now: float, rank: int | None, told: Sequence[Told]
) -> Match:
    """How deep a replica holds a chain, or soon will. `rank`: look there alone. `told`: of the replica and its ranks.

    Own events know best: of the others only the prompts count that they have just sent there, up to what the engine has
    dropped since; the store keeps these a while where nobody is left to tell it of that. Without them the contents
    that another router tells are believed alone, and after them what was sent from here a moment ago. Where nobody
    hears events it is the deeper of what both presume.
    """
    own = index.match(replica, keys, now, rank)
    if index.trusted(replica):
        return _follow(
            index, replica, keys, now, own, [each for each in told if rank is None or each.rank in (None, rank)]
        )
    # Where ranks are told apart all of them have to be known.
    contents = [each for each in told if each.rank is not None] or told
    if contents and all(each.exact for each in contents):
        asked = [each for each in contents if rank is None or each.rank in (None, rank)]
        return _believe(index, replica, keys, own, asked) if asked else own
    for each in told:
        if each.rank is None:
            return _deeper(own, each)
    return own


def _follow(index: Index, replica: str, keys: Sequence[int], now: float, own: Match, told: Sequence[Told]) -> Match:
    best = own
    for each in told:
        if each.soon > best.depth:
            here = own if each.rank in (None, own.rank) else index.match(replica, keys, now, each.rank)
            at = own.rank if each.rank is None else each.rank
            soon = index.promised(replica, keys, here.depth, each.soon, at)
            if here.depth >= each.soon_from and soon > best.depth:
                best = Match(soon, False, at)
        elif each.depth == own.depth and each.continues and best is own and each.rank in (None, own.rank):
            best = Match(own.depth, True, own.rank)
    return best


def _believe(index: Index, replica: str, keys: Sequence[int], own: Match, told: Sequence[Told]) -> Match:
    depths = [max(each.depth, each.soon if each.soon_from <= each.depth else 0) for each in told]
    place = max(range(len(told)), key=lambda at: (depths[at], -index.given(replica, told[at].rank)))
    best, depth = told[place], depths[place]
    if best.open and depth % PAGE_BLOCKS and own.depth > depth:
        # Of a page in which many chains part not all are told.
        depth = min(own.depth, depth - depth % PAGE_BLOCKS + PAGE_BLOCKS)
    depth = index.soon(replica, keys, depth, best.rank)
    if depth == best.depth:
        return Match(depth, best.continues, best.rank)
    return Match(depth, depth == own.depth and own.continues, best.rank)


def _deeper(own: Match, told: Told) -> Match:
    if told.depth > own.depth:
        return Match(told.depth, told.continues, own.rank)
    if told.depth == own.depth and told.continues and not own.continues:
        return Match(own.depth, True, own.rank)
    return own
