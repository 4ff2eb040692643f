"""Workloads are exact functions of their settings and seed."""

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from bench.workloads import MultiTurn, prose

SMALL = MultiTurn(sessions=5, turns=3, system_chars=500)


def test_the_same_seed_gives_the_same_conversations_and_another_seed_others() -> None:
    assert SMALL.scripts(7) == SMALL.scripts(7)
    assert SMALL.scripts(7)[0].turns != SMALL.scripts(8)[0].turns
    assert SMALL.scripts(7)[0].system != SMALL.scripts(8)[0].system


def test_the_default_is_what_the_documentation_says() -> None:
    scripts = MultiTurn().scripts(0)
    assert len(scripts) == 32
    assert {len(script.turns) for script in scripts} == {6}
    assert {len(script.system) for script in scripts} == {4000}


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    scripts = MultiTurn(sessions=40).scripts(3)
    assert len({script.system for script in scripts}) == 1
    messages = [turn.user for script in scripts for turn in script.turns]
    assert len({message[:30] for message in messages}) == len(messages) == 240


def test_a_sessions_text_does_not_depend_on_how_many_there_are() -> None:
    few, many = SMALL.scripts(1), replace(SMALL, sessions=50).scripts(1)
    assert few == many[:5]


def test_everything_stays_within_its_range() -> None:
    workload = MultiTurn(sessions=50, user_chars=(100, 200), answer_tokens=(5, 9), think_s=(0.25, 0.5))
    scripts = workload.scripts(11)
    turns = [turn for script in scripts for turn in script.turns]
    assert all(100 <= len(turn.user) <= 200 for turn in turns)
    assert {turn.max_tokens for turn in turns} == {5, 6, 7, 8, 9}
    assert all(script.turns[0].think_s == 0 for script in scripts)
    assert all(0.25 <= turn.think_s <= 0.5 for script in scripts for turn in script.turns[1:])


def test_sessions_arrive_in_order_from_time_zero() -> None:
    starts = [script.start_s for script in MultiTurn(stagger_s=0.5).scripts(2)]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert {script.start_s for script in MultiTurn(stagger_s=0).scripts(2)} == {0.0}


def test_the_endless_load_begins_with_the_bounded_one() -> None:
    endless = list(islice(SMALL.endless(4), 7))
    assert [script.turns for script in endless[:5]] == [script.turns for script in SMALL.scripts(4)]
    assert [script.session for script in endless] == list(range(7))


@pytest.mark.parametrize("length", [0, 1, 17, 500, 4000])
def test_prose_has_the_length_asked_for_and_reads_like_sentences(length: int) -> None:
    text = prose(Random(5), length)
    assert len(text) == length
    assert text == text.strip()
    assert text[:1].isupper() == bool(length)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sessions": 0},
        {"turns": 0},
        {"system_chars": -1},
        {"user_chars": (9, 3)},
        {"answer_tokens": (-1, 3)},
        {"think_s": (2.0, 1.0)},
    ],
)
def test_settings_that_make_no_workload_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"workload|negative|range"):
        replace(SMALL, **wrong)  # type: ignore[arg-type]
