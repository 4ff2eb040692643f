"""`bench simulate split`: when is a prompt better computed elsewhere? Fleets with roles, in virtual time.

Every rule by which the router may split sees the same requests, from the same seed, before the same engines: Llama 3.1
70B on four H100 each, joined by RDMA (45 GB/s) or TCP (2.5 GB/s). In a fleet of fixed roles, some replicas do nothing
but prefill, and the others do all of a request or only answer it; `never` leaves the first kind idle. With open roles
the first kind answers, too, so that `never` is a fleet of equals. Loads are parts of what as many equals would take at
the most. What was sent in the first fifth of a run warms it up and does not count.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from bench import report
from bench.hit_rate import quantile
from bench.split_fleet import SplitRecord, SplitShape, SplitSimulation
from bench.split_workloads import BLOCK_SIZE, SHAPES, Shape
from fake_backend import budget
from fake_backend import settings as replica_settings
from fake_backend.replica import scheduler_config, step_time
from router.choose.split import decider
from router.fleet.links import told

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

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
    """What one decider made of a cell. Times in ms."""

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
        """Whether nothing was split, or all was sooner for it than if nothing had been."""
        ours, never = self.figures[OURS], self.figures["never"]
        sooner = ours.ttft_mean_ms <= never.ttft_mean_ms and ours.end_to_end_mean_ms <= never.end_to_end_mean_ms
        return not ours.split_share or sooner


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    shapes: Sequence[Shape] = SHAPES
    fleets: Sequence[tuple[int, int, str]] = FLEETS
    loads: Sequence[float] = LOADS
    links: Sequence[str] = LINKS
    shorter: float = 1.0
    """Divides every run's length."""


QUICK = Plan(shapes=SHAPES[2:], fleets=((2, 2, "fixed"),), shorter=3.0)


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


def outcomes(plan: Plan, seed: int) -> Iterator[Outcome]:
    """Every cell of a plan, as it is done."""
    replica = replica_settings.read(REPLICA)
    per_token = budget.kv_bytes_per_token(replica.model, replica.demand.kv_dtype, 1)

    def figures(cell: Cell, shape: Shape, name: str) -> Figures:
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
        seconds = shape.seconds / plan.shorter
        traffic = shape.traffic(seed, rate=cell.load * shape.rate * fleet.replicas, seconds=seconds)
        records = SplitSimulation(fleet, decider(name)).run(traffic)
        return summarise([record for record in records if record.call.at >= seconds * WARM_SHARE])

    for shape, fleet, load in itertools.product(plan.shapes, plan.fleets, plan.loads):
        never: Figures | None = None
        for link in plan.links:
            cell = Cell(shape.name, *fleet, load, link)
            # What is never split knows no link.
            never = never or figures(cell, shape, "never")
            others = {name: figures(cell, shape, name) for name in DECIDERS if name != "never"}
            yield Outcome(cell, {"never": never, **others})


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
    found = []
    begun = time.perf_counter()
    for outcome in outcomes(plan, arguments.seed):
        found.append(outcome)
        report.progress(f"{time.perf_counter() - begun:6.1f} s: {outcome.cell}")
    verdict = judge(found)
    document: dict[str, object] = {
        "command": "simulate split",
        "seed": arguments.seed,
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
