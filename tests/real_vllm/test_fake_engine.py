"""The fake beside real vLLM, both with a pool of 40 blocks: the same requests, the same outcome."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import engine_sequence
import pytest
from conftest import ROOT, summary
from exchange import exchange
from replicas import Replica, free_port, running

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAYS = 3


@pytest.fixture(scope="module")
def real() -> Iterator[Replica]:
    directory = Path(os.environ["REAL_VLLM_DIR"])
    replica = Replica(directory, directory / "logs", flags=engine_sequence.FLAGS)
    with running(replica):
        yield replica


@contextlib.contextmanager
def fake(*flags: str) -> Iterator[tuple[str, int]]:
    """A fake with the flags of the real one: its address, and its replay port."""
    port, events, replay = free_port(), free_port(), free_port()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    command = [
        *(sys.executable, "-m", "fake_backend", "--port", str(port), "--model", "Llama-3.1-8B"),
        *(*engine_sequence.FLAGS, "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(config), *flags),
    ]
    environment = os.environ | {"PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "listening on" in line:
                break
        yield f"http://127.0.0.1:{port}", replay
    finally:
        process.terminate()
        process.wait(30)


def test_one_after_another(real: Replica) -> None:
    """Every hit, both counters, and every KV event in its order."""
    assert exchange(real.url, "POST", "/reset_prefix_cache").status == 200
    before, counted = len(engine_sequence.events(real.replay_port)), engine_sequence.counters(real.url)
    turns = engine_sequence.play(real.url, seed=11, count=300)
    theirs = engine_sequence.events(real.replay_port)[before:]
    after = engine_sequence.counters(real.url)
    with fake("--time-scale", "0") as (url, replay):
        for number, turn in enumerate(turns):
            played = engine_sequence.Turn(turn.talk, turn.prompt, turn.max_tokens, turn.salt)
            engine_sequence.post(url, played, turn.answer)
            assert (played.answer, played.cached) == (turn.answer, turn.cached), f"request {number}"
        assert engine_sequence.counters(url) == {name: after[name] - counted[name] for name in after}
        ours = engine_sequence.events(replay)
    # The real one's first batch also tells of the reset before.
    assert theirs[0][0] in ("C", *ours[0])
    theirs[0] = [event for event in theirs[0] if event != "C"]
    assert ours == theirs
    cached = sum(turn.cached for turn in turns)
    summary.append(
        f"fake engine: 300 requests, {cached} cached tokens and {sum(map(len, ours))} KV events, all as real vLLM's"
    )


def test_four_at_a_time(real: Replica) -> None:
    """Requests that race for blocks: who preempts whom depends on when they arrive, so that the engine itself is never
    twice the same. The fake is no less like it than it is like itself, and a hundredth."""
    made = engine_sequence.waves(engine_sequence.Script(5), 40)
    real_rates, fake_rates, real_preempted, fake_preempted = [], [], [], []
    for _ in range(PLAYS):
        assert exchange(real.url, "POST", "/reset_prefix_cache").status == 200
        before = engine_sequence.counters(real.url)
        theirs = engine_sequence.play_four_at_a_time(real.url, made)
        real_counts = {name: count - before[name] for name, count in engine_sequence.counters(real.url).items()}
        with fake("--time-scale", "1") as (url, _replay):
            engine_sequence.play_four_at_a_time(url, made, theirs)
            fake_counts = engine_sequence.counters(url)
        assert real_counts["prefix_cache_queries"] == fake_counts["prefix_cache_queries"]
        for counts, rates, preempted in (
            (real_counts, real_rates, real_preempted),
            (fake_counts, fake_rates, fake_preempted),
        ):
            rates.append(counts["prefix_cache_hits"] / counts["prefix_cache_queries"])
            preempted.append(counts["num_preemptions"])
    summary.append(
        f"fake engine, four at a time: hit rates {_shown(fake_rates)}, real {_shown(real_rates)}; "
        f"preemptions {fake_preempted}, real {real_preempted}"
    )
    assert min(real_preempted) > 10
    assert min(real_rates) - 0.01 < median(fake_rates) < max(real_rates) + 0.01
    assert median(fake_preempted) == pytest.approx(median(real_preempted), rel=0.15)


def _shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)
