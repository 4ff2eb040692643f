"""Local or split: by every decider's own rule, exact, and the same as going through all pairs one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.choose.cost import Candidate
from router.choose.split import Choice, Cost, SplitDecision, decider
from router.fleet.links import Link, Links
from router.fleet.rates import Rates

RDMA = Link(45e9, 0.0003, rdma=True)
TCP = Link(2.5e9, 0.001, rdma=False)


def candidate(name: str, *, cached: int = 0, waiting: float = 0.0, decoding: int = 0, routed: float = 0.0) -> Candidate:
    return Candidate(name, (cached,), False, waiting, decoding, decoding, routed)


def choice(
    computing: Sequence[Candidate],
    answering: Sequence[Candidate],
    *,
    tokens: int = 5000,
    answer: int = 250,
    links: Links | None = None,
) -> Choice:
    """Replicas of one role each."""
    everyone = [*computing, *answering]
    first = range(len(computing))
    return Choice(
        everyone, first, range(len(first), len(everyone)), [tokens], answer, Rates(20_000), links or Links(RDMA)
    )


def names(decision: SplitDecision) -> tuple[str | None, str]:
    prefill = None if decision.prefill is None else decision.candidates[decision.prefill].name
    return prefill, decision.candidates[decision.decode].name


IDLE = candidate("p"), candidate("q")
BUSY = candidate("d", waiting=900, decoding=20), candidate("e", waiting=800, decoding=20)


@pytest.mark.parametrize(
    ("name", "tokens", "cached", "expected"),
    [
        ("always", 20, 0, ("p", "d")),
        ("never", 50_000, 0, (None, "d")),
        ("uncached_tokens", 20, 0, ("p", "d")),
        ("uncached_tokens", 1000, 992, (None, "d")),
        ("isl_bounding", 1000, 304, (None, "d")),
        ("isl_bounding", 1000, 288, ("p", "d")),
        ("isl_bounding", 10_000, 7936, ("p", "d")),
    ],
)
def test_rules_by_name(name: str, tokens: int, cached: int, expected: tuple[str | None, str]) -> None:
    asked = choice([candidate("p")], [candidate("d", cached=cached)], tokens=tokens)
    assert names(decider(name).decide(asked)) == expected


@pytest.mark.parametrize("name", ["cost", "always", "uncached_tokens", "isl_bounding"])
def test_with_nobody_to_compute_it_elsewhere_it_stays(name: str) -> None:
    assert names(decider(name).decide(choice([], BUSY))) == (None, "e")
    both = Choice([BUSY[0]], [0], [0], [5000], 250, Rates(20_000), Links(RDMA))
    assert names(decider(name).decide(both)) == (None, "d")


def test_idle_replicas_do_all_of_it_and_busy_ones_are_helped() -> None:
    idle = candidate("d"), candidate("e")
    assert names(Cost().decide(choice(IDLE, idle))) == (None, "d")
    prefill, _ = names(Cost().decide(choice(IDLE, BUSY)))
    assert prefill == "p"


def test_what_is_cached_where_it_is_answered_is_not_moved() -> None:
    asked = choice([candidate("p")], [candidate("d", cached=4000), candidate("e")])
    pair = asked.best_pair()
    assert pair is not None
    assert asked.candidates[pair.decode].name == "d"
    assert pair.price.transfer_ms == pytest.approx(0.3 + 1000 * 131_072 / 45e9 * 1000)
    assert pair.price.prefill.prefill_ms == pytest.approx(asked.rates.prefill_ms(5000, 0))


pairs = st.floats(0, 2000)


@given(
    computing=st.lists(st.tuples(st.integers(0, 300), pairs, st.integers(0, 9)), min_size=1, max_size=6),
    answering=st.lists(st.tuples(st.integers(0, 300), pairs, st.integers(0, 30)), min_size=1, max_size=6),
    both=st.integers(0, 3),
    told=st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.floats(1e8, 1e11), max_size=12),
)
def test_the_best_pair_is_the_best_of_all_pairs(
    computing: list[tuple[int, float, int]],
    answering: list[tuple[int, float, int]],
    both: int,
    told: dict[tuple[int, int], float],
) -> None:
    candidates = [
        candidate(f"r{place}", cached=blocks * 16, waiting=waiting, decoding=decoding)
        for place, (blocks, waiting, decoding) in enumerate([*computing, *answering])
    ]
    links = Links(TCP)
    first, second = len(computing), len(candidates)
    for (prefill, decode), bandwidth in told.items():
        links.tell(f"r{prefill}", f"r{first + decode}", Link(bandwidth, 0.002))
    computers, answerers = range(min(first + both, second)), range(first, second)
    asked = Choice(candidates, computers, answerers, [5000], 100, Rates(20_000), links)
    found = asked.best_pair()
    totals = [
        alone.price.total_ms
        for prefill in computers
        for decode in answerers
        if prefill != decode and (alone := replace_ends(asked, prefill, decode).best_pair()) is not None
    ]
    assert (found is None) == (not totals)
    if found is not None:
        assert found.price.total_ms == pytest.approx(min(totals))


def replace_ends(asked: Choice, prefill: int, decode: int) -> Choice:
    return replace(asked, computing=[prefill], answering=[decode])
