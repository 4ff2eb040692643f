"""What a split books, remembers and teaches, on both sides and on a clock of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from router.choose.cost import DECODE_WEIGHT, Candidate
from router.choose.dispatch import Dispatch, SplitPlacement
from router.choose.policies import policy
from router.choose.split import RESUME_MS, decider
from router.config import Address
from router.fleet.ledger import Stage
from router.fleet.links import RESUME_SECONDS, Link, Links
from router.fleet.rates import Rates
from router.fleet.replica import Replica, Role, State
from router.fleet.scrape import CacheConfig, Metrics
from router.index.memory import Index
from router.prompt.blocks import Chain, Hasher

HASHER = Hasher("sha256")
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}


def prompt(seed: int, tokens: int = 1000) -> Chain:
    return HASHER.chain([seed, *range(tokens - 1)], 16)


class Bench:
    def __init__(self, names: str = "pd") -> None:
        self.index, self.rates = Index(), Rates(8000)
        self.links = Links(Link(10e9, 0.0, rdma=True))
        self.dispatch = Dispatch(self.index, self.rates, policy("cost", tie_band_ms=10))
        self.replicas = [Replica(name, Address(name, 1, False, ""), State.READY, ROLES[name]) for name in names]
        for replica in self.replicas:
            replica.metrics = Metrics(cache=CacheConfig(16, 4097))
            self.index.size(replica.name, 4096)

    def place(self, now: float, chain: Chain, name: str = "always") -> SplitPlacement:
        return self.dispatch.place_split(
            now,
            self.replicas,
            [[chain]] * len(self.replicas),
            [chain.length],
            decider=decider(name),
            links=self.links,
            answer_tokens=30,
            visible=True,
        )

    def weigh(self, now: float, chain: Chain) -> Sequence[Candidate]:
        return self.dispatch.weigh_split(
            now,
            self.replicas,
            [[chain]] * len(self.replicas),
            [chain.length],
            decider=decider("never"),
            links=self.links,
            answer_tokens=30,
        ).candidates

    def depth(self, chain: Chain, name: str) -> int:
        return self.index.match(name, chain.keys).depth


def test_both_sides_are_booked_at_once_and_released_one_after_the_other() -> None:
    bench = Bench()
    p, d = (replica.load for replica in bench.replicas)
    split = bench.place(0.0, prompt(1))
    assert split.prefill is not None
    prefill_ms = bench.rates.prefill_ms(1000, 0)
    assert (p.in_flight, p.decoding, p.waiting_ms(0.0)) == (1, 0, pytest.approx(prefill_ms))
    assert (d.in_flight, d.decoding, d.waiting_ms(0.0)) == (1, 0, 0.0)
    assert (p.routed(0.0), d.routed(0.0)) == (pytest.approx(prefill_ms / 0.125), 30 * DECODE_WEIGHT)
    assert [bench.depth(prompt(1), name) for name in "pd"] == [62, 62]
    assert split.size == 1000 * bench.links.bytes_per_token
    bench.dispatch.handed(0.5, split, visible=True)
    assert (p.in_flight, p.decoding, p.waiting_ms(0.5)) == (0, 0, 0.0)
    assert (d.in_flight, d.decoding) == (1, 0)
    bench.dispatch.fetched(0.6, split, bench.links)
    assert (d.in_flight, d.decoding) == (1, 1)
    bench.dispatch.end(1.0, split.decode)
    bench.dispatch.end(1.0, split.prefill)
    assert (p.in_flight, d.in_flight, d.decoding) == (0, 0, 0)


def test_what_is_held_against_it_for_the_sake_of_others_makes_it_due_no_later() -> None:
    bench = Bench()
    for _ in range(9):
        bench.replicas[1].load.book_decode(0.0, work=1).first_token(0.0)
    split = bench.place(0.0, prompt(1))
    assert split.prefill is not None
    prefill_ms = bench.rates.prefill_ms(1000, 0)
    assert split.prefill.due == pytest.approx(prefill_ms / 1000)
    arrival_ms = prefill_ms + bench.links.usual.transfer_ms(split.size)
    assert split.decode.due == pytest.approx((arrival_ms + RESUME_MS) / 1000)


def test_what_decodes_does_all_of_it_where_nothing_is_split() -> None:
    bench = Bench()
    split = bench.place(0.0, prompt(1), "never")
    assert (split.prefill, split.decode.replica.name) == (None, "d")
    assert split.decode.booking.stage == Stage.PREFILL
    assert [bench.depth(prompt(1), name) for name in "pd"] == [0, 62]
    bench.dispatch.handed(0.1, split, visible=True)
    assert split.decode.booking.stage == Stage.PREFILL
    bench.dispatch.fetched(0.5, split, bench.links)
    assert split.decode.booking.stage == Stage.DECODE
    assert bench.rates.token_ms > 0.125
    assert bench.links.between("p", "d") is bench.links.usual


def test_each_side_teaches_what_it_shows() -> None:
    bench, alone = Bench(), Rates(8000)
    split = bench.place(0.0, prompt(1))
    bench.dispatch.handed(0.5, split, visible=True)
    alone.observe("p", tokens=1000, cached=0, queued_ms=0.0, ttft_ms=500.0)
    assert bench.rates.token_ms == pytest.approx(alone.token_ms)
    bench.dispatch.fetched(0.5 + 0.1 + RESUME_SECONDS, split, bench.links)
    assert bench.rates.token_ms == pytest.approx(alone.token_ms)
    assert bench.links.between("p", "d").bandwidth == pytest.approx(split.size / 0.1)


def test_behind_a_prefill_nothing_is_learned_of_the_link() -> None:
    bench = Bench()
    bench.place(0.0, prompt(2, 60_000), "never")
    split = bench.place(0.0, prompt(1))
    bench.dispatch.handed(0.5, split, visible=True)
    bench.dispatch.fetched(9.0, split, bench.links)
    assert bench.links.between("p", "d") is bench.links.usual


def test_nor_where_one_came_meanwhile() -> None:
    bench = Bench()
    split = bench.place(0.0, prompt(1))
    bench.dispatch.handed(0.5, split, visible=True)
    bench.dispatch.end(0.8, bench.place(0.6, prompt(2), "never").decode)
    bench.dispatch.fetched(0.9, split, bench.links)
    assert bench.links.between("p", "d") is bench.links.usual


def test_an_answer_nobody_sees_begin_counts_as_decoding_once_it_was_handed_over() -> None:
    bench = Bench()
    split = bench.place(0.0, prompt(1))
    bench.dispatch.handed(0.5, split, visible=False)
    assert bench.replicas[1].load.decoding == 1


def test_a_client_that_leaves_before_the_kv_came_leaves_nothing_behind() -> None:
    bench = Bench()
    split = bench.place(0.0, prompt(1))
    assert split.prefill is not None
    bench.dispatch.handed(0.5, split, visible=True)
    for placement in (split.prefill, split.decode):
        bench.dispatch.left(0.55, placement)
        bench.dispatch.end(0.55, placement)
    assert [bench.depth(prompt(1), name) for name in "pd"] == [62, 0]
    assert bench.replicas[1].load.routed(0.55) == 0.0


def test_a_replica_of_both_roles_hands_nothing_to_itself() -> None:
    bench = Bench("b")
    split = bench.place(0.0, prompt(1))
    assert split.prefill is None
    bench = Bench("pb")
    bench.dispatch.end(0.0, bench.place(0.0, prompt(1)).decode)
    split = bench.place(10.0, prompt(2))
    assert split.prefill is not None
    assert (split.prefill.replica.name, split.decode.replica.name) == ("p", "b")


def test_what_is_in_flight_takes_room_at_the_one_that_answers_whoever_sent_it() -> None:
    bench = Bench()
    bench.place(0.0, prompt(1))
    (end,) = (candidate.end for candidate in bench.weigh(1.0, prompt(2)) if candidate.name == "d")
    assert end.room == 4096 * 16 - 1030
    bench.replicas[1].scraped(Metrics(running=3.0, waiting=0.0, cache=CacheConfig(16, 4097)), 1.0)
    bench.replicas[1].scraped(Metrics(running=3.0, waiting=0.0, cache=CacheConfig(16, 4097)), 2.0)
    (end,) = (candidate.end for candidate in bench.weigh(2.0, prompt(2)) if candidate.name == "d")
    # Two more than its own one, which are taken to be like the one that is asked about.
    assert end.room == 4096 * 16 - 1030 - 2 * 1000
    assert end.answering == 2
    bench.replicas[1].metrics = Metrics(cache=CacheConfig(16))
    (end,) = (candidate.end for candidate in bench.weigh(2.0, prompt(2)) if candidate.name == "d")
    assert end.room == math.inf
