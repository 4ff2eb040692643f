"""What a router knows itself and what the store tells, put together."""

from __future__ import annotations

import pytest

from router.index.memory import Index, Match
from router.index.outside import together
from router.index.shared_codec import Told

pytestmark = pytest.mark.interpreted

KEYS = list(range(1, 101))


class Sent(Index):
    """An index of which `untold` blocks of any chain were sent a moment ago; `counts` by rank."""

    def __init__(self, untold: int = 0, counts: dict[int | None, int] | None = None) -> None:
        super().__init__()
        self.untold = untold
        self.counts = counts or {}
        self.size("a", 1000)

    def soon(self, replica: str, keys: list[int], depth: int, rank: int | None) -> int:  # type: ignore[override]
        return max(depth, self.untold)

    def given(self, replica: str, rank: int | None) -> int:
        return self.counts.get(rank, 0)


def hearing(*depths: int) -> Sent:
    """Events tell all, of one rank for each of `depths`."""
    index = Sent()
    known = index.listen("a", range(len(depths)), 1000)
    for each, depth in zip(known.values(), depths, strict=True):
        each.trust()
        each.stored(KEYS[:depth], None, medium="GPU", group=0, scale=1)
    return index


def match(index: Index, *told: Told, rank: int | None = None) -> Match:
    return together(index, "a", KEYS, 0.0, rank, told)


def test_where_nobody_hears_events_the_deeper_of_what_is_presumed() -> None:
    index = Sent()
    index.record("a", KEYS[:50])
    assert match(index, Told(40, continues=True)) == Match(50, False)
    assert match(index, Told(50, continues=True)) == Match(50, True)
    assert match(index, Told(60)) == Match(60, False)
    assert match(index) == Match(50, False)


def test_what_events_told_another_router_is_believed_and_own_guesses_are_not() -> None:
    index = Sent()
    index.record("a", KEYS[:50])
    assert match(index, Told(40, continues=True, exact=True)) == Match(40, True)
    assert match(index, Told(40, exact=True, soon_from=32, soon=70)) == Match(70, False)
    assert match(index, Told(40, exact=True, soon_from=48, soon=70)) == Match(40, False)  # there is a gap before that


def test_what_was_sent_a_moment_ago_counts() -> None:
    assert match(Sent(untold=60), Told(40, continues=True, exact=True)) == Match(60, False)


def test_a_page_that_is_not_told_whole_may_hold_what_is_presumed() -> None:
    index = Sent()
    index.record("a", KEYS[:90])
    assert match(index, Told(40, exact=True, open=True)) == Match(48, False)
    assert match(index, Told(48, exact=True, open=True)) == Match(48, False)
    assert match(Sent(), Told(40, exact=True, open=True)) == Match(40, False)


def test_own_events_know_best_but_for_what_others_have_just_sent() -> None:
    index = hearing(30)
    assert match(index, Told(90, exact=True)) == Match(30, False)
    assert match(index, Told(25, exact=True, soon_from=16, soon=70)) == Match(70, False)
    assert match(index, Told(40, exact=True, soon_from=32, soon=70)) == Match(30, False)
    assert match(index, Told(30, exact=True, continues=True)) == Match(30, True)


def test_own_events_know_what_was_dropped_since_others_sent_it() -> None:
    """Whoever told the store of it may be dead; the prompt that brought it counts there for some seconds yet."""
    index = hearing(70)
    index.known("a")[0].removed(KEYS[50:60], medium="GPU", group=0)
    assert match(index, Told(70, exact=True, soon_from=0, soon=90)) == Match(50, False)
    index.known("a")[0].removed(KEYS[20:30], medium="GPU", group=0)
    index.known("a")[0].stored(KEYS[20:30], KEYS[19], medium="GPU", group=0, scale=1)
    assert match(index, Told(70, exact=True, soon_from=0, soon=90)) == Match(50, False)


def test_ranks_are_followed_each_for_itself() -> None:
    index = hearing(30, 10)
    base = Told(99)
    assert match(index, base, Told(30, exact=True, rank=0), Told(10, exact=True, rank=1)) == Match(30, False, 0)
    soon = Told(10, exact=True, soon_from=0, soon=80, rank=1)
    assert match(index, base, Told(30, exact=True, rank=0), soon) == Match(80, False, 1)
    assert match(index, base, Told(30, exact=True, rank=0), soon, rank=0) == Match(30, False, 0)


def test_ranks_that_others_hear() -> None:
    index = Sent(counts={0: 5, 1: 2})
    zero, one = Told(30, exact=True, rank=0), Told(20, exact=True, rank=1)
    assert match(index, Told(99), zero, one) == Match(30, False, 0)
    assert match(index, Told(99), zero, one, rank=1) == Match(20, False, 1)
    # Equally warm: the one that was given less.
    assert match(index, Told(99), Told(0, exact=True, rank=0), Told(0, exact=True, rank=1)) == Match(0, False, 1)
    # One that is not known makes nothing of the others.
    assert match(index, Told(15), zero, Told(20, rank=1)) == Match(15, False)
