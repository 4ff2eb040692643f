"""What the index that routers share costs: a decision's question, what is told, and what a block takes.

A private server is started (or the one given by --server), filled as 64 replicas' traffic would fill it, and asked for
prompts of 6,250 blocks: all replicas hold the system prompt, eight hold the conversation to some depth, one to its last
turn. Time is a question's way there and back from one router on uvloop, packing included; CPU is the whole server's
(getrusage, as INFO tells), reading the question's 16 KB included. A plain GET stands beside both. How long a call holds
the server up is its own slow log, over everything told and asked, the same twice over; of the two the lesser counts, so
that another process that took the core is not counted. --check exits 1 where a bar is missed.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.table import Table

from bench.overhead_decision import Figure
from bench.report import print_json, progress, write_json
from router.index.pages import PAGE_BLOCKS
from router.index.shared import Member, Options, Shared
from router.index.shared_embedded import Embedded
from router.index.shared_known import ToldKnown
from router.index.shared_link import Link, LinkError, Target, parse_targets

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

REPLICAS, BLOCKS, SYSTEM, TAIL = 64, 6_250, 250, 50
POOL = 16_384
TIMEOUT_MS = 10_000.0
SHORT_BLOCKS, SHORT_CHATS = 25, 2_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """64 replicas of which nobody but the bench knows."""

    names: tuple[str, ...] = tuple(f"replica-{number:02}:8000" for number in range(REPLICAS))

    def members(self) -> list[Member]:
        return [Member(name, "1.0", POOL) for name in self.names]


class Bench:
    """One router's share in a store, and a connection beside it that looks at the server."""

    def __init__(self, shared: Shared, look: Link, namespace: str, seed: int) -> None:
        self._shared = shared
        self._look = look
        self._plain = b"{%s}:plain" % namespace.encode()
        self._chance = Random(seed)
        self.names = Fleet().names
        self._heard: dict[str, ToldKnown] = {}

    async def hear(self) -> None:
        """The replicas' events are heard from now on, and this router tells what they say."""
        for name in self.names:
            known = self._heard[name] = ToldKnown(POOL, POOL)
            known.trust()
            self._shared.hear(name, known)
        while not all(map(self._shared.is_writer, self.names)):  # noqa: ASYNC110 - it has nobody to tell
            await asyncio.sleep(0.001)

    async def stored(self, replica: str, keys: array[int]) -> None:
        """The replica says that it holds a chain; wait until the store has it."""
        self._heard[replica].stored(keys, None, medium="GPU", group=0, scale=1)
        while self._shared.untold_pages:  # noqa: ASYNC110
            await asyncio.sleep(0.0002)

    def chain(self, length: int) -> array[int]:
        return array("Q", [self._chance.getrandbits(64) for _ in range(length)])

    async def _told(self) -> None:
        while self._shared.waiting_blocks:  # noqa: ASYNC110 - it has nobody to tell
            await asyncio.sleep(0.0002)

    async def tell(self, replica: str, keys: array[int], *, ended: bool = False) -> None:
        """Record it, and wait until the store has it: one after the other, so that each run makes the same calls."""
        self._shared.record(replica, keys, ended=ended, prompt_end=len(keys) - 1, soon_seconds=60.0)
        await self._told()

    async def ask(self, keys: array[int]) -> dict[str, int]:
        found = await self._shared.consult([(keys, self.names)])
        if found is None:
            raise ValueError("the store did not answer")
        return {name: matches[0][0].depth for name, matches in found.matches.items()}

    async def set_plain(self) -> None:
        await self._look.call(b"SET", self._plain, b"x" * 64)

    async def get(self) -> None:
        await self._look.call(b"GET", self._plain)

    async def info(self, section: bytes) -> dict[str, str]:
        text: bytes = await self._look.call(b"INFO", section)
        return dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)

    async def cpu_us(self) -> float:
        found = await self.info(b"cpu")
        return (float(found["used_cpu_user"]) + float(found["used_cpu_sys"])) * 1e6

    async def memory(self) -> int:
        return int((await self.info(b"memory"))["used_memory"])

    async def calls(self) -> int:
        stats = (await self.info(b"commandstats")).get("cmdstat_evalsha", "calls=0,")
        return int(stats.split("calls=")[1].split(",")[0])

    async def longest(self, work: Callable[[], Awaitable[None]]) -> list[int]:
        """How long each script call of some work held the server up, us, in their order."""
        await self._look.call(b"CONFIG", b"SET", b"slowlog-max-len", b"100000")
        await self._look.call(b"CONFIG", b"SET", b"slowlog-log-slower-than", b"0")
        await self._look.call(b"SLOWLOG", b"RESET")
        await work()
        await self._look.call(b"CONFIG", b"SET", b"slowlog-log-slower-than", b"-1")
        entries = await self._look.call(b"SLOWLOG", b"GET", b"100000")
        return [int(entry[2]) for entry in sorted(entries) if entry[3][0].upper() == b"EVALSHA"]


async def timed(count: int, work: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """The median and the 99th percentile, ms."""
    times = []
    for number in range(count):
        began = perf_counter()
        await work(number)
        times.append((perf_counter() - began) * 1000)
    return median(times), quantiles(times, n=100)[98]


async def traffic(bench: Bench) -> array[int]:
    """What the prompts that are asked for find: who holds how much of `talk`. Returns it."""
    talk = bench.chain(BLOCKS - TAIL)
    for name in bench.names:
        await bench.tell(name, talk[:SYSTEM])
    for number, name in enumerate(bench.names[1:9]):
        await bench.tell(name, talk[: SYSTEM + 613 * (number + 1)])
    await bench.tell(bench.names[0], talk, ended=True)
    return talk


async def held_up(target: Target, seed: int) -> int:
    """The longest that one call held the server up: long prompts new and known, held by one and by all, a popular
    short system prompt, and questions between."""
    runs: list[list[int]] = []
    for number in range(2):
        async with AsyncExitStack() as stack:
            bench = await _bench(stack, target, f"held-{number}", seed)

            async def work(bench: Bench = bench) -> None:
                talk = await traffic(bench)
                for name in bench.names:
                    await bench.tell(name, talk)
                await bench.ask(talk)
                head = bench.chain(5)
                for turn in range(1_000):
                    await bench.tell(bench.names[turn % REPLICAS], head + bench.chain(4 + turn % 9))
                    if turn % 10 == 0:
                        await bench.ask(head + bench.chain(20))
                for number in range(20):
                    await bench.tell(bench.names[number], bench.chain(POOL))

            runs.append(await bench.longest(work))
    if len(runs[0]) == len(runs[1]):
        return int(max(map(min, zip(*runs, strict=True))))
    return int(min(map(max, runs)))  # a heartbeat fell into one of them


async def _bench(stack: AsyncExitStack, target: Target, name: str, seed: int) -> Bench:
    """In a namespace of its own, of which nothing is left."""
    namespace = f"bench-{os.getpid()}-{name}"
    options = Options([target], namespace=namespace, timeout_ms=TIMEOUT_MS, lease_seconds=600.0)
    try:
        look = await Link.connect(target, None)
    except LinkError as error:
        raise ValueError(f"{target} cannot be used: {error}") from None
    stack.callback(look.close)
    stack.push_async_callback(_clear, look, namespace)
    shared = Shared(options, members=Fleet().members, loads=lambda _: ())
    await shared.start()
    stack.push_async_callback(shared.stop)
    if not shared.online:
        raise ValueError(f"{target} cannot be used")
    return Bench(shared, look, namespace, seed)


async def _clear(look: Link, namespace: str) -> None:
    cursor = b"0"
    while True:
        cursor, keys = await look.call(b"SCAN", cursor, b"MATCH", b"{%s}:*" % namespace.encode(), b"COUNT", b"1000")
        if keys:
            await look.call(b"UNLINK", *keys)
        if cursor == b"0":
            return


async def bytes_per_block(target: Target, seed: int) -> tuple[float, float, float]:
    """Of long prompts on one replica each; of short chats; of a prompt that all hold, for each of them."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, target, "memory", seed)
        # The first prompts pay for what is there once.
        await bench.tell(bench.names[0], bench.chain(POOL))

        async def grown(work: Callable[[], Awaitable[int]]) -> float:
            before = await bench.memory()
            blocks = await work()
            return (await bench.memory() - before) / blocks

        async def long() -> int:
            for name in bench.names[:16]:
                await bench.tell(name, bench.chain(BLOCKS))
            return 16 * BLOCKS

        async def short() -> int:
            for number in range(SHORT_CHATS):
                await bench.tell(bench.names[number % REPLICAS], bench.chain(SHORT_BLOCKS))
            return SHORT_CHATS * SHORT_BLOCKS

        async def popular() -> int:
            keys = bench.chain(BLOCKS)
            for name in bench.names:
                await bench.tell(name, keys)
            return REPLICAS * BLOCKS

        return await grown(long), await grown(short), await grown(popular)


async def told_by_events(target: Target, runs: int, seed: int) -> tuple[float, float]:
    """Server's CPU, us: of a decision where a router tells what all replicas hold, the same as in `traffic`, and ten of
    them wait for what they were just sent; and of each page that is told."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, target, "told", seed)
        await bench.hear()
        talk = bench.chain(BLOCKS - TAIL)
        depths = [len(talk), *(SYSTEM + 613 * number for number in range(1, 9)), *[SYSTEM] * (REPLICAS - 9)]
        begun = await bench.cpu_us()
        for name, depth in zip(bench.names, depths, strict=True):
            await bench.stored(name, talk[:depth])
        page = (await bench.cpu_us() - begun) / sum(-(-depth // PAGE_BLOCKS) for depth in depths)
        prompts = [talk + bench.chain(TAIL) for _ in range(runs)]
        if list((await bench.ask(prompts[0])).values()) != depths:
            raise ValueError("the store's answer is wrong")
        for name in bench.names[20:30]:
            await bench.tell(name, talk[: SYSTEM + 400])
        await timed(runs, lambda number: bench.ask(prompts[number]))  # warm
        cpu = await bench.cpu_us()
        await timed(runs, lambda number: bench.ask(prompts[number][:]))
        return (await bench.cpu_us() - cpu) / runs, page


async def measure(target: Target, *, runs: int, seed: int) -> tuple[str, list[Figure]]:
    """The server's version, and all figures."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, target, "decision", seed)
        server = await bench.info(b"server")
        version = f"valkey {server['valkey_version']}" if "valkey_version" in server else ""
        version = version or f"redis {server['redis_version']}"
        talk = await traffic(bench)
        prompts = [talk + bench.chain(TAIL) for _ in range(runs)]
        expected = dict.fromkeys(bench.names, SYSTEM)
        expected |= {name: SYSTEM + 613 * (number + 1) for number, name in enumerate(bench.names[1:9])}
        expected[bench.names[0]] = len(talk)
        if await bench.ask(prompts[0]) != expected:
            raise ValueError("the store's answer is wrong")
        await timed(runs, lambda number: bench.ask(prompts[number]))  # warm
        calls, cpu = await bench.calls(), await bench.cpu_us()
        p50, p99 = await timed(runs, lambda number: bench.ask(prompts[number][:]))
        cpu = (await bench.cpu_us() - cpu) / runs
        calls = await bench.calls() - calls
        await bench.set_plain()
        get_cpu = await bench.cpu_us()
        get50, get99 = await timed(runs * 4, lambda _: bench.get())
        get_cpu = (await bench.cpu_us() - get_cpu) / (runs * 4)
        # The worst there can be: 64 replicas, each of which holds another depth.
        for number, name in enumerate(bench.names):
            await bench.tell(name, talk[: SYSTEM + 90 * (number + 1)])
        worst_cpu = await bench.cpu_us()
        worst50, _ = await timed(runs, lambda number: bench.ask(prompts[number][:]))
        worst_cpu = (await bench.cpu_us() - worst_cpu) / runs
    told, page = await told_by_events(target, runs, seed)
    longest = await held_up(target, seed)
    long, short, popular = await bytes_per_block(target, seed)
    return version, [
        Figure("round trips a decision", calls / runs, "", 1.0),
        Figure("decision, median", p50, "ms", 0.6),
        Figure("decision, 99th percentile", p99, "ms"),
        Figure("decision, server's CPU", cpu, "us", 250.0),
        Figure("each replica at another depth, median", worst50, "ms"),
        Figure("each replica at another depth, server's CPU", worst_cpu, "us"),
        Figure("contents told by events, server's CPU", told, "us"),
        Figure("a page told by events, server's CPU", page, "us"),
        Figure("plain GET, median", get50, "ms"),
        Figure("plain GET, 99th percentile", get99, "ms"),
        Figure("plain GET, server's CPU", get_cpu, "us"),
        Figure("longest call of all, writes included", longest / 1000, "ms", 2.0),
        Figure("long prompts", long, "bytes per block", 130.0),
        Figure("short chats", short, "bytes per block", 130.0),
        Figure("a prompt that all replicas hold", popular, "bytes per block and replica", 130.0),
    ]


async def _measured(server: str, *, runs: int, seed: int) -> tuple[str, list[Figure]]:
    async with AsyncExitStack() as stack:
        if server:
            target = parse_targets(server)[0]
        else:
            target = await stack.enter_async_context(Embedded())
        return await measure(target, runs=runs, seed=seed)


async def run(arguments: argparse.Namespace) -> int:
    # In a thread: on uvloop, as the router runs.
    version, figures = await asyncio.to_thread(
        lambda: uvloop.run(_measured(arguments.server, runs=arguments.runs, seed=arguments.seed))
    )
    document: dict[str, object] = {
        "command": "overhead redis",
        "seed": arguments.seed,
        "server": version,
        "replicas": REPLICAS,
        "blocks": BLOCKS,
        "figures": [asdict(figure) for figure in figures],
    }
    if arguments.json:
        print_json(document)
    else:
        _show(figures, version)
    if arguments.out is not None:
        write_json(document, arguments.out / "overhead-redis.json")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        progress(f"missed: {figure.name}: {figure.value:.3f} {figure.unit}, at the most {figure.bar:g}")
    return 1 if missed and arguments.check else 0


def _show(figures: list[Figure], version: str) -> None:
    shown = Table(title=f"{BLOCKS} blocks, {REPLICAS} replicas; {version}", title_justify="left")
    shown.add_column("what")
    for column in ("measured", "unit", "at most"):
        shown.add_column(column, justify="right")
    for figure in figures:
        bar = "" if figure.bar is None else f"{figure.bar:g}"
        shown.add_row(figure.name, f"{figure.value:.3f}", figure.unit, bar)
    Console(width=110).print(shown)
