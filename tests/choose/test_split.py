"""Local or split: by every decider's own rule, exact, and the same as going through all pairs one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.choose.cost import Candidate, End
from router.choose.split import Choice, Cost, SplitDecision, decider
from router.fleet.links import Link, Links
from router.fleet.rates import Rates

RDMA = Link(45e9, 0.0003, rdma=True)
TCP = Link(2.5e9, 0.001, rdma=False)


def candidate(
    name: str,
    *,
    cached: int = 0,
    waiting: float = 0.0,
    decoding: int = 0,
    fetching: float = 0.0,
    fetched: float = 0.0,
    expected: int = 0,
    prefilling: tuple[float, float] = (0.0, 0.0),
    room: float = math.inf,
    freed: float = 0.0,
    continues: bool = False,
) -> Candidate:
    return Candidate(
        name,
        (cached,),
        continues,
        waiting,
        decoding,
        decoding,
        0.0,
        end=End(fetching, expected, fetched, *prefilling, decoding, room, freed),
    )


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
    assert pair.price.prefill.price.prefill_ms == pytest.approx(asked.rates.prefill_ms(5000, 0))


pairs = st.floats(0, 2000)


@settings(deadline=None)
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
    # Nobody decodes or prefills: what is computed by one of few would cost those behind it more than by one of many.
    candidates = [
        candidate(
            f"r{place}",
            cached=blocks * 16,
            waiting=waiting,
            expected=expected,
            fetched=expected * 1e8,
            room=waiting * 5,
            freed=4000.0,
        )
        for place, (blocks, waiting, expected) in enumerate([*computing, *answering])
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


def reason(decider: Cost, asked: Choice) -> str:
    decision = decider.decide(asked)
    assert decision.prefill is None
    return decision.reason


def test_over_a_slow_link_it_stays_and_says_why_unless_that_is_forced_or_clearly_pays() -> None:
    told, unknown = Links(TCP), Links(Link(2.5e9, 0.001))
    said = "the link is not RDMA (told: 2.5 GB/s): its first token would come in 558 ms, locally in 260"
    near = candidate("d", decoding=40)
    assert reason(Cost(), choice(IDLE, [near], links=told)) == said
    assert reason(Cost(), choice(IDLE, [near], links=unknown)) == said
    assert names(Cost(force=True).decide(choice(IDLE, [near], links=told))) == ("p", "d")
    assert names(Cost().decide(choice(IDLE, [near], links=Links(RDMA)))) == ("p", "d")
    # It saves many times as much as it comes later.
    full = candidate("d", decoding=40, prefilling=(0.9, 0.0))
    assert names(Cost().decide(choice(IDLE, [full], links=told))) == ("p", "d")
    assert reason(Cost(caution=400), choice(IDLE, [full], links=told)) == said
    late = choice([candidate("p", waiting=300)], [full], links=told)
    assert reason(Cost(), late) == said.replace("558", "858")
    assert names(Cost(slow_late=3).decide(late)) == ("p", "d")
    # It comes sooner, but saves less than the transfer takes.
    waiting = choice(IDLE, [candidate("d", waiting=330)], links=told)
    assert reason(Cost(), waiting) == "local costs hardly more"
    assert names(Cost(force=True).decide(waiting)) == ("p", "d")
    # Warm on the one, long and cold on the other, and a link that is not that slow.
    warm, faster = candidate("p", cached=48_000), Links(Link(7e9, 0.001, rdma=False))
    assert names(Cost().decide(choice([warm], [candidate("d")], tokens=50_000, links=faster))) == ("p", "d")
    unknown.observe("p", "d", size=40e9, seconds=1.001)  # as fast as RDMA
    assert names(Cost().decide(choice(IDLE[:1], [near], links=unknown))) == ("p", "d")


@pytest.mark.parametrize(
    ("decider", "tokens", "answer", "said"),
    [
        (Cost(), 200, 250, "only 200 uncached tokens"),
        (Cost(least_uncached=6000), 5000, 250, "only 5000 uncached tokens"),
        (Cost(least_ratio=10), 5000, 501, "5000 uncached tokens for an answer of 501"),
        (Cost(gain=1.0), 5000, 250, "local costs hardly more"),
    ],
)
def test_guards(decider: Cost, tokens: int, answer: int, said: str) -> None:
    assert reason(decider, choice(IDLE, BUSY, tokens=tokens, answer=answer)) == said


def test_several_prompts_stay_together() -> None:
    both = [Candidate(each.name, (0, 0), False, each.waiting_ms, each.decoding, 0, 0.0) for each in (*IDLE, *BUSY)]
    asked = Choice(both, [0, 1], [2, 3], [5000, 5000], 250, Rates(20_000), Links(RDMA))
    assert reason(Cost(), asked) == "several prompts stay together"


def test_the_busier_the_fleet_the_more_counts_what_is_held_up() -> None:
    def delay_ms(share: float) -> float:
        computing = [candidate("p", prefilling=(share, 0.0))]
        held = choice(computing, [candidate("d", decoding=8)]).local_price.prefill
        assert held.others_ms == pytest.approx(0.08 * 8 * prefill_ms)
        return held.delay_ms

    prefill_ms = Rates(20_000).prefill_ms(5000, 0)
    # Eight answers of 5 tokens' worth in each step of 20 ms leave nine tenths of the room.
    assert delay_ms(0) == pytest.approx(0.0015 / 0.9**3 * 8 * prefill_ms)
    assert delay_ms(0.4) == pytest.approx(0.0015 / 0.5**3 * 8 * prefill_ms)
    assert delay_ms(9) == pytest.approx(0.0015 / 0.075**3 * 8 * prefill_ms)


def test_what_is_delayed_later_does_not_tell_replicas_that_answer_apart() -> None:
    full = (0.9, 0.0)
    asked = choice(IDLE, [candidate("d", decoding=4, prefilling=full), candidate("e", waiting=300, prefilling=full)])
    assert asked.candidates[asked.local].name == "d"
    first, second = (price.prefill.delay_ms for price in asked.locals)
    assert first == second > 300


def test_a_replica_of_both_roles_delays_as_much_when_it_computes_for_another() -> None:
    both = [candidate("b", decoding=8), candidate("c", decoding=8)]
    asked = Choice(both, [0, 1], [0, 1], [5000], 250, Rates(20_000), Links(RDMA))
    pair = asked.best_pair()
    assert pair is not None
    assert pair.price.prefill.delay_ms == asked.local_price.prefill.delay_ms > 0


def test_kv_that_does_not_fit_waits_until_enough_has_ended() -> None:
    full, roomy = candidate("d", room=2250, freed=1500), candidate("e", waiting=1900)
    asked = choice(IDLE, [full])
    # 5,000 tokens and an answer of 250: 3,000 more than there is room for, at 1,500 a second.
    assert asked.local_price.prefill.own_ms == pytest.approx(2000 + asked.rates.prefill_ms(5000, 0))
    pair = asked.best_pair()
    assert pair is not None
    assert pair.price.own_ms == pytest.approx(2000 + pair.price.transfer_ms + 35)
    asked = choice(IDLE, [full, roomy])
    assert asked.candidates[asked.local].name == "e"


def test_a_beginning_that_others_hold_takes_no_room_and_a_past_of_its_own_does() -> None:
    def room_ms(*, continues: bool) -> float:
        there = candidate("d", cached=4000, continues=continues, room=250, freed=1000)
        return choice(IDLE, [there]).local_price.prefill.room_ms

    assert room_ms(continues=False) == pytest.approx(1000)
    assert room_ms(continues=True) == pytest.approx(5000)


def test_first_tokens_that_wait_for_their_kv_are_held_up_by_half_a_prefill() -> None:
    asked = choice(IDLE, [candidate("d", expected=2), candidate("e", waiting=50)])
    assert asked.candidates[asked.local].name == "e"
    held = choice(IDLE, [candidate("d", expected=2)]).local_price.prefill
    assert held.others_ms == pytest.approx(held.price.prefill_ms)


def test_a_pool_that_computes_for_others_is_spared_the_more_the_busier_and_smaller_it_is() -> None:
    def queue_ms(load: float, replicas: int) -> float:
        pool = [candidate(f"p{i}", prefilling=(load, 0.0)) for i in range(replicas)]
        pair = choice(pool, [candidate("d")]).best_pair()
        assert pair is not None
        return pair.price.prefill.others_ms

    prefill_ms = Rates(20_000).prefill_ms(5000, 0)
    assert queue_ms(0.0, 1) == 0.0
    # As long as what is added to a queue of half of a server's load; of seven servers, hardly any of it.
    assert queue_ms(0.5, 1) == pytest.approx(0.5 / (1 - 0.5) ** 2 * prefill_ms)
    assert queue_ms(0.5, 7) == pytest.approx(0.5**3 / (7 * 0.5) * (3 + 1) * prefill_ms)


def test_prompts_that_will_come_to_those_that_answer_wait_likewise() -> None:
    busy = choice(IDLE, [candidate("d", prefilling=(0.5, 0.0))]).local_price.prefill
    assert busy.others_ms == pytest.approx(2 * busy.price.prefill_ms)


def test_kv_that_arrives_behind_prefills_waits_for_them() -> None:
    idle, busy = (
        choice([candidate("p")], [candidate("d", prefilling=prefilling)]).best_pair()
        for prefilling in ((0.0, 0.0), (0.5, 100.0))
    )
    assert idle is not None
    assert busy is not None
    assert busy.price.own_ms == pytest.approx(idle.price.own_ms + 100 / (1 - 0.5))


def test_a_link_is_spared_the_more_the_busier_it_is() -> None:
    pair = choice([candidate("p")], [candidate("d", fetched=22.5e9)]).best_pair()
    assert pair is not None
    assert pair.price.queue_ms == pytest.approx(2 * pair.price.transfer_ms)


def test_no_first_token_comes_much_later_for_the_sake_of_others() -> None:
    held_up = candidate("d", decoding=200, prefilling=(0.9, 0.0))
    assert names(Cost().decide(choice([candidate("p", waiting=700)], [held_up]))) == ("p", "d")
    asked = choice([candidate("p", waiting=2000)], [held_up])
    said = reason(Cost(), asked)
    assert said == "its first token would come in 2309 ms, locally in 260"
    assert names(Cost(late=9).decide(asked)) == ("p", "d")


def test_what_is_on_its_way_already_delays_what_comes_behind_it() -> None:
    asked = choice([candidate("p")], [candidate("d", fetching=90e9)])
    pair = asked.best_pair()
    assert pair is not None
    assert pair.price.fetching_ms == 2000
    assert pair.price.own_ms == pytest.approx(2000 + pair.price.transfer_ms + 35)


def test_prices_are_what_is_likely_not_what_is_booked() -> None:
    asked = choice([candidate("p")], [candidate("d", waiting=100)])
    slow = asked.local_price.prefill.own_ms
    asked.rates.likely = 0.5
    assert replace(asked).local_price.prefill.own_ms == pytest.approx(slow / 2)
    assert asked.local_price.prefill.price.prefill_ms == asked.rates.prefill_ms(5000, 0)
