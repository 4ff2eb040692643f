"""How results reach people and programs: a table, a picture, one JSON object. Progress goes to standard error."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench.ceilings import Ceilings
    from bench.hit_rate import Result
    from bench.simulate import Summary
    from bench.simulate_split import Outcome, Verdict

_WIDTH = 120


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_json(document: dict[str, object]) -> None:
    print(json.dumps(document), flush=True)


def write_json(document: dict[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def table(results: Sequence["Result"]) -> None:
    """Print one row a result, and under each number of sessions what any routing could have reached."""
    # Wide enough for every column also where the output goes to a file.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for sessions in dict.fromkeys(result.sessions for result in results):
        of_these = [result for result in results if result.sessions == sessions]
        shown = Table(title=f"{sessions} sessions, {of_these[0].requests} requests", title_justify="left")
        shown.add_column("policy")
        for column in (
            "hit rate",
            "of oracle",
            "predicted",
            "TTFT mean",
            "p50",
            "p90",
            "requests",
            "busiest/mean",
            "failed",
        ):
            shown.add_column(column, justify="right")
        for result in of_these:
            shown.add_row(
                result.policy,
                f"{result.hit_rate:.1%}",
                f"{result.of_oracle:.3f}",
                f"{result.predicted_exactly:.0%}",
                f"{result.ttft_mean_ms:.0f} ms",
                f"{result.ttft_p50_ms:.0f} ms",
                f"{result.ttft_p90_ms:.0f} ms",
                " ".join(str(count) for count in result.shares.values()),
                f"{result.busiest_over_mean:.2f}",
                str(result.failed),
            )
        console.print(shown)
        best = of_these[-1].ceilings
        console.print(
            f"ceilings ({of_these[-1].policy}'s run): infinite cache {best.infinite:.1%}, "
            f"pooled LRU {best.pooled_lru:.1%}, greedy oracle {best.greedy_oracle:.1%}\n"
        )


def can_draw() -> bool:
    """Whether the library that draws is installed (the extra `bench`)."""
    return importlib.util.find_spec("matplotlib") is not None


def picture(results: Sequence["Result"], path: Path) -> None:
    """Draw hit rate beside its ceiling, TTFT and balance, one group of bars for each number of sessions."""
    # A picture into a file needs no display, and the bench must not need one.
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    sessions = list(dict.fromkeys(result.sessions for result in results))
    policies = list(dict.fromkeys(result.policy for result in results))
    found = {(result.policy, result.sessions): result for result in results}
    figure, (rates, ttft, balance) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    width = 0.8 / len(policies)
    marks = {"color": "black", "marker": "_", "s": 700 * width, "zorder": 3}
    for place, policy in enumerate(policies):
        runs = [found[policy, count] for count in sessions]
        xs = [group + (place - (len(policies) - 1) / 2) * width for group in range(len(sessions))]
        rates.bar(xs, [run.hit_rate * 100 for run in runs], width * 0.94, label=policy)
        rates.scatter(xs, [run.ceilings.greedy_oracle * 100 for run in runs], **marks)
        ttft.bar(xs, [run.ttft_mean_ms for run in runs], width * 0.94)
        ttft.scatter(xs, [run.ttft_p90_ms for run in runs], **marks)
        balance.bar(xs, [run.busiest_over_mean for run in runs], width * 0.94)
    rates.set(title="prefix-cache hit rate (line: greedy oracle)", ylabel="% of prompt tokens", ylim=(0, 100))
    ttft.set(title="time to first token, mean (line: p90)", ylabel="ms")
    balance.set(title="busiest replica over the mean, in requests", ylabel="1.0 is even")
    balance.axhline(1.0, color="black", linewidth=0.8)
    for axes in (rates, ttft, balance):
        axes.set_xticks(range(len(sessions)), [f"{count} sessions" for count in sessions])
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(policies), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def simulated(document: dict[str, object], summaries: "Sequence[Summary]", bounds: "Sequence[Ceilings]") -> None:
    """Print one row a policy, and what any routing could have reached."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    shown = Table(
        title=f"{document['trace']}: {document['replicas']} replicas of {document['blocks_per_replica']} blocks of "
        f"{document['block_size']} tokens",
        title_justify="left",
    )
    shown.add_column("policy")
    for column in (
        "hit rate",
        "of oracle",
        "predicted",
        "TTFT mean",
        "p50",
        "p90",
        "p99",
        "end to end",
        "busiest/mean",
    ):
        shown.add_column(column, justify="right")
    for row in summaries:
        shown.add_row(
            row.policy,
            f"{row.hit_rate:.1%}",
            f"{row.of_oracle:.3f}",
            f"{row.predicted_exactly:.1%}",
            *(f"{ms:.0f} ms" for ms in (row.ttft_mean_ms, row.ttft_p50_ms, row.ttft_p90_ms, row.ttft_p99_ms)),
            f"{row.end_to_end_mean_ms / 1000:.2f} s",
            f"{row.busiest_over_mean:.2f}",
        )
    console.print(shown)
    bound = bounds[-1]
    console.print(
        f"ceilings ({summaries[-1].policy}'s run): infinite cache {bound.infinite:.1%}, "
        f"pooled LRU {bound.pooled_lru:.1%}, greedy oracle {bound.greedy_oracle:.1%}"
    )


def split_table(found: "Sequence[Outcome]", verdict: "Verdict") -> None:
    """Print one row a cell: what each rule makes of it, and ours beside the better of always and never."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH + 40)
    names = list(found[0].figures)
    shown = Table(title="mean TTFT, ms / mean end to end, s / share split", title_justify="left")
    shown.add_column("cell")
    for name in names:
        shown.add_column(name, justify="right")
    shown.add_column("cost over the better", justify="right")
    for row in found:
        shown.add_row(
            str(row.cell),
            *(
                f"{each.ttft_mean_ms:.0f} / {each.end_to_end_mean_ms / 1000:.2f} / {each.split_share:.0%}"
                for each in row.figures.values()
            ),
            f"{row.ttft_ratio:.3f} / {row.end_to_end_ratio:.3f}",
        )
    console.print(shown)
    beaten = ", ".join(f"{name} in {count}" for name, count in verdict.beats.items())
    console.print(
        f"{verdict.cells} cells; in {verdict.at_odds}, always and never are each better in one respect.\n"
        f"cost is as good as the better of them in {verdict.within}, better than both in {verdict.better_than_both}.\n"
        f"Its mean TTFT is lower than that of {beaten}."
    )
