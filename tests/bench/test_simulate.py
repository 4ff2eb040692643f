"""Traces, and the router's choice over fake engines in virtual time: exact numbers on traces one can follow by hand."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from bench import traces
from bench.cli import main
from bench.simulate import simulate
from bench.simulation import FleetShape
from fake_backend.scheduler import SchedulerConfig
from fake_backend.timing import StepTime

# A token of prefill takes 1 ms, a step nothing more.
PLAIN = StepTime(0.001, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def line(at_ms: float, prompt: int, answer: int, ids: list[int], **more: object) -> str:
    row = {"timestamp": at_ms, "input_length": prompt, "output_length": answer, "hash_ids": ids}
    return json.dumps(row | more)


def shape(replicas: int, blocks: int = 1000) -> FleetShape:
    return FleetShape(replicas, blocks, SchedulerConfig(block_size=16, max_num_batched_tokens=64), PLAIN)


def test_a_trace_by_hand() -> None:
    """Two prompts that share 2 of 3 blocks, far apart: the second hits 32 of its 48 tokens and computes 16."""
    trace = traces.read([line(0, 48, 2, [1, 2, 3]), line(60_000, 48, 1, [1, 2, 4])], seed=0)
    assert trace.block_size == 16
    summary, bound = simulate(trace, shape(1), "cost")
    assert summary.requests == 2
    assert summary.hit_rate == pytest.approx(32 / 96)
    assert (summary.predicted_exactly, summary.of_oracle) == (1.0, 1.0)
    assert (bound.infinite, bound.greedy_oracle) == (pytest.approx(32 / 96), pytest.approx(32 / 96))
    assert summary.ttft_mean_ms == pytest.approx((48 + 16) / 2)
    assert summary.end_to_end_mean_ms == pytest.approx((49 + 16) / 2)


def test_calls_of_a_session_wait_for_one_another() -> None:
    talk = [line(0, 64, 10, [1, 2, 3, 4], session="a"), line(1, 96, 1, [1, 2, 3, 4, 5, 6], session="a")]
    summary, _ = simulate(traces.read(talk, seed=0), shape(2), "cost")
    # 64 tokens and 9 more of the answer, then 32 that are new: neither waits for the other's prefill.
    assert summary.ttft_mean_ms == pytest.approx((64 + 32) / 2)
    assert summary.requests_per_replica in ((2, 0), (0, 2))


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(3)
    lines = []
    for i in range(200):
        group = random.randrange(8)
        ids = [group * 100 + j for j in range(20)] + [10_000 + i * 10 + j for j in range(random.randrange(1, 9))]
        lines.append(line(i * 20, len(ids) * 16, random.randrange(1, 60), ids))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))

    def run(seed: int) -> str:
        with pytest.raises(SystemExit) as end:
            main([
                "simulate", str(path), "--replicas", "3", "--policy", "round_robin,least_load,cost", "--blocks", "300",
                "--jitter", "0.5", "--seed", str(seed), "--json", "--out", str(tmp_path),
            ])  # fmt: skip
        assert end.value.code == 0
        return capsys.readouterr().out

    first = run(1)
    assert run(2) != first
    assert run(1) == first
    document = json.loads(first)
    assert json.loads((tmp_path / "simulate.json").read_text()) == document
    rates = {row["policy"]: row["hit_rate"] for row in document["policies"]}
    assert rates["cost"] > max(rates["round_robin"], rates["least_load"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 has no proper `timestamp`"),
        (line(0, 10, 1, []).replace("input", "in"), "line 1 has no proper `input_length`"),
        (line(0, 0, 1, []), "line 1 has a length"),
        (line(0, 5000, 1, [1, 2, 3]), "fit no block size"),
    ],
)
def test_what_is_no_trace(text: str, said: str) -> None:
    with pytest.raises(traces.TraceError, match=said):
        traces.read(text.splitlines(), seed=0)
