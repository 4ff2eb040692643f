"""`bench demo`: three replicas that need no GPU, the router before them, a chat load, and what each does, live.

The same load runs at the same time under round robin, over three replicas of its own, to compare with.
"""

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.client import Client, Record, open_session
from bench.hit_rate import DEFAULT_POLICY, quantile, replica_name
from bench.processes import Processes, StartError, port_is_free
from bench.replica_metrics import ReplicaMetrics, scrape
from bench.workloads import MultiTurn, Script

MODEL = "Llama-3.1-8B"
REPLICAS = 3
CHATS = 12
WORKLOAD = MultiTurn(
    sessions=CHATS, turns=6, system_chars=4000, user_chars=(400, 1600), answer_tokens=(16, 48), stagger_s=0.3
)
# A small GPU, where a cold prompt costs a person's patience and a pool holds about eight of these chats.
GPU = "L4"
REPLICA_FLAGS = ("--model", MODEL, "--gpu", GPU, "--max-model-len", "8192", "--enable-prompt-tokens-details")
_TICK_S = 1.0
_PRINT_EVERY_S = 5.0
_AFTER_FAILURE_S = 1.0


class PortTakenError(Exception):
    """The port the router was to listen on is in use."""


@dataclass(slots=True)
class Side:
    """One router with its replicas, and what the load against it has seen."""

    name: str
    router: str
    replicas: Sequence[str]
    metrics: dict[str, ReplicaMetrics] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.error is not None]

    @property
    def hit_rate(self) -> float:
        asked = sum(record.prompt_tokens for record in self.answered)
        return sum(record.cached_tokens for record in self.answered) / asked if asked else 0.0


async def run(arguments: argparse.Namespace) -> int:
    """Show the demo until `arguments.seconds` are over, or until cancelled; return the exit status."""
    if not port_is_free(arguments.port):
        raise PortTakenError(f"port {arguments.port} is taken; name another: make demo DEMO_PORT={arguments.port + 1}")
    console = Console()
    console.print(f"Starting {2 * REPLICAS} replicas and 2 routers ...", style="dim")
    async with Processes() as processes, open_session() as session:
        urls = await processes.replicas(2 * REPLICAS, REPLICA_FLAGS)
        ours, theirs = urls[:REPLICAS], urls[REPLICAS:]
        warm = Side("warmroute", await processes.router(ours, policy=DEFAULT_POLICY, port=arguments.port), ours)
        plain = Side("round robin", await processes.router(theirs, policy="round_robin"), theirs)
        sides = (warm, plain)
        try:
            async with asyncio.timeout(arguments.seconds), asyncio.TaskGroup() as group:
                for side in sides:
                    scripts = WORKLOAD.endless(arguments.seed)
                    for chat in range(CHATS):
                        group.create_task(_chat(session, side, scripts, delay_s=chat * WORKLOAD.stagger_s))
                await _show(console, session, processes, sides)
        except TimeoutError:
            pass
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            console.print(*_outcome(warm, plain), sep="\n")
    return 0


async def _chat(session: aiohttp.ClientSession, side: Side, scripts: Iterator[Script], delay_s: float) -> None:
    """Play one conversation after another, as one user would."""
    client = Client(session, side.router, MODEL, side.records.append)
    await asyncio.sleep(delay_s)
    while True:
        failures = len(side.failed)
        await client.play(next(scripts))
        if len(side.failed) > failures:
            await asyncio.sleep(_AFTER_FAILURE_S)


async def _show(
    console: Console, session: aiohttp.ClientSession, processes: Processes, sides: tuple[Side, Side]
) -> None:
    """Draw until cancelled: in place on a terminal, every few seconds elsewhere. Raises StartError if a child ends."""
    with contextlib.ExitStack() as stack:
        live = (
            stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
            if console.is_terminal
            else None
        )
        ticks = 0
        while True:
            ended = processes.ended()
            if ended is not None:
                raise StartError(ended)
            await asyncio.gather(*(_scrape(session, side) for side in sides))
            if live is not None:
                live.update(screen(*sides), refresh=True)
            elif ticks % round(_PRINT_EVERY_S / _TICK_S) == 0:
                console.print(screen(*sides) if ticks == 0 else progress(*sides))
            ticks += 1
            await asyncio.sleep(_TICK_S)


async def _scrape(session: aiohttp.ClientSession, side: Side) -> None:
    # A replica too busy to answer keeps its last figures for a moment.
    for replica in side.replicas:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            side.metrics[replica] = await scrape(session, replica)


def screen(warm: Side, plain: Side) -> Group:
    """Return what the terminal shows meanwhile: what the replicas do, the comparison, and how to try it oneself."""
    return Group(progress(warm, plain), _try_it(warm))


def progress(warm: Side, plain: Side) -> Group:
    return Group(_replicas(warm), comparison(warm, plain))


def _replicas(side: Side) -> Table:
    replicas = Table(
        title=f"{side.name}: {CHATS} chats at a time, {MODEL} on {REPLICAS} x {GPU} (modelled)",
        title_justify="left",
        expand=False,
    )
    replicas.add_column("replica", no_wrap=True)
    for column in ("requests", "in flight", "waiting", "KV use", "hit rate"):
        replicas.add_column(column, justify="right", no_wrap=True)
    for url in side.replicas:
        seen = side.metrics.get(url)
        if seen is None:
            replicas.add_row(replica_name(url), *["-"] * 5)
            continue
        kv, hits = f"{seen.kv_usage:.1%}", f"{seen.hit_rate:.1%}"
        replicas.add_row(replica_name(url), str(seen.requests), str(seen.in_flight), str(seen.waiting), kv, hits)
    return replicas


def comparison(*sides: Side) -> Table:
    """Return a table of the sides' answered requests, hit rate and TTFT (as the client saw it)."""
    table = Table(title="the same chats, side by side", title_justify="left", expand=False)
    table.add_column("policy", no_wrap=True)
    for column in ("answered", "failed", "hit rate", "TTFT mean", "p90"):
        table.add_column(column, justify="right", no_wrap=True)
    best = max(side.hit_rate for side in sides)
    for side in sides:
        answered = side.answered
        ttft = sorted(record.ttft_s * 1000 for record in answered)
        mean, p90 = (f"{statistics.fmean(ttft):.0f} ms", f"{quantile(ttft, 0.9):.0f} ms") if ttft else ("-", "-")
        rate = f"{side.hit_rate:.1%}" if answered else "-"
        style = "bold green" if answered and side.hit_rate == best else ""
        table.add_row(side.name, str(len(answered)), str(len(side.failed)), Text(rate, style), mean, p90)
    return table


def _try_it(side: Side) -> Text:
    return Text.assemble(
        ("The router listens on ", "dim"),
        side.router,
        (". Try it from another terminal:\n", "dim"),
        f"curl {side.router}/v1/chat/completions \\\n",
        "  -H 'content-type: application/json' \\\n",
        f'  -d \'{{"model": "{MODEL}", "max_tokens": 24,\n',
        '       "messages": [{"role": "user", "content": "Hello"}]}\'\n',
        ("Ctrl-C ends it all.", "dim"),
    )


def _outcome(warm: Side, plain: Side) -> list[object]:
    lines: list[object] = [progress(warm, plain)]
    lines += [f"{side.name}: the last failure was: {side.failed[-1].error}" for side in (warm, plain) if side.failed]
    if warm.answered and plain.answered:
        lines.append(f"hit rate: {warm.hit_rate:.1%} with warmroute, {plain.hit_rate:.1%} under round robin")
    return lines
