"""Bookings: every number exact, on a clock of our own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.ledger import ROUTED_WINDOW_SECONDS, Load


def test_waiting_is_the_sum_of_prefills_less_what_was_done_of_the_first() -> None:
    load = Load()
    assert load.waiting_ms(0.0) == 0.0
    first = load.book(10.0, prefill_ms=200, work=200, visible=True)
    second = load.book(10.0, prefill_ms=100, work=100, visible=True)
    assert load.waiting_ms(10.0) == 300
    assert load.waiting_ms(10.05) == pytest.approx(250)
    # The first is late: it still occupies the engine, but promises nothing more.
    assert load.waiting_ms(11.0) == 100
    first.first_token(11.0)
    assert (load.waiting_ms(11.0), load.decoding, load.in_flight) == (100, 1, 2)
    assert load.waiting_ms(11.04) == pytest.approx(60)
    second.first_token(11.1)
    assert (load.waiting_ms(11.1), load.decoding) == (0.0, 2)
    first.close(12.0)
    second.close(12.0)
    assert (load.in_flight, load.decoding) == (0, 0)


def test_a_prefill_nobody_sees_the_end_of_is_done_in_its_time() -> None:
    load = Load()
    hidden = load.book(0.0, prefill_ms=100, work=100, visible=False)
    load.book(0.0, prefill_ms=50, work=50, visible=True)
    assert load.waiting_ms(0.06) == pytest.approx(90)
    assert load.waiting_ms(0.12) == pytest.approx(30)  # the second has been worked on since 0.1
    assert load.decoding == 1
    hidden.close(1.0)
    assert (load.in_flight, load.decoding) == (1, 0)


def test_an_end_counts_once_and_a_first_token_after_it_not_at_all() -> None:
    load = Load()
    booking = load.book(0.0, prefill_ms=100, work=100, visible=True)
    booking.close(1.0)
    booking.close(1.0)
    booking.first_token(2.0)
    assert (load.in_flight, load.decoding, load.waiting_ms(2.0)) == (0, 0, 0.0)


def test_prefills_leave_the_queue_from_wherever_they_stand() -> None:
    load = Load()
    first, middle, last = (load.book(0.0, prefill_ms=ms, work=ms, visible=True) for ms in (100, 200, 400))
    middle.close(0.05)
    assert load.waiting_ms(0.05) == pytest.approx(450)  # the first is being worked on as before
    last.first_token(0.06)
    assert load.waiting_ms(0.06) == pytest.approx(40)
    behind = load.book(0.06, prefill_ms=800, work=800, visible=True)
    first.first_token(0.1)
    assert (load.waiting_ms(0.1), load.head_ms(0.2)) == (pytest.approx(800), pytest.approx(700))
    behind.close(0.2)
    assert (load.waiting_ms(0.2), load.head_ms(0.2)) == (0.0, 0.0)
    load.book(1.0, prefill_ms=100, work=100, visible=True)
    assert load.waiting_ms(1.0) == 100


def test_routed_work_fades() -> None:
    load = Load()
    load.book(0.0, prefill_ms=0, work=1000, visible=True)
    assert load.routed(0.0) == 1000
    assert load.routed(ROUTED_WINDOW_SECONDS) == pytest.approx(1000 / 2.718281828)
    load.book(ROUTED_WINDOW_SECONDS, prefill_ms=0, work=1000, visible=True)
    assert load.routed(ROUTED_WINDOW_SECONDS) == pytest.approx(1000 + 1000 / 2.718281828)


@pytest.mark.fault("load of the dead")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["book", "token", "close"]),
            st.integers(0, 9),
            st.floats(0, 500),
            st.floats(0, 0.2),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_counts_are_never_negative_and_return_to_zero(steps: list[tuple[str, int, float, float, bool]]) -> None:
    load, bookings, now = Load(), [], 0.0
    for what, which, ms, pause, visible in steps:
        now += pause
        if what == "book":
            bookings.append(load.book(now, prefill_ms=ms, work=ms, visible=visible))
        elif bookings:
            booking = bookings[which % len(bookings)]
            booking.first_token(now) if what == "token" else booking.close(now)
        assert load.waiting_ms(now) >= 0
        assert 0 <= load.decoding <= load.in_flight <= len(bookings)
    for booking in bookings:
        booking.close(now)
    assert (load.in_flight, load.decoding, load.waiting_ms(now)) == (0, 0, 0.0)


def test_a_prompt_computed_elsewhere_is_in_flight_and_nobody_waits_for_it() -> None:
    load = Load()
    booking = load.book_decode(0.0, work=500, sequences=2)
    assert (load.in_flight, load.decoding, load.waiting_ms(0.0), load.routed(0.0)) == (2, 0, 0.0, 500)
    own = load.book(1.0, prefill_ms=100, work=0, visible=True)
    assert load.waiting_ms(1.02) == pytest.approx(80)
    booking.first_token(1.03)
    assert (load.decoding, load.waiting_ms(1.04)) == (2, pytest.approx(60))
    own.close(2.0)
    booking.close(2.0)
    booking.close(2.0)
    assert (load.in_flight, load.decoding) == (0, 0)
    given_up = load.book_decode(3.0, work=0)
    given_up.close(3.0)
    given_up.first_token(3.0)
    assert (load.in_flight, load.decoding) == (0, 0)


def seen(age: float) -> float:
    """Seconds that a sum over the last minute is over, so long after the first request."""
    return ROUTED_WINDOW_SECONDS * (1 - math.exp(-age / ROUTED_WINDOW_SECONDS))


def test_prefills_given_lately_tell_how_long_one_waits_for_them() -> None:
    load = Load()
    assert load.prefilling(0.0) == (0.0, 0.0)
    load.book(0.0, prefill_ms=1000, work=1, visible=True)
    last = load.book(0.0, prefill_ms=2000, work=1, visible=True)
    share, wait = load.prefilling(0.0)
    # 3 s; a moment in a prefill is in the middle of it, on average.
    assert share == pytest.approx(3 / seen(10))
    assert wait == pytest.approx((1 * 500 + 2 * 1000) / seen(10))
    assert load.prefilling(90.0)[0] == pytest.approx(3 * math.exp(-90 / 60) / seen(90))
    last.take_back(0.0)
    last.take_back(0.0)
    share, wait = load.prefilling(0.0)
    assert (share, wait) == (pytest.approx(1 / seen(10)), pytest.approx(500 / seen(10)))
    # It still stands in line until it is closed.
    assert load.waiting_ms(0.0) == 3000
    last.close(0.0)
    assert load.waiting_ms(0.0) == 1000


def test_what_is_fetched_is_counted_and_expected_until_its_first_token() -> None:
    load = Load()
    first, second = (load.book_decode(0.0, work=10, fetches=3e9) for _ in range(2))
    assert (load.expected, load.fetching) == (2, 6e9)
    first.first_token(1.0)
    second.close(1.0)
    first.close(2.0)
    assert (load.expected, load.fetching) == (0, 0.0)
    assert load.fetched(30.0) == pytest.approx(6e9 * math.exp(-30 / 60) / seen(30))


def test_what_is_taken_back_late_takes_along_no_more_than_is_left_of_it() -> None:
    load, alone = Load(), Load()
    for each in (load, alone):
        each.book(0.0, prefill_ms=1000, work=1000, visible=True)
    failed = load.book(0.0, prefill_ms=3000, work=4000, visible=True)
    failed.take_back(60.0)
    failed.take_back(60.0)
    assert load.routed(60.0) == pytest.approx(alone.routed(60.0))
    assert load.prefilling(60.0) == pytest.approx(alone.prefilling(60.0))


def test_kv_that_was_never_fetched_is_taken_back() -> None:
    load, alone = Load(), Load()
    for each in (load, alone):
        each.book_decode(0.0, work=10, fetches=3e9)
    failed = load.book_decode(0.0, work=0, fetches=5e9)
    failed.take_back(30.0)
    assert load.fetched(30.0) == pytest.approx(alone.fetched(30.0))
    # It is on its way until it is closed.
    assert load.fetching == 8e9
    failed.close(30.0)
    assert (load.expected, load.fetching) == (1, 3e9)


def test_answers_under_way_are_counted_over_the_last_minute() -> None:
    load = Load()
    assert load.answering(0.0) == 0.0
    first, second = (load.book(0.0, prefill_ms=1, work=1, visible=True) for _ in range(2))
    first.first_token(0.0)
    # Two from the 30th second on, then one.
    second.first_token(30.0)
    first.close(60.0)
    one, two = seen(30.0) * math.exp(-60 / 60), seen(30.0) * math.exp(-30 / 60)
    assert load.answering(90.0) == pytest.approx((one + 2 * two + seen(30.0)) / seen(90.0))
    second.close(90.0)
    assert load.answering(90.0 + 600) == pytest.approx(0.0, abs=1e-3)


def test_what_answers_hold_is_counted_until_they_end_and_then_told_as_a_pace() -> None:
    load = Load()
    local = load.book(0.0, prefill_ms=1, work=1, visible=True, holds=3000)
    fetched = load.book_decode(0.0, work=1, holds=2000)
    left = load.book(0.0, prefill_ms=1, work=1, visible=True, holds=500)
    assert (load.holding, load.freed(0.0)) == (5500, 0.0)
    left.close(5.0)  # it never held anything
    local.first_token(5.0)
    fetched.first_token(5.0)
    assert (load.holding, load.freed(5.0)) == (5000, 0.0)
    for booking in (local, fetched):
        booking.close(30.0)
        booking.close(30.0)
    assert (load.holding, load.freed(30.0)) == (0, pytest.approx(5000 / seen(30.0)))
