"""Replicas die, hang, slow down and come back under load, and the store too: what clients see of it, and what is left.

    python -m tests.chaos --seconds 300 --seed 1 [-- SETTINGS OF THE ROUTER]

Held to: no request fails before its first byte, every stream is whole or ends in an honest error, no load is left in
the books, the router's memory stays flat. Status 1 where something else happened; it is told with the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import openai

from bench.processes import free_ports
from tests.chaos.load import MODEL, Findings, Talker
from tests.chaos.plan import MOST_AT_ONCE, STORE, Event, plan
from tests.chaos.processes import Child, series, total
from tests.index.servers import Server, binaries

REPLICAS = 8
CLIENTS = 32
WARM_UP_SHARE = 0.3
REST_SECONDS = 60.0
# What may be added to the memory of a warm router: allocators keep what fragments.
GROWTH = 1.08
SLACK_BYTES = 4 * 2**20
FAKE = (
    *("--model", MODEL, "--answers", "uniform:5:80", "--step-overhead-ms", "15", "--enable-prompt-tokens-details"),
    *("--num-gpu-blocks-override", "3000"),
)
ROUTER = (
    # Small pools and memories are full within the warm-up: what grows after that leaks.
    *("--prompt-memory-bytes", str(2**20), "--redis-queue-blocks", "10000", "--redis-retry-seconds", "0.2"),
    *("--admin-port", "-1", "--first-byte-timeout-seconds", "60", "--idle-timeout-seconds", "30"),
)


class Chaos:
    """One run."""

    def __init__(self, seed: int, seconds: float, settings: list[str], directory: Path, stack: AsyncExitStack) -> None:
        self._seed = seed
        self._seconds = seconds
        self._settings = settings
        self._directory = directory
        self._stack = stack
        self._tasks: set[asyncio.Task[None]] = set()
        self._suffering = [asyncio.Lock() for _ in range(REPLICAS + 1)]  # the store's is the last
        self.findings = Findings()
        self.resident: list[tuple[float, int]] = []

    async def run(self) -> None:
        enter = self._stack.enter_async_context
        self._session = await enter(
            # A kept connection may be one that a replica has closed meanwhile.
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=5)
            )
        )
        self._store = await enter(Server(binaries()["valkey-9"]))
        *fakes, front = free_ports(REPLICAS + 1)
        self._urls = [f"http://127.0.0.1:{port}" for port in fakes]
        self._fakes = [
            await enter(self._child(f"replica-{n}", "fake_backend", "--port", str(port), "--seed", str(n), *FAKE))
            for n, port in enumerate(fakes)
        ]
        for fake, url in zip(self._fakes, self._urls, strict=True):
            await fake.answers(self._session, f"{url}/health")
        flags = ("--port", str(front), "--redis", self._store.url, *ROUTER, *self._settings)
        self.router = await enter(self._child("router", "router", "serve", *self._urls, *flags))
        self.url = f"http://127.0.0.1:{front}"
        await self.router.answers(self._session, f"{self.url}/ready")
        client = await enter(
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=1000.0)
        )
        self.findings.begun = time.monotonic()
        talkers = [Talker(client, f"{self._seed}/{n}", self.findings) for n in range(CLIENTS)]
        talking = [asyncio.create_task(talker.run()) for talker in talkers]
        watching = asyncio.create_task(self._watch())
        await self._disturb()
        for talker in talkers:
            talker.stopping = True
        for outcome in await asyncio.gather(*talking, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        watching.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self.findings.found(f"the run itself: {outcome!r}")
        await client.close()
        await self._rest()
        self._judge_memory()
        self._judge_log()

    def _child(self, name: str, *arguments: str) -> Child:
        log = self._directory / f"{name}.log"
        log.unlink(missing_ok=True)  # of an earlier run
        return Child(arguments, log)

    # -- what befalls them --------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        for event in plan(self._seed, self._seconds, REPLICAS):
            await asyncio.sleep(max(0.0, self.findings.begun + event.at - time.monotonic()))
            if not self.router.alive:
                self.findings.found("the router has ended")
                return
            say(str(event))
            # Each ends by itself, while others begin.
            self._tasks.add(asyncio.create_task(self._do(event)))
        await asyncio.sleep(max(0.0, self.findings.begun + self._seconds - time.monotonic()))

    async def _harm_store(self, event: Event) -> None:
        if event.action == "kill":
            await self._store.stop()
            await asyncio.sleep(event.seconds)
            await self._store.start()
        else:
            self._store.signal(signal.SIGSTOP)
            await asyncio.sleep(event.seconds)
            self._store.signal(signal.SIGCONT)

    async def _do(self, event: Event) -> None:
        suffering = sum(lock.locked() for lock in self._suffering[:REPLICAS])
        if self._suffering[event.replica].locked() or (event.replica != STORE and suffering >= MOST_AT_ONCE):
            say("          spared: it, or too many others, have not recovered yet")
            return
        async with self._suffering[event.replica]:
            await (self._harm_store(event) if event.replica == STORE else self._harm(event))

    async def _harm(self, event: Event) -> None:
        fake, url = self._fakes[event.replica], self._urls[event.replica]
        match event.action:
            case "kill":
                await fake.kill()
                await asyncio.sleep(event.seconds)
                await fake.start()
                await fake.answers(self._session, f"{url}/health")
            case "hang":
                fake.stop()
                await asyncio.sleep(event.seconds)
                fake.resume()
            case "slow":
                await self._tell(url, "/fake/gpu", {"slowdown": 10})
                await asyncio.sleep(event.seconds)
                await self._tell(url, "/fake/gpu", {"slowdown": 1})
            case "restart" | "refuse":
                await self._tell(url, f"/fake/{event.action}", {"seconds": event.seconds})
                await asyncio.sleep(event.seconds)
            case fault:
                rule = {
                    "busy": {"kind": "status", "status": 503, "headers": {"retry-after": "1"}, "times": 5},
                    "broken": {"kind": "engine_error", "times": 1},
                    "cut": {"kind": "cut", "events": 3, "times": 3},
                }[fault]
                # Probes stay whole: this is about requests.
                rules = [{"path": path, **rule} for path in ("/v1/chat/completions", "/v1/completions")]
                await self._tell(url, "/fake/faults", rules)
                await asyncio.sleep(event.seconds)
                await self._tell(url, "/fake/faults", None)

    async def _tell(self, url: str, path: str, value: object) -> None:
        for _ in range(10):
            # A machine with too little left of it answers late, or is just being started again.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                method = "DELETE" if value is None else "POST"
                async with self._session.request(method, url + path, json=value) as response:
                    response.raise_for_status()
                    return
            await asyncio.sleep(0.5)
        self.findings.found(f"the fake at {url} does not answer {path}: the run is not what the plan says")

    # -- what is left -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while self.router.alive:
            self.resident.append((time.monotonic() - self.findings.begun, self.router.resident_bytes()))
            await asyncio.sleep(1.0)

    async def _rest(self) -> None:
        """Nothing is being asked: nothing may be in flight, held or running."""
        names = ("warmroute_in_flight", "warmroute_decoding", "warmroute_buffered_bytes")
        left: dict[str, float] = {}
        deadline = time.monotonic() + REST_SECONDS
        while time.monotonic() < deadline:
            page = await series(self._session, self.url)
            left = {name: total(page, name) for name in names}
            for n, url in enumerate(self._urls):
                page = await series(self._session, url)
                running = total(page, "vllm:num_requests_running") + total(page, "vllm:num_requests_waiting")
                left[f"replica {n}"] = running if page else -1
            if not any(left.values()):
                return
            await asyncio.sleep(0.5)
        self.findings.found(f"not at rest after {REST_SECONDS:g} s: { ({k: v for k, v in left.items() if v}) }")

    def _judge_memory(self) -> None:
        warm_up = self._seconds * WARM_UP_SHARE
        before = [size for at, size in self.resident if warm_up <= at < 1.5 * warm_up]
        after = [size for at, size in self.resident if at >= self._seconds - 0.5 * warm_up]
        if not before or not after:
            return
        say(
            f"router's memory: {max(before) / 2**20:.1f} MiB after the warm-up, {max(after) / 2**20:.1f} MiB at the end"
        )
        if max(after) > max(before) * GROWTH + SLACK_BYTES:
            self.findings.found("the router's memory grows")

    def _judge_log(self) -> None:
        said = self.router.log.read_text(errors="replace")
        if "Traceback" in said or " ERROR " in said:
            at = max(said.find("Traceback"), 0)
            self.findings.found(f"the router's log has an error:\n{said[at : at + 3000]}")
        say(f"router's log: {len(said.splitlines())} lines")


def say(text: str) -> None:
    print(text, flush=True)


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is told")
    parser.add_argument("--logs", default="", help="keep the processes' logs in this directory")
    parser.add_argument("settings", nargs="*", help="of the router, after `--`")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    say(f"seed {seed}, {arguments.seconds:g} s, {REPLICAS} replicas, {CLIENTS} clients")
    with tempfile.TemporaryDirectory(prefix="warmroute-chaos-") as temporary:
        directory = Path(arguments.logs or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as stack:
            chaos = Chaos(seed, arguments.seconds, arguments.settings, directory, stack)
            await chaos.run()
            page = {} if not chaos.router.alive else await series(chaos._session, chaos.url)
    findings = chaos.findings
    say("requests: " + ", ".join(f"{count} {how}" for how, count in findings.endings.most_common()))
    attempts = {key: value for key, value in page.items() if key.startswith("warmroute_attempts_total")}
    endings: dict[str, float] = {}
    for key, value in attempts.items():
        ending = key.partition('ending="')[2].partition('"')[0]
        endings[ending] = endings.get(ending, 0) + value
    say("attempts: " + ", ".join(f"{count:g} {how}" for how, count in sorted(endings.items())))
    for what in findings.wrong:
        say(f"WRONG {what}")
    say(f"seed {seed}: {f'{len(findings.wrong)} things went wrong' if findings.wrong else 'nothing went wrong'}")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
