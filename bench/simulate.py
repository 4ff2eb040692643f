"""`bench simulate`: a recorded trace through the router's own choice and index, over fake engines, in virtual time.

Nothing waits and nothing is drawn but from the seed: the same arguments give the same numbers, to the last digit.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import report, traces
from bench.ceilings import Ceilings, Demand, ceilings_of
from bench.hit_rate import quantile
from bench.simulation import FleetShape, Record, Simulation
from fake_backend import settings as replica_settings
from fake_backend.replica import scheduler_config, step_time
from router.choose.policies import policy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bench.traces import Trace

TIE_BAND_MS = 10.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What one policy made of a trace. Rates 0 to 1, times in ms."""

    policy: str
    requests: int
    hit_rate: float
    of_oracle: float
    predicted_exactly: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    end_to_end_mean_ms: float
    busiest_over_mean: float
    requests_per_replica: tuple[int, ...]


def summarise(name: str, records: Sequence[Record], bound: Ceilings, replicas: int) -> Summary:
    """Put a run's records into numbers."""
    ttft = sorted(record.ttft * 1000 for record in records)
    asked = sum(record.call.prompt_tokens for record in records)
    hit_rate = sum(record.cached for record in records) / asked
    per_replica = [0] * replicas
    for record in records:
        per_replica[record.replica] += 1
    return Summary(
        policy=name,
        requests=len(records),
        hit_rate=hit_rate,
        of_oracle=hit_rate / bound.greedy_oracle if bound.greedy_oracle else 1.0,
        predicted_exactly=sum(record.predicted == record.cached for record in records) / len(records),
        ttft_mean_ms=sum(ttft) / len(ttft),
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p90_ms=quantile(ttft, 0.9),
        ttft_p99_ms=quantile(ttft, 0.99),
        end_to_end_mean_ms=sum(record.took for record in records) * 1000 / len(records),
        busiest_over_mean=max(per_replica) * replicas / len(records),
        requests_per_replica=tuple(per_replica),
    )


def simulate(trace: Trace, shape: FleetShape, name: str) -> tuple[Summary, Ceilings]:
    """Play a trace under one policy."""
    records = Simulation(shape, policy(name, tie_band_ms=TIE_BAND_MS)).run(trace)
    size = shape.scheduler.block_size
    demands = [
        Demand(
            record.call.keys[: record.call.prompt_tokens // size],
            (record.call.prompt_tokens - 1) // size,
            record.call.prompt_tokens,
        )
        for record in records
    ]
    bound = ceilings_of(demands, block_size=size, replicas=shape.replicas, pool_blocks=shape.blocks - 1)
    return summarise(name, records, bound, shape.replicas), bound


async def run(arguments: argparse.Namespace) -> int:
    """The command."""
    path = Path(arguments.trace)
    lines = path.read_text().splitlines()  # noqa: ASYNC240  nothing else runs beside it
    if arguments.requests:
        lines = lines[: arguments.requests]
    trace = traces.read(lines, seed=arguments.seed, jitter_s=arguments.jitter, speed=arguments.speed)
    flags = [
        "--model", arguments.model, "--gpu", arguments.gpu, "--block-size", str(trace.block_size),
        "--max-num-batched-tokens", str(arguments.max_num_batched_tokens), "--max-model-len", "auto",
        "--tensor-parallel-size", str(arguments.tensor_parallel_size),
    ]  # fmt: skip
    if arguments.blocks:
        flags += ["--num-gpu-blocks-override", str(arguments.blocks)]
    replica = replica_settings.read(tuple(flags))
    shape = FleetShape(arguments.replicas, replica.plan.num_blocks, scheduler_config(replica), step_time(replica))
    longest = max(call.prompt_tokens + call.answer_tokens for call in trace.calls)
    if longest > shape.scheduler.max_model_len:
        raise ValueError(
            f"the trace's longest request has {longest} tokens, a replica takes {shape.scheduler.max_model_len}; "
            "choose another --model, --gpu or --blocks"
        )
    summaries, bounds = [], []
    for name in arguments.policies:
        begun = time.perf_counter()
        summary, bound = simulate(trace, shape, name)
        report.progress(f"{name}: {summary.requests} requests in {time.perf_counter() - begun:.1f} s of this machine")
        summaries.append(summary)
        bounds.append(bound)
    document: dict[str, object] = {
        "trace": path.name,
        "seed": arguments.seed,
        "replicas": arguments.replicas,
        "block_size": trace.block_size,
        "blocks_per_replica": shape.blocks,
        "policies": [asdict(summary) for summary in summaries],
        "ceilings": [asdict(bound) for bound in bounds],
    }
    if arguments.json:
        report.print_json(document)
    else:
        report.simulated(document, summaries, bounds)
    if arguments.out:
        report.write_json(document, arguments.out / "simulate.json")
    return 0
