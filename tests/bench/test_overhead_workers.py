"""What several workers carry: whole, for a moment, with real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.overhead_workers import carried


def test_what_is_carried_is_told_by_the_cost() -> None:
    assert carried(2, 100.0, 100.0) == 2.0
    assert carried(2, 100.0, 125.0) == 1.6
    assert carried(4, 100.0, 400.0) == 1.0


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_one_and_two_are_measured_in_turn(tmp_path: Path) -> None:
    command = ["overhead", "workers", "--repeats", "1", "--seconds", "2", "--json", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *command], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "overhead-workers.json").read_text())
    assert (document["workers"], document["bar"]) == (2, 1.6)
    for row in ("plain", "short"):
        assert set(document["cpu_us_per_request"][row]) == {"one worker", "2 workers"}
        (one,), (two,) = (document["cpu_us_per_request"][row][name] for name in ("one worker", "2 workers"))
        assert document["carried"][row] == carried(2, one, two) > 0
        assert all(rate > 0 for rates in document["requests_per_second"][row].values() for rate in rates)
