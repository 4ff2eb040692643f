"""How fast KV moves: told, then measured. Exact numbers, on no clock."""

from __future__ import annotations

import pytest

from router.fleet.links import MOST_BYTES_PER_SECOND, RESUME_SECONDS, Link, Links

GB = 1e9


def test_a_pair_is_like_all_until_it_is_told_or_measured() -> None:
    links = Links(Link(40 * GB, 0.0, rdma=True))
    links.tell("p", "d", Link(2 * GB, 0.001, rdma=False))
    assert links.between("p", "d").transfer_ms(2 * GB) == pytest.approx(1001)
    assert links.between("p", "e").transfer_ms(2 * GB) == pytest.approx(50)
    links.observe("p", "e", size=1 * GB, seconds=0.1)
    assert links.between("p", "e").bandwidth == pytest.approx(10 * GB)
    assert links.between("p", "f") is links.usual
    links.forget("e")
    assert links.between("p", "e") is links.usual


def test_a_faster_transfer_counts_for_more_than_a_slower_one() -> None:
    link = Link(40 * GB, 0.5)
    link.observe(1 * GB, 1.5)
    assert (link.bandwidth, link.measured) == (1 * GB, True)
    link.observe(8 * GB, 1.5)
    assert link.bandwidth == pytest.approx(8**0.3 * GB)
    link.observe(8**0.3 * GB / 8, 1.5)
    assert link.bandwidth == pytest.approx(8**0.25 * GB)


@pytest.mark.parametrize(("size", "seconds"), [(1e6, 0.5), (1e9, 0.001), (1e9, 0.0005)])
def test_what_the_latency_hides_measures_nothing(size: float, seconds: float) -> None:
    link = Link(2.5 * GB, 0.001)
    link.observe(size, seconds)
    assert (link.bandwidth, link.measured) == (2.5 * GB, False)


def test_a_link_is_fast_if_told_so_or_measured_so() -> None:
    assert Link(1 * GB, rdma=True).fast
    assert not Link(100 * GB, rdma=False).fast
    unknown = Link()
    assert not unknown.fast
    unknown.observe(10 * GB, 1.0)
    assert unknown.fast


def test_a_first_token_tells_of_the_link_less_the_engines_step() -> None:
    links = Links(Link(2.5 * GB, 0.0))
    links.answered("p", "d", size=1 * GB, seconds=0.5 + RESUME_SECONDS)
    assert links.between("p", "d").bandwidth == pytest.approx(2 * GB)
    links.answered("p", "e", size=1 * GB, seconds=0.001)
    assert links.between("p", "e").bandwidth == pytest.approx(MOST_BYTES_PER_SECOND)


def test_nothing_is_faster_than_the_fastest() -> None:
    links = Links(Link(2.5 * GB, 0.001))
    links.tell("p", "d", Link(40 * GB, 0.01))
    links.observe("p", "e", size=5 * GB, seconds=1.001)
    links.forget("d")
    assert (links.fastest.bandwidth, links.fastest.latency) == (40 * GB, 0.001)
