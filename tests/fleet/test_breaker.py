"""The breaker, second by second."""

from __future__ import annotations

from router.fleet.breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Breaker,
    Condition,
)


def opened(now: float = 100.0, *, unreachable: bool = False) -> Breaker:
    breaker = Breaker()
    pauses = [breaker.failed(now, unreachable=unreachable) for _ in range(FAILURES_TO_OPEN)]
    assert pauses == [None] * (FAILURES_TO_OPEN - 1) + [FIRST_PAUSE_SECONDS]
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            assert breaker.failed(0.0) is None
        breaker.answered()
    assert (breaker.state(0.0), breaker.failures) == (Condition.CLOSED, 0)
    assert opened().state(100.0) is Condition.OPEN


def test_an_answer_that_has_only_begun_clears_no_record() -> None:
    """One that begins every answer and breaks each off is as broken as one that begins none."""
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        assert breaker.answering() is False
        assert breaker.failed(0.0) is None
    assert breaker.failed(0.0) == FIRST_PAUSE_SECONDS


def test_after_the_pause_one_request_is_let_through() -> None:
    breaker = opened(100.0)
    assert not breaker.admits(100.9)
    assert breaker.seconds_left(100.25) == 0.75
    assert breaker.begin(100.9) is False
    assert breaker.state(101.0) is Condition.HALF_OPEN
    assert breaker.admits(101.0)
    assert breaker.begin(101.0) is True
    assert not breaker.admits(101.0)
    assert breaker.begin(101.0) is False
    assert breaker.seconds_left(111.0) == 0.0
    assert breaker.begin(111.0) is False
    # It takes its time: so long, and another one may find out.
    assert breaker.begin(101.0 + LONGEST_PAUSE_SECONDS) is True


def test_the_trials_answer_closes_it_and_until_it_is_whole_one_failure_opens_it_again() -> None:
    breaker = opened(100.0)
    breaker.begin(101.0)
    assert breaker.answering() is True
    assert breaker.state(101.0) is Condition.CLOSED
    assert breaker.failed(101.5) == 2 * FIRST_PAUSE_SECONDS
    breaker.begin(104.0)
    assert breaker.answering() is True
    breaker.answered()
    assert breaker.failures == 0
    assert breaker.failed(105.0) is None
    for _ in range(FAILURES_TO_OPEN - 2):
        breaker.failed(105.0)
    assert breaker.failed(105.0) == FIRST_PAUSE_SECONDS  # it was sound meanwhile


def test_failed_trials_double_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(0.0), 0.0, []
    for _ in range(7):
        now += 1000.0
        assert breaker.begin(now)
        pauses.append(breaker.failed(now, trial=True))
    assert pauses == [2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]


def test_those_that_were_under_way_when_it_opened_change_nothing() -> None:
    breaker = opened(100.0)
    assert [breaker.failed(100.5) for _ in range(20)] == [None] * 20
    assert breaker.seconds_left(100.5) == 0.5
    assert breaker.begin(101.0)
    assert breaker.failed(101.0) is None  # another one: the trial is still on its way
    assert not breaker.admits(101.0)


def test_a_trial_that_proves_nothing_makes_way_for_the_next() -> None:
    breaker = opened(100.0)
    assert breaker.begin(101.0)
    breaker.end(trial=False)
    assert not breaker.admits(101.0)
    breaker.end(trial=True)
    assert breaker.admits(101.0)
    assert breaker.state(101.0) is Condition.HALF_OPEN


def test_a_probe_closes_it_only_where_connecting_was_what_failed() -> None:
    assert opened(unreachable=True).reached() is True
    breaker = opened(unreachable=False)
    assert breaker.reached() is False
    assert breaker.state(100.0) is Condition.OPEN
    assert Breaker().reached() is False
