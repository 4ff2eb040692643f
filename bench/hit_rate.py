"""`bench hit-rate`: one seeded chat workload, live, under each policy, beside what any routing could have reached."""

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench import report
from bench.ceilings import Ceilings, ceilings
from bench.client import Record, open_session, play_all
from bench.processes import Processes
from bench.replica_metrics import ReplicaMetrics, scrape
from bench.workloads import MultiTurn

if TYPE_CHECKING:
    from pathlib import Path

# What the default policy has to reach: this share of the greedy oracle's hit rate, with no replica busier than this.
DEFAULT_POLICY = "cost"
OF_ORACLE = 0.95
BUSIEST_OVER_MEAN = 1.25
MODEL = "Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class Result:
    """One policy under one number of sessions. Rates are 0 to 1 in tokens, TTFT in ms as the client saw it.

    `predicted_exactly`: the share of requests whose cached tokens were just what the router had expected.
    """

    policy: str
    sessions: int
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    of_oracle: float
    predicted_exactly: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    shares: dict[str, int]
    busiest_over_mean: float
    ceilings: Ceilings
    errors: tuple[str, ...]

    def misses(self) -> list[str]:
        """Say where this result is under the bar; empty where it holds."""
        found = []
        if self.failed:
            found.append(f"{self.failed} of {self.requests} requests failed ({self.errors[0]})")
        if self.of_oracle < OF_ORACLE:
            found.append(f"hit rate is {self.of_oracle:.3f} of the greedy oracle's, not {OF_ORACLE}")
        if self.busiest_over_mean > BUSIEST_OVER_MEAN:
            found.append(f"the busiest replica has {self.busiest_over_mean:.2f} of the mean, not {BUSIEST_OVER_MEAN}")
        return found


def summarise(
    policy: str, sessions: int, records: Sequence[Record], replicas: Sequence[str], pools: Sequence[ReplicaMetrics]
) -> Result:
    """Turn a run's records into a result. `replicas` are all there were, so that an idle one counts as 0.

    Raises ValueError where a replica returned no token ids: there'd be no ceiling to compare with.
    """
    good = [record for record in records if record.error is None]
    run = [record.exchange for record in good if record.exchange is not None]
    if len(run) != len(good):
        raise ValueError("a replica returned no token ids (return_token_ids), so the ceilings can't be computed")
    asked = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    rate = cached / asked if asked else 0.0
    best = ceilings(run, block_size=pools[0].block_size, replicas=len(replicas), pool_blocks=pools[0].blocks - 1)
    counts = Counter(record.replica for record in records)
    shares = {name: counts[name] for name in map(replica_name, replicas)}
    ttft = sorted(record.ttft_s * 1000 for record in good) or [0.0]
    return Result(
        policy=policy,
        sessions=sessions,
        requests=len(records),
        failed=len(records) - len(good),
        prompt_tokens=asked,
        cached_tokens=cached,
        hit_rate=rate,
        of_oracle=rate / best.greedy_oracle if best.greedy_oracle else 1.0,
        predicted_exactly=sum(r.predicted_tokens == r.cached_tokens for r in good) / max(1, len(good)),
        ttft_mean_ms=statistics.fmean(ttft),
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p90_ms=quantile(ttft, 0.9),
        shares=shares,
        busiest_over_mean=max(shares.values()) * len(replicas) / max(1, sum(shares.values())),
        ceilings=best,
        errors=tuple(record.error for record in records if record.error is not None)[:5],
    )


def replica_name(url: str) -> str:
    """Return the name that the router gives a replica in its answers: its host and port."""
    return url.removeprefix("http://")


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that at least `share` of the ordered values do not exceed (nearest rank)."""
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, int(rank) - 1)]


async def measure(policy: str, workload: MultiTurn, *, seed: int, replicas: int, flags: Sequence[str] = ()) -> Result:
    """Run the workload under one policy, before replicas that have seen nothing yet."""
    async with Processes() as processes:
        urls = await processes.replicas(replicas, ["--model", MODEL, "--enable-prompt-tokens-details", *flags])
        router = await processes.router(urls, policy=policy)
        records = await play_all(router, MODEL, workload.scripts(seed))
        async with open_session() as session:
            pools = await asyncio.gather(*(scrape(session, url) for url in urls))
    return summarise(policy, workload.sessions, records, urls, pools)


async def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; return its exit status. Raises ValueError where --out is given and nothing can draw."""
    if arguments.out is not None and not report.can_draw():
        raise ValueError("--out draws a picture: pip install 'warmroute[bench]'")
    shape = {"turns": arguments.turns, "system_chars": arguments.system_chars}
    results = []
    for sessions in arguments.sessions:
        workload = MultiTurn(sessions=sessions, **shape)
        for policy in arguments.policies:
            report.progress(f"{sessions} sessions under {policy} ...")
            results.append(await measure(policy, workload, seed=arguments.seed, replicas=arguments.replicas))
    settings = {
        **asdict(workload),
        "sessions": arguments.sessions,
        "replicas": arguments.replicas,
        "seed": arguments.seed,
    }
    missed = [
        f"{result.policy}, {result.sessions} sessions: {miss}"
        for result in results
        if result.policy == DEFAULT_POLICY
        for miss in result.misses()
    ]
    bar = {"of_oracle": OF_ORACLE, "busiest_over_mean": BUSIEST_OVER_MEAN, "missed": missed}
    document: dict[str, object] = {
        "command": "hit-rate",
        "settings": settings,
        "results": [asdict(r) for r in results],
        "bar": bar,
    }
    _write(document, results, arguments)
    for line in missed:
        report.progress(f"under the bar: {line}")
    return 1 if arguments.check and missed else 0


def _write(document: dict[str, object], results: Sequence[Result], arguments: argparse.Namespace) -> None:
    # What took minutes to measure is shown before a full disk can lose it.
    if arguments.json:
        report.print_json(document)
    else:
        report.table(results)
    out: Path | None = arguments.out
    if out is not None:
        report.write_json(document, out / "hit-rate.json")
        report.picture(results, out / "hit-rate.png")
        report.progress(f"written: {out / 'hit-rate.json'} and {out / 'hit-rate.png'}")
