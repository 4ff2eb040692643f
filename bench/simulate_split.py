"""`bench simulate split`: when is a prompt better computed elsewhere? Fleets with roles, in virtual time.

Every rule by which the router may split sees the same requests, from the same seed, before the same engines: Llama 3.1
70B on four H100 each, joined by RDMA (45 GB/s) or TCP (2.5 GB/s). In a fleet of fixed roles, some replicas do nothing
but prefill, and the others do all of a request or only answer it; `never` leaves the first kind idle. With open roles
the first kind answers, too, so that `never` is a fleet of equals. Loads are parts of what as many equals would take at
the most. What was sent in the first fifth of a run warms it up and does not count. One seed's run is a few percent off
the next one's, under every rule in its own way; what is compared are means over several seeds, the same for all.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from bench import leash, report
from bench.hit_rate import quantile
from bench.split_fleet import SplitRecord, SplitShape, SplitSimulation
from bench.split_workloads import BLOCK_SIZE, SHAPES, Shape
from fake_backend import budget
from fake_backend import settings as replica_settings
from fake_backend.replica import scheduler_config, step_time
from router.choose.split import Choice, SplitDecider, SplitDecision, decider
from router.fleet.links import told

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterator, Sequence

REPLICA = (
    "--model", "Llama-3.1-70B", "--gpu", "H100", "--tensor-parallel-size", "4",
    "--max-model-len", "auto", "--block-size", str(BLOCK_SIZE),
)  # fmt: skip
LINKS = ("rdma", "tcp")
FLEETS = ((1, 3, "fixed"), (2, 2, "fixed"), (4, 4, "fixed"), (2, 2, "open"))
LOADS = (0.5, 0.9)
WARM_SHARE = 0.2
OURS, FOREIGN, EXTREMES = "cost", ("uncached_tokens", "isl_bounding"), ("always", "never")
DECIDERS = (*EXTREMES, OURS, *FOREIGN)
# The bars.
NO_WORSE = 1.03
BEATS_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Cell:
    """One fleet under one load. `computing` and `answering` replicas; `load` 0 to 1."""

    shape: str
    computing: int
    answering: int
    roles: str
    load: float
    link: str

    def __str__(self) -> str:
        fleet = f"{self.computing}P{self.answering}D {self.roles}"
        return f"{self.shape}, {fleet}, load {self.load}, {self.link}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one decider made of a cell. Times in ms; over several seeds, means of each seed's."""

    requests: int
    split_share: float
    ttft_mean_ms: float
    ttft_p90_ms: float
    end_to_end_mean_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell under every decider."""

    cell: Cell
    figures: dict[str, Figures]

    @property
    def ttft_ratio(self) -> float:
        """Mean TTFT over that of always or never, whichever has the lower one."""
        return max(1 / other for other in self._others("ttft_mean_ms"))

    @property
    def end_to_end_ratio(self) -> float:
        """Likewise; not necessarily over the same one."""
        return max(1 / other for other in self._others("end_to_end_mean_ms"))

    @property
    def at_odds(self) -> bool:
        """Whether one of always and never has the lower TTFT and the other the lower end-to-end time, each clearly: no
        rule is as good as both, it can only be as good as one of them."""
        always, never = (self.figures[name] for name in EXTREMES)
        ttft = always.ttft_mean_ms / never.ttft_mean_ms
        whole = always.end_to_end_mean_ms / never.end_to_end_mean_ms
        return (ttft > NO_WORSE and whole < 1 / NO_WORSE) or (ttft < 1 / NO_WORSE and whole > NO_WORSE)

    @property
    def as_good_as_one(self) -> bool:
        """Whether it is no worse than one of always and never in both respects."""
        pairs = zip(self._others("ttft_mean_ms"), self._others("end_to_end_mean_ms"), strict=True)
        return any(min(ttft, whole) >= 1 / NO_WORSE for ttft, whole in pairs)

    @property
    def within(self) -> bool:
        """Whether the bar holds here."""
        strictly = max(self.ttft_ratio, self.end_to_end_ratio) <= NO_WORSE
        return strictly or (self.at_odds and self.as_good_as_one)

    def _others(self, figure: str) -> list[float]:
        """Always and never over ours."""
        ours = getattr(self.figures[OURS], figure)
        return [getattr(self.figures[name], figure) / ours for name in EXTREMES]

    def beats(self, other: str) -> bool:
        return self.figures[OURS].ttft_mean_ms < self.figures[other].ttft_mean_ms

    @property
    def pays(self) -> bool:
        """Whether nothing was split, or all was sooner for it than if nothing had been: on balance of first tokens and
        ends, and neither of them later by more than the bar allows."""
        ours, never = self.figures[OURS], self.figures["never"]
        ttft = ours.ttft_mean_ms / never.ttft_mean_ms
        whole = ours.end_to_end_mean_ms / never.end_to_end_mean_ms
        return not ours.split_share or (ttft * whole <= 1 and max(ttft, whole) <= NO_WORSE)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    shapes: Sequence[Shape] = SHAPES
    fleets: Sequence[tuple[int, int, str]] = FLEETS
    loads: Sequence[float] = LOADS
    links: Sequence[str] = LINKS
    shorter: float = 1.0
    """Divides every run's length."""
    seeds: int = 3
    """So many, one after the other."""


QUICK = Plan(shapes=SHAPES[2:], fleets=((2, 2, "fixed"),), shorter=3.0, seeds=1)


@dataclass(slots=True)
class Verdict:
    """The bars, and where they are missed."""

    cells: int
    within: int
    at_odds: int
    """Of these, where always and never are each better in one respect: there, as good as one of them is enough."""
    better_than_both: int
    beats: dict[str, int]
    missed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Watched:
    """A decider, and those of some others that have decided as it does until now."""

    decider: SplitDecider
    alike: dict[str, SplitDecider]

    def decide(self, choice: Choice) -> SplitDecision:
        decision = self.decider.decide(choice)
        taken = decision.prefill, decision.decode
        others = [(name, other, other.decide(choice)) for name, other in self.alike.items()]
        self.alike = {name: other for name, other, its in others if (its.prefill, its.decode) == taken}
        return decision


def play(cells: Sequence[Cell], shape: Shape, seconds: float, seed: int) -> list[dict[str, Figures]]:
    """What every decider makes of cells that differ in their links alone."""
    replica = replica_settings.read(REPLICA)
    per_token = budget.kv_bytes_per_token(replica.model, replica.demand.kv_dtype, 1)

    def figures(cell: Cell, rule: SplitDecider) -> Figures:
        fleet = SplitShape(
            cell.computing,
            cell.answering,
            cell.roles == "open",
            replica.plan.num_blocks,
            scheduler_config(replica),
            step_time(replica),
            per_token,
            told(cell.link),
        )
        traffic = shape.traffic(seed, rate=cell.load * shape.rate * fleet.replicas, seconds=seconds)
        records = SplitSimulation(fleet, rule).run(traffic)
        return summarise([record for record in records if record.call.at >= seconds * WARM_SHARE])

    # What is never split knows no link.
    never = figures(cells[0], decider("never"))
    played = []
    for cell in cells:
        # Where prompts are long and never seen before, others' rules come to `always`, and need not be played again.
        always = Watched(decider("always"), {name: decider(name) for name in FOREIGN})
        of_always = figures(cell, always)
        found = {"always": of_always, "never": never, OURS: figures(cell, decider(OURS))}
        for name in FOREIGN:
            found[name] = of_always if name in always.alike else figures(cell, decider(name))
        played.append(found)
    return played


async def outcomes(plan: Plan, seed: int, jobs: int) -> AsyncIterator[Outcome]:
    """Every cell of a plan, in order, by so many processes."""
    loop = asyncio.get_running_loop()
    seeds = range(seed, seed + plan.seeds)
    with workers(jobs) as pool:
        begun = []
        for shape, fleet, load in itertools.product(plan.shapes, plan.fleets, plan.loads):
            cells = [Cell(shape.name, *fleet, load, link) for link in plan.links]
            seconds = shape.seconds / plan.shorter
            runs = [loop.run_in_executor(pool, play, cells, shape, seconds, each) for each in seeds]
            begun.append((cells, runs))
        try:
            for cells, runs in begun:
                for cell, *found in zip(cells, *await asyncio.gather(*runs), strict=True):
                    yield Outcome(cell, {name: mean([each[name] for each in found]) for name in DECIDERS})
        finally:
            for _, runs in begun:
                for left in runs:
                    left.cancel()


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, however it ends, and at once where it is interrupted."""
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=begin, initargs=(os.getpid(),))
    try:
        yield pool
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(cancel_futures=True)


def begin(parent: int) -> None:
    """What a worker does first. On Ctrl-C it is this command that ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leash.tie(parent)


def mean(found: Sequence[Figures]) -> Figures:
    """Over several seeds."""

    def over(figure: str) -> float:
        values: list[float] = [getattr(each, figure) for each in found]
        return sum(values) / len(values)

    return Figures(
        sum(each.requests for each in found),
        over("split_share"),
        over("ttft_mean_ms"),
        over("ttft_p90_ms"),
        over("end_to_end_mean_ms"),
    )


def summarise(records: Sequence[SplitRecord]) -> Figures:
    ttft = sorted(record.ttft * 1000 for record in records)
    return Figures(
        requests=len(records),
        split_share=sum(record.prefill is not None for record in records) / len(records),
        ttft_mean_ms=sum(ttft) / len(ttft),
        ttft_p90_ms=quantile(ttft, 0.9),
        end_to_end_mean_ms=sum(record.took for record in records) * 1000 / len(records),
    )


def judge(found: Sequence[Outcome]) -> Verdict:
    """Hold outcomes to the bars."""
    missed = []
    for outcome in found:
        if not outcome.within:
            missed.append(
                f"{outcome.cell}: TTFT is {outcome.ttft_ratio:.3f} and end to end {outcome.end_to_end_ratio:.3f} "
                f"of the better of always and never, not {NO_WORSE}"
            )
        if outcome.cell.link == "tcp" and not outcome.pays:
            share = outcome.figures[OURS].split_share
            missed.append(f"{outcome.cell}: {share:.1%} were split over TCP, and not for the better")
    within = sum(each.within for each in found)
    at_odds = sum(each.at_odds for each in found)
    better = sum(max(each.ttft_ratio, each.end_to_end_ratio) < 1 for each in found)
    if not better:
        missed.append("nowhere better than both always and never")
    beats = {other: sum(each.beats(other) for each in found) for other in FOREIGN}
    missed += [
        f"TTFT beats {other} in {count} of {len(found)} cells, not in {BEATS_SHARE:.0%}"
        for other, count in beats.items()
        if count < BEATS_SHARE * len(found)
    ]
    return Verdict(len(found), within, at_odds, better, beats, missed)


async def run(arguments: argparse.Namespace) -> int:
    """The command."""
    plan = QUICK if arguments.quick else Plan()
    if arguments.seeds:
        plan = replace(plan, seeds=arguments.seeds)
    found = []
    begun = time.perf_counter()
    async for outcome in outcomes(plan, arguments.seed, arguments.jobs):
        found.append(outcome)
        report.progress(
            f"{time.perf_counter() - begun:6.1f} s: {outcome.cell}: "
            f"{outcome.ttft_ratio:.3f} / {outcome.end_to_end_ratio:.3f}"
        )
    verdict = judge(found)
    document: dict[str, object] = {
        "command": "simulate split",
        "seed": arguments.seed,
        "seeds": plan.seeds,
        "replica": " ".join(REPLICA),
        "cells": [
            {**asdict(each.cell), "deciders": {name: asdict(row) for name, row in each.figures.items()}}
            for each in found
        ],
        "bar": asdict(verdict),
    }
    if arguments.json:
        report.print_json(document)
    else:
        report.split_table(found, verdict)
    if arguments.out:
        report.write_json(document, arguments.out / "simulate-split.json")
    for line in verdict.missed:
        report.progress(f"under the bar: {line}")
    return 1 if arguments.check and verdict.missed else 0
