from __future__ import annotations

import pytest

from router.fleet.rates import ATTENTION_EVEN_TOKENS, LEAST_LIKELY, MARGIN, Rates


def test_prefill_time_grows_with_what_is_uncached_and_what_it_attends_to() -> None:
    rates = Rates(8000)
    assert rates.token_ms == pytest.approx(0.125)
    assert rates.prefill_ms(0, 0) == 0
    assert rates.prefill_ms(1000, 1000) == 0
    assert rates.prefill_ms(8000, 0) == pytest.approx(1000 * (1 + 4000 / ATTENTION_EVEN_TOKENS))
    # The same number of new tokens costs more behind a long past.
    assert rates.prefill_ms(108_000, 100_000) == pytest.approx(1000 * (1 + 104_000 / ATTENTION_EVEN_TOKENS))


def learn(rates: Rates, ttft_ms: float, times: int = 300, replica: str = "a", **changes: float) -> None:
    for _ in range(times):
        rates.observe(replica, **{"tokens": 1000, "cached": 0, "queued_ms": 0.0, "ttft_ms": ttft_ms} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ttft_ms", [20.0, 500.0])
def test_the_rate_is_learned_with_a_margin(ttft_ms: float) -> None:
    rates = Rates(8000)
    learn(rates, ttft_ms)
    assert rates.prefill_ms(1000, 0) == pytest.approx(ttft_ms * MARGIN, rel=0.01)


def test_slowness_is_believed_sooner_than_speed() -> None:
    slower, faster = Rates(8000), Rates(8000)
    learn(slower, 125 * 4 / MARGIN, times=10)
    learn(faster, 125 / 4 / MARGIN, times=10)
    assert slower.token_ms / 0.125 > 0.125 / faster.token_ms > 1


def test_small_prefills_and_queues_say_nothing_of_the_rate() -> None:
    rates = Rates(8000)
    learn(rates, 5.0, tokens=1000, cached=900)
    learn(rates, 5000.0, queued_ms=100.0)
    assert rates.token_ms == pytest.approx(0.125)


def test_a_slow_replica_is_told_from_a_slow_fleet() -> None:
    rates = Rates(8000)
    for _ in range(400):
        for replica, ttft in (("a", 125.0), ("b", 125.0), ("c", 312.5)):
            rates.observe(replica, tokens=1000, cached=0, queued_ms=0.0, ttft_ms=ttft)
    assert rates.slowness("a") == pytest.approx(1.0, abs=0.02)
    assert rates.slowness("c") == pytest.approx(2.5, rel=0.05)
    assert rates.slowness("never seen") == 1.0
    rates.observe("new", tokens=1000, cached=0, queued_ms=0.0, ttft_ms=125.0)
    assert rates.slowness("new") == pytest.approx(1.0, abs=0.02)
    rates.forget("c")
    assert rates.slowness("c") == 1.0


def test_slowness_is_bounded() -> None:
    rates = Rates(8000)
    for _ in range(600):
        for replica, ttft in (("a", 125.0), ("b", 125.0), ("c", 12500.0), ("d", 1.25)):
            rates.observe(replica, tokens=1000, cached=0, queued_ms=0.0, ttft_ms=ttft)
    assert (rates.slowness("c"), rates.slowness("d")) == (3.0, 0.4)


def test_what_is_likely_is_a_line_through_the_samples() -> None:
    rates = Rates(8000)
    assert rates.likely == 1.0
    for number in range(400):
        tokens = 1000 + 1000 * (number % 4)
        worth = tokens * (1 + tokens / 2 / ATTENTION_EVEN_TOKENS)
        rates.observe("a", tokens=tokens, cached=0, queued_ms=0.0, ttft_ms=20 + 0.05 * worth)
    # Booked prefills are on the slow side and hold the engine's step; the slope does neither.
    assert rates.token_ms > 0.06
    assert rates.likely * rates.token_ms == pytest.approx(0.05)


def test_no_sample_makes_prefills_free_or_slower_than_they_are_booked() -> None:
    rates = Rates(8000)
    rates.observe("a", tokens=300, cached=0, queued_ms=0.0, ttft_ms=30_000)
    assert rates.likely == 1.0
    for _ in range(50):
        rates.observe("a", tokens=60_000, cached=0, queued_ms=0.0, ttft_ms=1)
    assert rates.likely == LEAST_LIKELY
