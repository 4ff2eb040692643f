"""The bench and the demo as a user starts them, small: real replicas, a real router, real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import free_ports

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 100.0


def descendants_gone(marker: str) -> bool:
    """Whether no process is left, or none stays, that was started with `marker` in its environment."""
    deadline = time.monotonic() + 20.0
    while not (gone := _gone(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return gone


def _gone(marker: str) -> bool:
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environment.read_bytes():
                return False
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return True


def environment(marker: str) -> dict[str, str]:
    return {**os.environ, "BENCH_TEST": marker, "COLUMNS": "120"}


def test_hit_rate_prints_one_object_and_leaves_files_and_no_processes(tmp_path: Path) -> None:
    sizes = ["--sessions", "3", "--turns", "2", "--replicas", "2", "--system-chars", "800"]
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "hit-rate", *sizes, "--policies", "cost", "--json", "--out", str(tmp_path)],
        cwd=ROOT,
        env=environment("hit-rate-json"),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["command"] == "hit-rate"
    [result] = document["results"]
    assert (result["policy"], result["requests"], result["failed"]) == ("cost", 6, 0)
    assert sum(result["shares"].values()) == 6
    # Each second turn finds at least its session's first prompt.
    assert 0.3 < result["hit_rate"] <= result["ceilings"]["infinite"] < 1
    assert json.loads((tmp_path / "hit-rate.json").read_text()) == document
    assert (tmp_path / "hit-rate.png").read_bytes().startswith(b"\x89PNG")
    assert descendants_gone("hit-rate-json")


def test_the_demo_ends_by_itself_and_says_how_it_went() -> None:
    [port] = free_ports(1)
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "demo", "--port", str(port), "--seconds", "12"],
        cwd=ROOT,
        env=environment("demo-ends"),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"The router listens on http://127.0.0.1:{port}" in ended.stdout
    assert "with warmroute" in ended.stdout.splitlines()[-1]
    assert ended.stderr == ""
    assert descendants_gone("demo-ends")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_demo_cleanly(number: signal.Signals, status: int) -> None:
    [port] = free_ports(1)
    marker = f"demo-{number.name}"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "demo", "--port", str(port)],
        cwd=ROOT,
        env=environment(marker),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "The router listens on" in line:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    assert process.returncode == status
    assert errors == ""
    assert descendants_gone(marker)
