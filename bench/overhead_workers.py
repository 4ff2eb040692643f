"""What several workers on one port carry beside one, and what a request costs in each case.

One router with one worker and one with --workers N run before the same two replicas, which answer at once, and are
loaded by wrk in turn. CPU is the process tree's time on a core for each request, of the workers and of their
supervisor. So many times one worker, N of them carry on N cores of their own: N times the cost of one over the cost of
N. What wrk got answered is told beside it, and means something only where wrk and the replicas have further cores.

--check exits 1 where two workers carry less than 1.6 times one.
"""

from __future__ import annotations

import functools
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.forward_load import Wrk, bodies
from bench.forward_peers import Peer, warmroute
from bench.overhead_forward import cpu_us, start
from bench.report import print_json, progress, write_json

if TYPE_CHECKING:
    import argparse

ROWS = {"plain": "1 KB POST", "short": "3 KB chat"}
CONNECTIONS = 64
# Of what each further worker could add at the most, so much is to be left: 1.6 times for two.
BAR = 0.6


def carried(workers: int, one_us: float, all_us: float) -> float:
    """How many times one worker's load they carry, from what a request costs."""
    return workers * one_us / all_us


async def run(arguments: argparse.Namespace) -> int:
    workers: int = arguments.workers
    peers = [
        Peer("one worker", warmroute),
        Peer(f"{workers} workers", functools.partial(warmroute, more=["--workers", str(workers)])),
    ]
    costs: dict[str, dict[str, list[float]]] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-bench-")))
        wrk = Wrk(directory, bodies(arguments.seed))
        _, running = await start(stack, directory, peers)
        for key in ROWS:
            progress(f"{ROWS[key]}: {arguments.repeats} repeats of {arguments.seconds} s each")
            for each in running:
                await wrk.prepare(each.url, key)
                await wrk.run(each.url, key, connections=CONNECTIONS, seconds=1)
            for _ in range(arguments.repeats):
                for each in running:
                    before = cpu_us(each.pid)
                    done = await wrk.run(each.url, key, connections=CONNECTIONS, seconds=arguments.seconds)
                    used = (cpu_us(each.pid) - before) / max(1, done.requests)
                    costs.setdefault(key, {}).setdefault(each.peer.name, []).append(used)
                    answered = (done.requests - done.failed) / arguments.seconds
                    rates.setdefault(key, {}).setdefault(each.peer.name, []).append(answered)
    one, many = (peer.name for peer in peers)
    times = {key: carried(workers, median(each[one]), median(each[many])) for key, each in costs.items()}
    bar = 1 + BAR * (workers - 1)
    document: dict[str, object] = {
        "command": "overhead workers",
        "seed": arguments.seed,
        "workers": workers,
        "repeats": arguments.repeats,
        "seconds": arguments.seconds,
        "cpu_us_per_request": costs,
        "requests_per_second": rates,
        "carried": times,
        "bar": bar,
    }
    if arguments.json:
        print_json(document)
    else:
        shown = Table(title=f"medians of {arguments.repeats}", title_justify="left")
        for column in (
            "what",
            "CPU us, one",
            f"CPU us, {workers}",
            "carried",
            "bar",
            "req/s, one",
            f"req/s, {workers}",
        ):
            shown.add_column(column, justify="left" if column == "what" else "right")
        for key, name in ROWS.items():
            cost, rate = costs[key], rates[key]
            shown.add_row(
                name,
                *(f"{median(cost[which]):.0f}" for which in (one, many)),
                f"{times[key]:.2f}",
                f"{bar:.1f}",
                *(f"{median(rate[which]):,.0f}" for which in (one, many)),
            )
        Console(width=120).print(shown)
    if arguments.out is not None:
        write_json(document, arguments.out / "overhead-workers.json")
    missed = [
        f"{ROWS[key]}: {workers} workers carry {value:.2f} times one" for key, value in times.items() if value < bar
    ]
    for line in missed:
        progress(f"missed: {line}")
    return 1 if missed and arguments.check else 0
