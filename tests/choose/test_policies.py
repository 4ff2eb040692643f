from __future__ import annotations

from typing import Any

import pytest

from router.choose.cost import Candidate, begins_branch, prices
from router.choose.policies import decide, policy
from router.fleet.rates import Rates

RATES = Rates(8000)


def candidate(name: str, cached: int = 0, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "name": name,
        "cached": (cached,),
        "continues": False,
        "waiting_ms": 0.0,
        "decoding": 0,
        "in_flight": 0,
        "routed": 0.0,
    }
    return Candidate(**fields | changes)


def chosen(*candidates: Candidate, tokens: int = 4000, name: str = "cost") -> str:
    return decide(policy(name, tie_band_ms=10), list(candidates), [tokens], RATES).candidate.name


def test_a_conversation_goes_where_its_past_is() -> None:
    assert chosen(candidate("a"), candidate("b", 3200, continues=True)) == "b"
    # Recent work does not matter to it: a past is not moved for the sake of evenness.
    assert chosen(candidate("a"), candidate("b", 3200, continues=True, routed=60_000.0)) == "b"


@pytest.mark.fault("miss goes to the idle tree")
def test_unless_the_wait_there_is_longer_than_the_prefill_elsewhere() -> None:
    elsewhere = prices([candidate("a")], [4000], RATES, branch=False)[0].slowed_ms
    assert chosen(candidate("a"), candidate("b", 3200, continues=True, waiting_ms=elsewhere / 2)) == "b"
    assert chosen(candidate("a"), candidate("b", 3200, continues=True, waiting_ms=elsewhere)) == "a"


def test_a_small_past_still_counts_among_equals() -> None:
    # 64 tokens are 8 ms at the assumed rate: within the tie band, and still the better of two.
    assert chosen(candidate("a"), candidate("b", 64, continues=True, routed=500.0), tokens=200) == "b"


@pytest.mark.fault("shared system prompt")
def test_a_popular_prefix_spreads() -> None:
    warm = candidate("a", 960)
    assert chosen(warm, candidate("b"), tokens=1000) == "a"
    assert chosen(candidate("a", 960, routed=8000.0), candidate("b"), tokens=1000) == "b"


@pytest.mark.fault("miss goes to the idle tree")
def test_an_idle_fleet_is_used_evenly() -> None:
    assert chosen(candidate("a", routed=5.0), candidate("b"), tokens=100) == "b"


def test_a_prompt_matched_to_its_end_of_turn_is_no_branch() -> None:
    assert begins_branch([candidate("a"), candidate("b", 100)])
    assert not begins_branch([candidate("a", 50), candidate("b", 100, continues=True)])
    # Another replica holds more of it, but only of what it shares with others.
    assert begins_branch([candidate("a", 50, continues=True), candidate("b", 100)])


def test_decoding_and_slowness_raise_the_price() -> None:
    plain, busy, slow = prices(
        [candidate("a"), candidate("b", decoding=10), candidate("c", slowness=2.0)], [1000], RATES, branch=False
    )
    assert busy.slowed_ms == pytest.approx(plain.slowed_ms * 1.7 / 1.2)
    assert busy.prefill_ms == plain.prefill_ms
    assert slow.prefill_ms == pytest.approx(plain.prefill_ms * 2)


def test_several_prompts_are_priced_together() -> None:
    both = Candidate("a", (1000, 0), False, 0.0, 0, 0, 0.0)
    assert prices([both], [2000, 500], RATES, branch=False)[0].prefill_ms == pytest.approx(
        RATES.prefill_ms(2000, 1000) + RATES.prefill_ms(500, 0)
    )


def test_round_robin_takes_turns_by_name() -> None:
    turns = policy("round_robin", tie_band_ms=10)
    candidates = [candidate("b", 4000), candidate("a"), candidate("c")]
    assert [decide(turns, candidates, [4000], RATES).candidate.name for _ in range(4)] == ["a", "b", "c", "a"]
    # Who only wants to know what the next one would be takes no turn.
    assert [decide(turns.aside(), candidates, [4000], RATES).candidate.name for _ in range(2)] == ["b", "b"]
    assert decide(turns, candidates, [4000], RATES).candidate.name == "b"


def test_least_load_counts_requests() -> None:
    assert chosen(candidate("a", 4000, in_flight=2), candidate("b", in_flight=1), name="least_load") == "b"
    assert chosen(candidate("a", routed=2.0), candidate("b", routed=1.0), name="least_load") == "b"


def test_an_unknown_policy() -> None:
    with pytest.raises(KeyError):
        policy("best", tie_band_ms=10)
