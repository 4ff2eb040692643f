from __future__ import annotations

from typing import Any

import pytest

from router.index.feedback import ENOUGH, LEAST_SHARE, STRETCH_TOKENS, Change, Feedback


def answer(feedback: Feedback, times: int = 1, **changes: Any) -> list[Change]:
    fields: dict[str, Any] = {"exact": True, "tokens": 1000, "predicted": 512, "prompt_tokens": 1000, "cached": 512}
    changes_seen = [feedback.answered("a", **fields | changes) for _ in range(times)]
    return [change for change in changes_seen if change is not None]


def test_right_predictions_say_nothing() -> None:
    feedback = Feedback()
    assert answer(feedback, 100) == []
    record = feedback.of("a")
    assert (record.compared, record.exact, record.error, record.bias, record.pool_share) == (100, 100, 0, 0, 1)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"exact": False, "cached": 0}, "no tokenizer"),
        ({"tokens": 900, "cached": 0}, "tokenizer or chat template"),
        ({"cached": 0}, "never reuses"),
        ({"cached": 128}, "evicts more"),
        ({"predicted": 0}, "others warm"),
    ],
)
def test_wrong_ones_are_told_once_with_their_cause_and_healing_too(changes: dict[str, Any], cause: str) -> None:
    feedback = Feedback()
    if changes.get("cached") == 128:
        answer(feedback, 1)
    told = answer(feedback, ENOUGH * 3, **changes)
    assert len(told) == 1
    assert told[0].cause is not None
    assert cause in told[0].cause
    assert feedback.of("a").cause == told[0].cause
    healed = answer(feedback, 200)
    assert healed == [Change("a", None)]


def test_silence_means_nothing_cached_only_where_the_engine_tells() -> None:
    feedback = Feedback()
    assert answer(feedback, 50, cached=None) == []
    assert feedback.of("a").compared == 0
    answer(feedback)
    answer(feedback, cached=None, predicted=0)
    assert (feedback.of("a").compared, feedback.of("a").exact) == (2, 2)
    answer(feedback, cached=None, prompt_tokens=None)  # an answer without usage tells nothing
    assert feedback.of("a").compared == 2


def test_the_pool_shrinks_with_evictions_and_recovers() -> None:
    feedback = Feedback()
    answer(feedback, 10, cached=0)
    shrunk = feedback.of("a").pool_share
    assert shrunk == pytest.approx(0.98**10)
    answer(feedback, 1000, cached=0)
    assert feedback.of("a").pool_share == LEAST_SHARE
    answer(feedback, 10_000)
    assert feedback.of("a").pool_share == 1.0


def test_counters_are_compared_over_long_stretches() -> None:
    feedback = Feedback()

    def scrape(hits: float, queries: float, predicted: int) -> Change | None:
        feedback.placed("a", predicted - feedback.of("a").placed)
        return feedback.counted("a", hits=hits, queries=queries, exact=True)

    assert feedback.counted("a", hits=None, queries=None, exact=True) is None
    assert scrape(1000, 2000, 500) is None
    assert scrape(1000 + STRETCH_TOKENS / 4, 2000 + STRETCH_TOKENS / 2, 500) is None
    # Half of the tokens hit, and half were predicted to.
    assert scrape(1000 + STRETCH_TOKENS / 2, 2000 + STRETCH_TOKENS, 500 + STRETCH_TOKENS // 2) is None
    assert feedback.of("a").error == 0
    # From here on all are predicted to hit, and none does.
    told = scrape(1000 + STRETCH_TOKENS / 2, 2000 + 2 * STRETCH_TOKENS, 500 + STRETCH_TOKENS // 2 + STRETCH_TOKENS)
    assert told is not None
    assert told.cause is not None
    assert feedback.of("a").error == 0.5
    # Counters that went back are another process's.
    assert scrape(0, 0, 0) is None
    assert feedback.of("a").stretch == (0, 0, 0)


def test_what_is_forgotten_is_forgotten() -> None:
    feedback = Feedback()
    answer(feedback, 50, cached=0)
    feedback.forget("a")
    assert feedback.of("a").compared == 0
