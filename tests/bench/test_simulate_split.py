"""Fleets with roles in virtual time: exact numbers on requests one can follow by hand, and the bars by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import simulate_split
from bench.cli import main
from bench.simulate_split import Cell, Figures, Outcome, Plan, Watched, judge, mean
from bench.simulation import Call
from bench.split_fleet import HAND_OVER_SECONDS, SplitRecord, SplitShape, SplitSimulation
from bench.split_workloads import SHAPES, Talks
from fake_backend.scheduler import SchedulerConfig
from fake_backend.timing import StepTime
from router.choose.split import SplitDecider, decider
from router.fleet.links import Link

# A token of prefill takes 1 ms, a step nothing more.
PLAIN = StepTime(0.001, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
BYTES = 1e6


def play(calls: list[Call], rule: str | SplitDecider, *, computing: int = 1, roles: bool = False) -> list[SplitRecord]:
    scheduler = SchedulerConfig(block_size=16, max_num_batched_tokens=64)
    link = Link(1e9, 0.01, rdma=True)
    shape = SplitShape(computing, 1, roles, 1000, scheduler, PLAIN, BYTES, link)
    talks = Talks()
    for call in calls:
        talks.begin([call], [0.0])
    return SplitSimulation(shape, decider(rule) if isinstance(rule, str) else rule).run(talks)


def call(at: float, prompt: int, answer: int, first: int = 0) -> Call:
    return Call(at, prompt, answer, tuple(range(first, first + (prompt + answer) // 16)))


def test_one_request_all_in_one_place() -> None:
    (record,) = play([call(0.0, 128, 3)], "never")
    assert (record.prefill, record.decode) == (None, 1)
    assert (record.ttft, record.took) == (pytest.approx(0.128), pytest.approx(0.130))


def test_one_request_in_two_places() -> None:
    """128 tokens on the first, 128 MB over 1 GB/s, and the last token of the prompt once more on the second."""
    (record,) = play([call(0.0, 128, 3)], "always")
    assert (record.prefill, record.decode) == (0, 1)
    assert record.ttft == pytest.approx(0.128 + HAND_OVER_SECONDS + 0.01 + 0.128 + 0.001)
    assert record.took == pytest.approx(record.ttft + 0.002)


def test_what_the_second_holds_is_not_fetched_again() -> None:
    _, again = play([call(0.0, 128, 1), call(60.0, 128, 1)], "always")
    # 112 of 128 tokens are in both caches: 16 are computed, 16 are fetched.
    assert again.ttft == pytest.approx(0.016 + HAND_OVER_SECONDS + 0.01 + 0.016 + 0.001)


def test_links_are_shared_and_blocks_come_free() -> None:
    records = play([call(0.0, 64, 2, 100 * i) for i in range(40)], "always")
    assert len(records) == 40
    assert all(record.took >= record.ttft > 0 for record in records)
    # One prefill replica: one after the other.
    assert max(record.ttft for record in records) > 40 * 0.064


def test_open_roles_leave_nobody_idle() -> None:
    records = play([call(0.0, 64, 2), call(0.0, 64, 2, 100)], "never", roles=True)
    assert {record.decode for record in records} == {0, 1}


def figures(ttft: float, whole: float, share: float = 0.5) -> Figures:
    return Figures(100, share, ttft, ttft, whole)


def outcome(ours: Figures, always: Figures, never: Figures, *, others: float = 1e9, link: str = "rdma") -> Outcome:
    cell = Cell("5000/250", 1, 3, "fixed", 0.5, link)
    other = figures(others, 1e9)
    return Outcome(
        cell, {"cost": ours, "always": always, "never": never, "uncached_tokens": other, "isl_bounding": other}
    )


@pytest.mark.parametrize(
    ("ours", "always", "never", "within"),
    [
        (figures(103, 1030), figures(200, 2000), figures(100, 1000), True),
        (figures(104, 1000), figures(200, 2000), figures(100, 1000), False),
        (figures(100, 1040), figures(200, 2000), figures(100, 1000), False),
        # Always and never at odds: as good as either of them, but no mixture that is worse than both.
        (figures(200, 1000), figures(200, 1000), figures(100, 2000), True),
        (figures(100, 2000), figures(200, 1000), figures(100, 2000), True),
        (figures(110, 1900), figures(200, 1000), figures(100, 2000), False),
    ],
)
def test_no_worse_than_the_better(ours: Figures, always: Figures, never: Figures, within: bool) -> None:
    found = outcome(ours, always, never)
    assert found.within is within
    assert bool([line for line in judge([found]).missed if "better of always" in line]) is not within


def test_the_other_bars() -> None:
    good = outcome(figures(90, 900), figures(100, 1000), figures(100, 1000))
    assert judge([good]).missed == []
    even = outcome(figures(100, 1000), figures(100, 1000), figures(100, 1000))
    assert judge([even]).missed == ["nowhere better than both always and never"]
    beaten = outcome(figures(90, 900), figures(100, 1000), figures(100, 1000), others=90)
    verdict = judge([good, good, good, beaten])
    assert verdict.beats == {"uncached_tokens": 3, "isl_bounding": 3}
    assert [line.split(" in ")[0] for line in verdict.missed] == [
        "TTFT beats uncached_tokens",
        "TTFT beats isl_bounding",
    ]
    for share, misses in ((0.1, 1), (0.0, 0)):
        worse = outcome(figures(101, 1000, share), figures(200, 2000), figures(100, 1000), link="tcp")
        assert len(judge([good, good, good, good, worse]).missed) == misses


@pytest.mark.parametrize(
    ("ttft", "whole", "pays"), [(99, 1005, True), (101, 985, True), (100, 1001, False), (90, 1040, False)]
)
def test_over_tcp_it_pays_on_balance_and_harms_neither(ttft: float, whole: float, pays: bool) -> None:
    assert outcome(figures(ttft, whole), figures(200, 2000), figures(100, 1000), link="tcp").pays is pays


def test_seeds_count_alike() -> None:
    found = mean([Figures(100, 0.5, 100, 200, 1000), Figures(300, 0.0, 200, 400, 3000)])
    assert found == Figures(400, 0.25, 150, 300, 2000)


def test_rules_that_decide_alike_are_played_once() -> None:
    """A second time the prompt is cached, but for its last block: that is split by two of the rules."""
    others = {name: decider(name) for name in ("never", "uncached_tokens", "isl_bounding")}
    always = Watched(decider("always"), others)
    assert [record.prefill for record in play([call(0.0, 128, 1), call(60.0, 128, 1)], always)] == [0, 0]
    assert set(always.alike) == {"uncached_tokens"}


def test_a_shape_is_the_same_from_the_same_seed() -> None:
    for shape in SHAPES:
        talks = [shape.traffic(seed, rate=2.0, seconds=20.0) for seed in (1, 1, 2)]
        assert talks[0] == talks[1] != talks[2]
        for first in talks[0].first():
            turn: Call | None = first
            while turn is not None:
                after = talks[0].following(turn, 100.0)
                if after is not None:
                    assert after.at >= 100.0
                    assert after.keys[: len(turn.keys)] == turn.keys
                turn = after


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(shapes=SHAPES[2:3], fleets=((1, 1, "fixed"),), loads=(0.5,), shorter=24.0)
    monkeypatch.setattr(simulate_split, "QUICK", plan)

    def run(*flags: str) -> tuple[str, object]:
        with pytest.raises(SystemExit) as end:
            main(["simulate", "split", "--quick", *flags])
        return capsys.readouterr().out, end.value.code

    shown, code = run()
    assert (code, "2 cells" in shown) == (0, True)
    first, _ = run("--json", "--out", str(tmp_path))
    assert run("--json", "--jobs", "2")[0] == first
    document = json.loads(first)
    assert json.loads((tmp_path / "simulate-split.json").read_text()) == document
    assert [(cell["link"], set(cell["deciders"])) for cell in document["cells"]] == [
        (link, {"cost", "always", "never", "uncached_tokens", "isl_bounding"}) for link in ("rdma", "tcp")
    ]
    assert json.loads(run("--json", "--seeds", "2")[0])["cells"][0]["deciders"] != document["cells"][0]["deciders"]
    assert run("--check")[1] == (1 if document["bar"]["missed"] else 0)
