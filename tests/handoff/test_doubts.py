"""A replica whose KV does not arrive is not made to compute prompts in vain."""

from __future__ import annotations

from router.handoff.doubts import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Doubts


def test_a_failure_is_a_pause_and_a_trials_failure_twice_as_long_a_one() -> None:
    doubts = Doubts()
    assert not doubts.doubted("a", 0.0)
    now, pause = 0.0, FIRST_PAUSE_SECONDS
    doubts.failed("a", now)
    while pause < LONGEST_PAUSE_SECONDS:
        assert doubts.doubted("a", now + pause - 0.01)
        now += pause
        assert not doubts.doubted("a", now)
        doubts.begin("a", now)
        assert doubts.doubted("a", now)
        doubts.failed("a", now)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    assert not doubts.doubted("a", now + LONGEST_PAUSE_SECONDS)
    assert not doubts.doubted("b", now)


def test_those_that_were_under_way_count_once() -> None:
    doubts = Doubts()
    for now in (0.0, 0.5, 0.9):
        doubts.failed("a", now)
    assert not doubts.doubted("a", FIRST_PAUSE_SECONDS)


def test_one_that_arrives_ends_all_doubt() -> None:
    doubts = Doubts()
    doubts.failed("a", 0.0)
    doubts.begin("a", 1.0)
    doubts.arrived("a")
    assert not doubts.doubted("a", 1.0)
    doubts.failed("a", 2.0)
    assert not doubts.doubted("a", 2.0 + FIRST_PAUSE_SECONDS)
