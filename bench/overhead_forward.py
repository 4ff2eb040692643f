"""What passing bytes on costs, in CPU microseconds of the router's process, beside nginx and other routers.

All routers run at one time before the same two replicas, which answer at once with fixed bytes, and are loaded in turn:
a row's first repeat of each, then the second of each. A figure is the median of its repeats, and ratios within one run
are what counts: whatever else the machine does slows all of them down. CPU is the process tree's time on a core, user
and system, as the scheduler counts it; the load's and the replicas' own is not part of it. Whole answers are loaded by
wrk with 32 connections, after a warm-up.

    1 KB POST           /v1/score: a path without a prompt, routed by load
    1 KB embeddings     /v1/embeddings: its text is read, and each time another
    3 KB chat           a shared system prompt of 2.5 KB and a new question
    100 KB, 400 KB chat the next turn of eight conversations: 50 messages that were sent before, and a new question
    paced SSE           100 streams, an event every 20 ms, each at its own moment: per event
    added p50           one connection, 1 KB POST, less the same without a router
    memory              what 1,000 idle streams, and one client that reads nothing of a flood, add to the resident size
    open streams        how many of 10,000 are held, or of what the limit of open files allows

The replicas' tokenizer is the stand-in's, so this project's router reads prompts as token ids. Others run in their
cache-aware mode. Two are no routers but yardsticks: `aiohttp`, what a few lines of it cost, and `bare`, the least that
uvloop and httptools can. --check exits 1 where a bar is missed, or another router is better in any row.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.forward_backend import FLOOD, IDLE, MODEL, PACED
from bench.forward_load import CHAT, LoadError, Run, Streams, Wrk, bodies, stalled
from bench.forward_peers import Peer, open_files, peers
from bench.processes import HOST, Processes, StartError, free_ports
from bench.report import print_json, progress, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Sequence

OURS, BASE = "warmroute", "nginx"
REPLICAS = 2
CONNECTIONS = 32
STREAMS, IDLE_STREAMS, OPEN_STREAMS = 100, 1_000, 10_000
# Of a process's open files so many are for other things than streams.
OTHER_FILES = 200
MOST_FAILED = 0.01
_START_S, _SETTLE_S = 120.0, 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is measured. `ratio`: at most so many times nginx's; `most` and `least`: bounds by themselves."""

    key: str
    name: str
    unit: str
    ratio: float | None = None
    most: float | None = None
    least: float | None = None
    compared: bool = True


ROWS = (
    Row("plain", "1 KB POST", "us", ratio=1.8),
    Row("embed", "1 KB embeddings", "us"),
    Row("short", "3 KB chat", "us", ratio=3.5),
    Row("chat", "100 KB chat", "us", ratio=2.5),
    Row("long", "400 KB chat", "us", ratio=6.0),
    Row("sse", "paced SSE", "us", ratio=1.4),
    Row("p50", "added p50", "us", ratio=1.5),
    Row("idle", "1,000 idle streams", "MB", most=12.0),
    Row("stalled", "a stalled client", "MB", most=2.0),
    Row("open", "open streams", "", least=float(OPEN_STREAMS), compared=False),
)
KEYS = tuple(row.key for row in ROWS)
_MEMORY = ("idle", "stalled", "open")


@dataclass(slots=True)
class Result:
    """What was measured of each router: the repeats of each row, and how many requests failed."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, dict[str, int]] = field(default_factory=dict)
    requests: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, row: str, peer: str, value: float) -> None:
        self.values.setdefault(row, {}).setdefault(peer, []).append(value)

    def count(self, row: str, peer: str, run: Run) -> None:
        for counts, more in ((self.failed, run.failed), (self.requests, run.requests)):
            of_row = counts.setdefault(row, {})
            of_row[peer] = of_row.get(peer, 0) + more

    def failures(self, row: str, peer: str) -> int:
        return self.failed.get(row, {}).get(peer, 0)

    def median(self, row: str, peer: str) -> float | None:
        """None where nothing was measured, or much of it failed: an error is a cheap answer."""
        found = self.values.get(row, {}).get(peer)
        if self.failures(row, peer) > MOST_FAILED * self.requests.get(row, {}).get(peer, 0):
            return None
        return median(found) if found else None


@dataclass(slots=True)
class Running:
    """A router that runs."""

    peer: Peer
    pid: int
    url: str


# -- what a process uses ----------------------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found


def cpu_us(pid: int) -> float:
    """Time on a core of a process tree's living threads."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    total += int((thread / "schedstat").read_text().split()[0])
    return total / 1000


def resident_mb(pid: int) -> float:
    """Resident memory of a process tree."""
    pages = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


# -- starting ---------------------------------------------------------------------------------------------------------


async def start(stack: AsyncExitStack, directory: Path, chosen: Sequence[Peer]) -> tuple[list[str], list[Running]]:
    """Replicas and routers, each ready when a chat goes through it."""
    processes = await stack.enter_async_context(Processes())
    ports = free_ports(REPLICAS + 2 * len(chosen))
    replicas = [f"http://{HOST}:{port}" for port in ports[:REPLICAS]]
    for port in ports[:REPLICAS]:
        await processes.module(f"replica {port}", ["bench.forward_backend", str(port)])
    await _answers(replicas[0], "the replica", processes)
    running = []
    for number, peer in enumerate(chosen):
        port, metrics = ports[REPLICAS + 2 * number : REPLICAS + 2 * number + 2]
        own = directory / f"{peer.name}-{port}"
        own.mkdir()
        pid = await processes.program(peer.name, peer.command((port, metrics), replicas, own))
        running.append(Running(peer, pid, f"http://{HOST}:{port}"))
    for each in running:
        await _answers(each.url, each.peer.name, processes)
    return replicas, running


async def _answers(url: str, name: str, processes: Processes) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}]}
    deadline = asyncio.get_running_loop().time() + _START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while asyncio.get_running_loop().time() < deadline:
            if (said := processes.ended()) is not None:
                raise StartError(said)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(url + CHAT, json=body) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise StartError(f"{name} passed no chat on within {_START_S:.0f} s")


# -- rows -------------------------------------------------------------------------------------------------------------


async def _cpu_rows(
    keys: Sequence[str], chosen: Sequence[Peer], result: Result, *, repeats: int, seconds: int, seed: int
) -> None:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-bench-")))
        wrk = Wrk(directory, bodies(seed))
        replicas, running = await start(stack, directory, chosen)
        for key in keys:
            progress(f"{key}: {repeats} repeats of {seconds} s for each of {len(running)} routers")
            if key in ("plain", "embed", "short", "chat", "long"):
                for each in running:
                    await wrk.prepare(each.url, key)
                    await wrk.run(each.url, key, connections=CONNECTIONS, seconds=1)
            for _ in range(repeats):
                if key == "p50":
                    straight = (await wrk.run(replicas[0], "plain", connections=1, seconds=seconds)).p50_us
                for each in running:
                    if key == "sse":
                        value = await _per_event(each, seconds)
                    elif key == "p50":
                        run = await wrk.run(each.url, "plain", connections=1, seconds=seconds)
                        value = run.p50_us - straight
                        result.count(key, each.peer.name, run)
                    else:
                        before = cpu_us(each.pid)
                        run = await wrk.run(each.url, key, connections=CONNECTIONS, seconds=seconds)
                        value = (cpu_us(each.pid) - before) / max(1, run.requests)
                        result.count(key, each.peer.name, run)
                    result.add(key, each.peer.name, value)


async def _per_event(each: Running, seconds: int) -> float:
    streams = Streams(each.url)
    try:
        if (begun := await streams.open(STREAMS, PACED)) < STREAMS:
            raise LoadError(f"only {begun} of {STREAMS} streams began at {each.peer.name}")
        await asyncio.sleep(0.2)
        cpu, events = cpu_us(each.pid), streams.events
        await asyncio.sleep(seconds)
        return (cpu_us(each.pid) - cpu) / max(1, streams.events - events)
    finally:
        await streams.close()


async def _memory_rows(keys: Sequence[str], peer: Peer, result: Result) -> None:
    """Each in a process of its own that has served little before: memory once used hides what comes later."""
    rows: dict[str, Callable[[Running], Awaitable[float]]] = {"idle": _idle, "stalled": _stalled, "open": _held}
    for key in keys:
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-bench-")))
            _, (running,) = await start(stack, directory, [peer])
            # Whatever is made at the first requests is none of the later ones' doing.
            warm = Streams(running.url)
            await warm.open(STREAMS, IDLE)
            await warm.close()
            await _settled(running.pid)
            result.add(key, peer.name, await rows[key](running))


async def _idle(running: Running) -> float:
    before = resident_mb(running.pid)
    streams = Streams(running.url)
    try:
        await streams.open(IDLE_STREAMS, IDLE)
        return max(0.0, await _settled(running.pid) - before) * IDLE_STREAMS / max(1, streams.begun)
    finally:
        await streams.close()


async def _stalled(running: Running) -> float:
    before = resident_mb(running.pid)
    with stalled(running.url, FLOOD):
        return max(0.0, await _settled(running.pid) - before)


async def _held(running: Running) -> float:
    """A stream takes two of a router's files, one for each side."""
    streams = Streams(running.url)
    try:
        return await streams.open(min(OPEN_STREAMS, (open_files() - OTHER_FILES) // 2), IDLE, at_once=256)
    finally:
        await streams.close()


async def _settled(pid: int) -> float:
    """Resident memory once it grows no more, or after _SETTLE_S."""
    last, same = resident_mb(pid), 0
    deadline = asyncio.get_running_loop().time() + _SETTLE_S
    while same < 8 and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.1)
        now = resident_mb(pid)
        same = same + 1 if abs(now - last) < 0.1 else 0
        last = now
    return last


# -- the report -------------------------------------------------------------------------------------------------------


def missed(result: Result, others: Sequence[str]) -> list[str]:
    """A line for each bar that is missed, and each row in which one of the other routers is better."""
    said = []
    for row in ROWS:
        ours = result.median(row.key, OURS)
        if result.failures(row.key, OURS):
            said.append(f"{row.name}: {result.failures(row.key, OURS)} requests failed")
        if ours is None:
            continue
        base = result.median(row.key, BASE)
        shown = f"{row.name}: {ours:.1f} {row.unit}".rstrip()
        if row.ratio is not None and base is not None and ours > row.ratio * base:
            said.append(f"{shown}, {ours / base:.2f} times {BASE}'s, at the most {row.ratio:g} times")
        if row.most is not None and ours > row.most:
            said.append(f"{shown}, at the most {row.most:g}")
        if row.least is not None and ours < min(row.least, (open_files() - OTHER_FILES) // 2):
            said.append(f"{shown}, at least {row.least:g}")
        for name in others if row.compared else ():
            other = result.median(row.key, name)
            if other is not None and other <= ours:
                said.append(f"{shown}, but {name} takes {other:.1f}")
    return said


def _show(result: Result, names: Sequence[str], repeats: int) -> None:
    shown = Table(title=f"medians of {repeats}; in brackets, times {BASE}'s", title_justify="left")
    shown.add_column("what")
    shown.add_column("unit")
    for name in names:
        shown.add_column(name, justify="right")
    shown.add_column("bar", justify="right")
    for row in ROWS:
        if row.key not in result.values:
            continue
        base = result.median(row.key, BASE)
        cells = []
        for name in names:
            value = result.median(row.key, name)
            failed = result.failures(row.key, name)
            cell = (
                ("failed" if failed else "") if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
            )
            if value is not None and base and row.ratio is not None and name != BASE:
                cell += f" ({value / base:.2f})"
            cells.append(cell)
        bar = f"({row.ratio:g})" if row.ratio is not None else ""
        bar = f"{row.most:g}" if row.most is not None else f"{row.least:,.0f}" if row.least is not None else bar
        shown.add_row(row.name, row.unit, *cells, bar)
    Console(width=140).print(shown)
    for key, counts in result.failed.items():
        for name, count in counts.items():
            if count:
                print(f"{key}: {name} failed {count} of {result.requests[key][name]} requests")


async def run(arguments: argparse.Namespace) -> int:
    hard = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if (hard - OTHER_FILES) // 2 < OPEN_STREAMS and "open" in arguments.rows:
        progress(f"open files are limited to {hard} here: {(hard - OTHER_FILES) // 2} open streams are tried")
    chosen = []
    for peer in peers(arguments.peers):
        if peer.missing is not None:
            progress(f"{peer.name} is skipped, it is not installed: {peer.missing}")
        else:
            chosen.append(peer)
    names = [peer.name for peer in chosen]
    if arguments.check and BASE not in names:
        raise ValueError(f"--check compares with {BASE}: install it, and name it among --peers")
    result = Result()
    cpu_keys = [key for key in KEYS if key in arguments.rows and key not in _MEMORY]
    if memory_keys := [key for key in _MEMORY if key in arguments.rows]:
        for peer in chosen:
            progress(f"{', '.join(memory_keys)}: {peer.name}")
            await _memory_rows(memory_keys, peer, result)
    if cpu_keys:
        await _cpu_rows(
            cpu_keys, chosen, result, repeats=arguments.repeats, seconds=arguments.seconds, seed=arguments.seed
        )
    others = [peer.name for peer in chosen if not peer.yardstick and peer.name not in (OURS, BASE)]
    said = missed(result, others)
    document: dict[str, object] = {
        "command": "overhead forward",
        "seed": arguments.seed,
        "repeats": arguments.repeats,
        "seconds": arguments.seconds,
        "open_files": hard,
        "rows": result.values,
        "medians": {key: {name: result.median(key, name) for name in names} for key in result.values},
        "requests": result.requests,
        "failed": result.failed,
        "missed": said,
    }
    if arguments.json:
        print_json(document)
    else:
        _show(result, names, arguments.repeats)
    if arguments.out is not None:
        write_json(document, arguments.out / "overhead-forward.json")
    for line in said:
        progress(f"missed: {line}")
    return 1 if said and arguments.check else 0
