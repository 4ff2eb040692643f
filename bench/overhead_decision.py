"""What a routing decision costs, in CPU milliseconds on this machine, beside json.loads of the same body.

A chat of 50 messages and 100,000 tokens, before 16 replicas that hash alike: reading it (from the body's bytes to the
keys of its blocks), looking these up, choosing. Each figure is the median of several runs in one process. The index is
the in-memory one; nothing is sent. --check exits 1 where a bar is missed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tracemalloc
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import process_time_ns
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.report import print_json, progress, write_json
from router.app import SWITCH_SECONDS
from router.choose.dispatch import Dispatch
from router.choose.policies import policy
from router.config import Address
from router.fleet.rates import Rates
from router.fleet.replica import Replica, State
from router.fleet.scrape import CacheConfig, Metrics
from router.index.memory import Index
from router.index.residency import Residency
from router.prompt.blocks import NO_EXTRA, Chain
from router.prompt.bodies import Bodies, marks
from router.prompt.memo import Memo
from router.prompt.reader import Reader
from router.prompt.request import Beginning, can_be_known, read
from router.prompt.tokens import Tokenizer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

TINY = Path(__file__).parents[1] / "fake_backend" / "tiny"
PATH = "/v1/chat/completions"
MESSAGES, TOKENS, REPLICAS, BLOCK = 50, 100_000, 16, 16
SYSTEM_TOKENS, SHORT_TOKENS = 2_000, 600
SHORT_BYTES = (1_000, 3_000)
MEMORY = 256 * 1024 * 1024
INDEX_BLOCKS = 200_000
_VOCABULARY = 8_000
_SYLLABLES = (
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "ha",
    "je",
    "ki",
    "lo",
    "mu",
    "na",
    "pe",
    "qui",
    "ra",
    "so",
    "tion",
    "ing",
    "er",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, and the most that it may be."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.value > self.bar


class Chat:
    """Texts of a given number of tokens, and bodies made of them."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._chance = Random(seed)
        self._words = ["".join(self._chance.choices(_SYLLABLES, k=1 + i % 4)) for i in range(_VOCABULARY)]

    def text(self, tokens: int) -> str:
        """Prose with numbers and punctuation: few words occur often, and many seldom, as in languages."""
        words: list[str] = []
        length = 0
        while length < tokens:
            some = [self._word() for _ in range(max(1, (tokens - length) // 4))]
            length += len(self._tokenizer.encode(" " + " ".join(some), False))
            words += some
        return " ".join(words)

    def _word(self) -> str:
        chance = self._chance
        if chance.random() < 0.05:
            return str(chance.randrange(10_000))
        end = chance.choice(["", "", "", "", "", "", ",", ".", "?\n\n", ":"])
        return self._words[int(len(self._words) * chance.random() ** 3)] + end

    def messages(self, count: int, tokens: int) -> list[dict[str, str]]:
        return [
            {"role": "user" if i % 2 == 0 else "assistant", "content": self.text(tokens // count)} for i in range(count)
        ]

    @staticmethod
    def body(messages: Iterable[dict[str, str]]) -> bytes:
        """As the official client writes it."""
        whole = {"messages": list(messages), "model": "m", "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


class Decider:
    """Reads bodies and decides, as the router's journey does."""

    def __init__(self, tokenizer: Tokenizer, algorithm: str) -> None:
        self._tokenizer = tokenizer
        self.memo = Memo(MEMORY)
        self._bodies = Bodies(self.memo.bodies)
        self._reader = Reader(tokenizer, self.memo)
        self._hasher = self._reader.hasher(algorithm, "0")
        self.index = Index()
        self._dispatch = Dispatch(self.index, Rates(8000.0), policy("cost", tie_band_ms=10.0))
        self.replicas = []
        for number in range(REPLICAS):
            cache = CacheConfig(block_size=BLOCK, num_gpu_blocks=INDEX_BLOCKS)
            name = f"replica-{number:02}"
            self.replicas.append(
                Replica(name, Address("r", number + 1, False, ""), State.READY, metrics=Metrics(cache=cache))
            )
            self.index.size(name, INDEX_BLOCKS)

    def read(self, body: bytes) -> tuple[list[Chain], list[int]]:
        """The body's prompt, as blocks, and its length."""
        beginning = None
        if can_be_known(PATH, body):
            digests = marks(body)
            beginning = Beginning(digests, self._bodies.find(body, digests))
        rows = self._reader.rows(read(PATH, body, beginning))
        chains = [row.chain(self._hasher, BLOCK, NO_EXTRA) for row in rows]
        return chains, [len(row) for row in rows]

    def choose(self, chains: list[Chain], tokens: list[int]) -> None:
        self._dispatch.weigh(0.0, self.replicas, [chains] * len(self.replicas), tokens)

    def hold(self, chains: list[Chain]) -> None:
        """Every second replica holds the prompt."""
        for replica in self.replicas[::2]:
            for chain in chains:
                self.index.record(replica.name, chain.keys)


def _cpu_ms(work: Callable[[], Any]) -> float:
    """CPU time of all threads."""
    begun = process_time_ns()
    work()
    return (process_time_ns() - begun) / 1e6


def _median(runs: int, prepare: Callable[[int], Callable[[], Any]]) -> float:
    # All are prepared first: a router does nothing else between two requests either.
    return median([_cpu_ms(work) for work in [prepare(run) for run in range(runs)]])


def measure(tokenizer: Tokenizer, *, algorithm: str, runs: int, seed: int) -> list[Figure]:
    """All figures, in the order in which they are shown."""
    chat = Chat(tokenizer, seed)
    progress(f"making chats of {TOKENS} tokens, tokenizer {tokenizer.name}")
    base = chat.messages(MESSAGES, TOKENS)
    body = chat.body(base)
    figures = [
        Figure("json.loads of the body (yardstick)", _median(runs * 3, lambda _: lambda: json.loads(body)), "CPU ms")
    ]

    def cold(_: int) -> Callable[[], Any]:
        decider, fresh = Decider(tokenizer, algorithm), chat.body(chat.messages(MESSAGES, TOKENS))
        return lambda: decider.read(fresh)

    figures.append(Figure("read: cold", _median(max(3, runs // 2), cold), "CPU ms", 45.0))
    decider = Decider(tokenizer, algorithm)
    decider.hold(decider.read(body)[0])
    for tokens, bar in ((TOKENS // MESSAGES, 0.6), (200, 0.6)):

        def more(_: int, tokens: int = tokens) -> Callable[[], Any]:
            longer = chat.body([*base, {"role": "user", "content": chat.text(tokens)}])
            return lambda: decider.read(longer)

        figures.append(Figure(f"read: one more message, of {tokens} tokens", _median(runs * 3, more), "CPU ms", bar))

    def unknown(_: int) -> Callable[[], Any]:
        # The first byte differs, so that no digest of the body is known; all texts are.
        longer = b" " + chat.body([*base, {"role": "user", "content": chat.text(200)}])
        return lambda: decider.read(longer)

    figures.append(Figure("read: the same, nothing known of the body", _median(runs * 3, unknown), "CPU ms"))
    system = {"role": "system", "content": chat.text(SYSTEM_TOKENS)}
    decider.read(chat.body([system, *chat.messages(1, SHORT_TOKENS)]))

    where = f"on a warm system prompt of {SYSTEM_TOKENS}"
    for what, length, tokens, most in (
        (f"{SHORT_TOKENS} tokens", None, SHORT_TOKENS, 0.1),
        *((f"{size} bytes", size, size, None) for size in SHORT_BYTES),
    ):

        def short(_: int, length: int | None = length, tokens: int = tokens) -> Callable[[], Any]:
            asked = chat.body([system, {"role": "user", "content": chat.text(tokens)[:length]}])
            return lambda: decider.read(asked)

        figures.append(Figure(f"read: {what} {where}", _median(runs * 5, short), "CPU ms", most))
    figures += _index(decider, body, runs)
    held = asyncio.run(_held(tokenizer, chat, algorithm))
    figures.append(Figure("event loop held while a cold prompt is read", held, "ms", 2.0))
    return figures


def _index(decider: Decider, body: bytes, runs: int) -> list[Figure]:
    chains, tokens = decider.read(body)
    keys = chains[0].keys

    def look_up() -> None:
        for replica in decider.replicas:
            decider.index.match(replica.name, keys)

    def choose() -> None:
        decider.choose(chains, tokens)

    def record(run: int) -> Callable[[], Any]:
        index, fresh = Index(), array("Q", [key ^ run for key in keys])
        index.size("r", INDEX_BLOCKS)
        return lambda: index.record("r", fresh)

    def again(run: int) -> Callable[[], Any]:
        index, fresh = Index(), array("Q", [key ^ run for key in keys])
        index.size("r", INDEX_BLOCKS)
        index.record("r", fresh)
        return lambda: index.record("r", fresh, ended=True)

    chance = Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    residency = Residency(INDEX_BLOCKS)
    for _ in range(INDEX_BLOCKS // 1000):
        residency.record(array("Q", [chance.getrandbits(64) for _ in range(1000)]))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return [
        Figure(f"lookup of all {REPLICAS} replicas", 1000 * _median(runs * 5, lambda _: look_up), "CPU us", 50.0),
        Figure(
            "lookup, prices and choice",
            1000 * _median(runs * 5, lambda _: lambda: decider.choose(chains, tokens)),
            "CPU us",
        ),
        Figure(f"record of {len(keys)} blocks", _median(runs, record), "CPU ms", 3.0),
        Figure("record of the same once more", 1000 * _median(runs, again), "CPU us", 50.0),
        Figure("index", held / len(residency), "bytes per block", 120.0),
    ]


async def _held(tokenizer: Tokenizer, chat: Chat, algorithm: str) -> float:
    """The longest that a task which asks for its turn all the time had to wait for it, in ms of wall time, while a
    thread reads cold prompts as the router does. The median over several prompts, less what a turn takes on an idle
    loop (timers tick in whole milliseconds)."""
    loop = asyncio.get_running_loop()
    bodies = [chat.body(chat.messages(MESSAGES, TOKENS)) for _ in range(7)]
    decider = Decider(tokenizer, algorithm)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    gaps: list[float] = []
    worst: list[float] = []
    ticking = True

    async def tick() -> None:
        last = loop.time()
        while ticking:
            await asyncio.sleep(0.0002)
            now = loop.time()
            gaps.append((now - last) * 1000)
            last = now

    try:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(tick())
            await asyncio.sleep(0.1)
            idle = median(gaps)
            for body in bodies:
                gaps.clear()
                await loop.run_in_executor(threads, decider.read, body)
                worst.append(max(gaps, default=0.0) - idle)
            ticking = False
            await task
    finally:
        sys.setswitchinterval(before)
    return median(worst)


async def run(arguments: argparse.Namespace) -> int:
    tokenizer = Tokenizer.load(arguments.tokenizer)
    # In a thread: it has an event loop of its own to measure.
    figures = await asyncio.to_thread(
        measure, tokenizer, algorithm=arguments.algorithm, runs=arguments.runs, seed=arguments.seed
    )
    document: dict[str, object] = {
        "command": "overhead decision",
        "seed": arguments.seed,
        "tokenizer": tokenizer.name,
        "fast_tokenizer": tokenizer.fast,
        "algorithm": arguments.algorithm,
        "figures": [asdict(figure) for figure in figures],
    }
    if arguments.json:
        print_json(document)
    else:
        _show(figures, tokenizer)
    if arguments.out is not None:
        write_json(document, arguments.out / "overhead-decision.json")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        progress(f"missed: {figure.name}: {figure.value:.3f} {figure.unit}, at the most {figure.bar:g}")
    return 1 if missed and arguments.check else 0


def _show(figures: list[Figure], tokenizer: Tokenizer) -> None:
    title = f"{TOKENS} tokens, {MESSAGES} messages, {REPLICAS} replicas; "
    title += f"tokenizer {'with' if tokenizer.fast else 'without'} fastokens"
    shown = Table(title=title, title_justify="left")
    shown.add_column("what")
    for column in ("median", "unit", "at most", "x json.loads"):
        shown.add_column(column, justify="right")
    for figure in figures:
        bar = "" if figure.bar is None else f"{figure.bar:g}"
        # On cores that others use too, this says more than the time does.
        times = f"{figure.value / figures[0].value:.2f}" if figure.unit == "CPU ms" else ""
        shown.add_row(figure.name, f"{figure.value:.3f}", figure.unit, bar, times)
    Console(width=120).print(shown)
