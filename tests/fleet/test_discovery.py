"""Who is in the fleet, in which role, and what the fleet does without."""

from __future__ import annotations

import pytest

from router.fleet.discovery import Fleet
from router.fleet.replica import Card, Role, State
from router.fleet.scrape import Metrics

A, B, C = "http://a:1", "http://b:1", "http://c:1"
PRODUCER = Metrics(hands_over=True)
CONSUMER = Metrics(hands_over=True, fetches=True)


def roles(fleet: Fleet) -> dict[str, str]:
    return {replica.name: replica.role.value for replica in fleet}


def up(fleet: Fleet, *names: str) -> None:
    for replica in fleet:
        replica.state = State.READY if replica.name in names else State.UNSEEN
        replica.models = {"m": Card("m")}


def test_settings_give_roles_to_replicas_of_the_list_and_beside_it() -> None:
    fleet = Fleet([A, B], prefill=[A, C], decode=["http://d:1", C])
    assert roles(fleet) == {"a:1": "prefill", "b:1": "both", "c:1": "both", "d:1": "decode"}
    assert fleet.divided


def test_without_roles_nothing_is_divided() -> None:
    fleet = Fleet([A, B])
    up(fleet, "a:1")
    fleet.settle_roles()
    assert not fleet.divided
    assert fleet.missing() == fleet.lacking() == []


@pytest.mark.parametrize(
    ("shown", "settled", "divided"),
    [
        ((Metrics(), Metrics()), ("both", "both"), False),
        ((PRODUCER, CONSUMER), ("prefill", "decode"), True),
        ((CONSUMER, CONSUMER), ("both", "both"), True),  # kv_both looks like a consumer
        ((PRODUCER, Metrics()), ("prefill", "both"), True),
    ],
)
def test_roles_that_replicas_show(shown: tuple[Metrics, ...], settled: tuple[str, ...], divided: bool) -> None:
    fleet = Fleet([A, B])
    for replica, metrics in zip(fleet, shown, strict=True):
        replica.scraped(metrics, 0.0)
    fleet.settle_roles()
    assert (tuple(roles(fleet).values()), fleet.divided) == (settled, divided)


def test_what_is_shown_never_outweighs_what_was_set() -> None:
    fleet = Fleet([B], prefill=[A], decode=[A])
    for replica in fleet:
        replica.scraped(PRODUCER, 0.0)
    fleet.settle_roles()
    assert roles(fleet) == {"b:1": "prefill", "a:1": "both"}


def test_one_that_only_prefills_answers_only_where_nothing_else_is_left() -> None:
    fleet = Fleet([], prefill=[A], decode=[B])
    up(fleet, "a:1", "b:1")
    assert [replica.name for replica in fleet.able("m")] == ["b:1"]
    assert [replica.name for replica in fleet.computing("m")] == ["a:1"]
    up(fleet, "a:1")
    assert [replica.name for replica in fleet.able("m")] == ["a:1"]
    assert fleet["a:1"].role is Role.PREFILL


def test_a_role_that_was_never_there_is_missing_and_one_that_was_lost_is_lacking() -> None:
    fleet = Fleet([], prefill=[A], decode=[B])
    assert fleet.missing() == ["a:1: not reached yet", "b:1: not reached yet"]
    up(fleet, "b:1")
    fleet["a:1"].why = "connection refused"
    assert fleet.missing() == ["no replica for prefill is ready: a:1: not reached yet (connection refused)"]
    up(fleet, "a:1", "b:1")
    assert fleet.missing() == []
    up(fleet, "b:1")
    assert fleet.missing() == []
    assert fleet.lacking() == ["no replica for prefill is ready: a:1: not reached yet (connection refused)"]


def test_answers_wait_for_a_replica_that_decodes() -> None:
    fleet = Fleet([], prefill=[A], decode=[B])
    up(fleet, "a:1")
    assert fleet.missing() == ["no replica for decode is ready: b:1: not reached yet"]


def test_every_model_that_is_served_is_listed_whoever_serves_it() -> None:
    fleet = Fleet([A], prefill=[B], decode=[C])
    up(fleet, "a:1", "b:1", "c:1")
    assert fleet.models() is None
    fleet["b:1"].models = {"prefilled": Card("prefilled", entry={"id": "prefilled"})}
    fleet["a:1"].models = {"busy": Card("busy", entry={"id": "busy"})}
    fleet["a:1"].state = State.SILENT
    fleet["c:1"].models = {"m": Card("m", entry={"id": "m"})}
    assert all(fleet.able(model) for model in ("m", "busy", "prefilled"))
    assert sorted(entry["id"] for entry in fleet.models() or []) == ["busy", "m", "prefilled"]
