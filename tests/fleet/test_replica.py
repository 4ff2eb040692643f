"""What a replica's metrics add to what the router knows itself."""

from __future__ import annotations

import pytest

from router.config import Address
from router.fleet.replica import STALE_SECONDS, Replica, Role
from router.fleet.scrape import Metrics


def replica_with(in_flight: int) -> Replica:
    replica = Replica("a", Address("a", 1, False, ""))
    for _ in range(in_flight):
        replica.load.book(0.0, prefill_ms=0, work=0, visible=True)
    return replica


def test_own_requests_are_no_strangers() -> None:
    replica = replica_with(5)
    for now in (1.0, 2.0):
        replica.scraped(Metrics(running=3.0, waiting=2.0), now)
    assert replica.strangers(2.0) == (0, 0)


def test_what_is_seen_twice_is_somebody_elses() -> None:
    replica = replica_with(2)
    replica.scraped(Metrics(running=6.0, waiting=3.0), 1.0)
    assert replica.strangers(1.0) == (0, 0)
    replica.scraped(Metrics(running=5.0, waiting=1.0), 2.0)
    assert replica.strangers(2.0) == (3, 1)


def test_ends_that_the_router_has_seen_since_make_no_strangers() -> None:
    replica = replica_with(0)
    bookings = [replica.load.book(0.0, prefill_ms=0, work=0, visible=True) for _ in range(4)]
    for now in (1.0, 2.0):
        replica.scraped(Metrics(running=4.0, waiting=0.0), now)
    for booking in bookings:
        booking.close(2.5)
    assert replica.strangers(2.5) == (0, 0)


def test_stale_and_missing_readings_say_nothing() -> None:
    replica = replica_with(0)
    assert replica.strangers(0.0) == (0, 0)
    for now in (1.0, 2.0):
        replica.scraped(Metrics(running=4.0), now)
    assert replica.strangers(2.0) == (4, 0)
    assert replica.strangers(2.1 + STALE_SECONDS) == (0, 0)
    replica.scraped(Metrics(), 3.0)
    assert replica.strangers(3.0) == (0, 0)


def test_a_restart_forgets_what_was_read() -> None:
    replica = replica_with(0)
    for now in (1.0, 2.0):
        replica.scraped(Metrics(running=4.0), now)
    replica.restarted()
    assert replica.strangers(2.0) == (0, 0)


@pytest.mark.parametrize(
    ("role", "prefills", "decodes"),
    [(Role.BOTH, True, True), (Role.PREFILL, True, False), (Role.DECODE, False, True)],
)
def test_what_a_role_may_be_given(role: Role, prefills: bool, decodes: bool) -> None:
    replica = Replica("a", Address("a", 1, False, ""), role=role)
    assert (replica.prefills, replica.decodes) == (prefills, decodes)
    assert Replica("b", Address("b", 1, False, "")).role is Role.BOTH
