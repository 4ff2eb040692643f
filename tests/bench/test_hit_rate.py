"""From records to results, and the bar that the default policy is held to."""

from dataclasses import replace

import pytest

from bench.ceilings import Exchange
from bench.client import Record
from bench.hit_rate import quantile, summarise
from bench.replica_metrics import ReplicaMetrics

A, B = "127.0.0.1:1", "127.0.0.1:2"
URLS = [f"http://{name}" for name in (A, B)]
POOL = ReplicaMetrics(finished=0, running=0, waiting=0, kv_usage=0.0, queries=0, hits=0, block_size=4, blocks=101)
PROMPT = tuple(range(9))


def record(replica: str, *, cached: int = 0, ttft_s: float = 0.01, **changed: object) -> Record:
    made = Record(
        session=0,
        turn=0,
        sent_s=1.0,
        ttft_s=ttft_s,
        ended_s=2.0,
        prompt_tokens=9,
        cached_tokens=cached,
        answer_tokens=1,
        replica=replica,
        exchange=Exchange(PROMPT, (50,)),
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def test_a_run_in_figures() -> None:
    records = [
        record(A, predicted_tokens=0),
        record(A, cached=8, ttft_s=0.02, predicted_tokens=8),
        record(B, ttft_s=0.03, predicted_tokens=4),
        record(A, cached=8, ttft_s=0.04),
    ]
    found = summarise("cost", 2, records, URLS, [POOL, POOL])
    assert (found.requests, found.failed, found.prompt_tokens, found.cached_tokens) == (4, 0, 36, 16)
    assert found.hit_rate == 16 / 36
    # The oracle sends all four to one replica: three hits of two blocks.
    assert found.ceilings.greedy_oracle == 24 / 36
    assert found.predicted_exactly == 0.5
    assert found.of_oracle == pytest.approx(16 / 24)
    assert found.shares == {A: 3, B: 1}
    assert found.busiest_over_mean == 1.5
    assert found.ttft_mean_ms == pytest.approx(25)
    assert (found.ttft_p50_ms, found.ttft_p90_ms) == (20, 40)
    assert found.misses() == [
        "hit rate is 0.667 of the greedy oracle's, not 0.95",
        "the busiest replica has 1.50 of the mean, not 1.25",
    ]


def test_a_run_over_the_bar_misses_nothing() -> None:
    records = [record(A), record(B, cached=8), record(A, cached=8), record(B, cached=8)]
    assert summarise("cost", 2, records, URLS, [POOL, POOL]).misses() == []


def test_an_idle_replica_counts_in_the_balance() -> None:
    records = [record(A), record(A, cached=8)]
    assert summarise("cost", 1, records, URLS, [POOL, POOL]).busiest_over_mean == 2.0


def test_failed_requests_are_counted_and_named_and_in_no_rate() -> None:
    records = [record(A), record(A, cached=8), record(B, error="status 503: full", exchange=None, ttft_s=9.0)]
    found = summarise("cost", 1, records, URLS, [POOL, POOL])
    assert (found.requests, found.failed, found.prompt_tokens) == (3, 1, 18)
    assert found.ttft_p90_ms == 10
    assert found.misses()[0] == "1 of 3 requests failed (status 503: full)"


def test_a_run_in_which_everything_failed() -> None:
    found = summarise("cost", 1, [record("", error="refused", exchange=None)], URLS, [POOL, POOL])
    assert (found.hit_rate, found.failed, found.shares) == (0.0, 1, {A: 0, B: 0})
    assert found.misses()[0] == "1 of 1 requests failed (refused)"


def test_without_token_ids_there_is_no_ceiling() -> None:
    with pytest.raises(ValueError, match="return_token_ids"):
        summarise("cost", 1, [record(A, exchange=None)], URLS[:1], [POOL])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.9, 4), (1.0, 4)])
def test_quantiles_are_nearest_ranks(share: float, expected: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == expected
