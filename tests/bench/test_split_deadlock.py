"""Two replicas that compute for one another, and keep each other waiting."""

from __future__ import annotations

from bench.simulate_split import REPLICA
from bench.split_fleet import DEADLOCK_SECONDS, SplitShape, SplitSimulation
from bench.split_workloads import SHAPES
from fake_backend import budget
from fake_backend import settings as replica_settings
from fake_backend.replica import scheduler_config, step_time
from router.choose.split import decider
from router.fleet.links import told


def test_pools_that_wait_for_each_other_end_the_run_and_count_as_waiting() -> None:
    replica = replica_settings.read(REPLICA)
    per_token = budget.kv_bytes_per_token(replica.model, replica.demand.kv_dtype, 1)
    # Pools of three prompts of 5,000 tokens: both are soon full of what the other one is to fetch.
    blocks = 3 * 5000 // 16 + 64
    fleet = SplitShape(2, 0, True, blocks, scheduler_config(replica), step_time(replica), per_token, told("tcp"))
    shape = next(shape for shape in SHAPES if shape.name == "5000/250")
    records = SplitSimulation(fleet, decider("always")).run(shape.traffic(0, rate=20.0, seconds=10.0))
    stuck = [record for record in records if record.took > DEADLOCK_SECONDS]
    assert stuck
    assert all(record.took >= record.ttft > 0 for record in records)
