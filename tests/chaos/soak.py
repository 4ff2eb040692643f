"""Hundreds of streams at once for an hour: what the router's memory does.

    python -m tests.chaos.soak --seconds 3600 --streams 500

The replicas here are a small server of their own, in one process: they only have to stream, slowly, and need little of
the machine. Every prompt is new; when a stream ends, the next one begins. Some clients leave midway. Status 1 where
memory grows by more than 5 % after the warm-up, an answer is not whole or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bench.processes import free_ports
from tests.chaos.processes import Child, series, total

REPLICAS = 4
GROWTH = 1.05
WARM_UP_SECONDS = 240.0
LEAVING = 0.03
STEP_SECONDS = 1.0
TOKENS = (20, 60)
POOL_BLOCKS = 2000
ROUTER = (
    # Full within the warm-up, as the pools are: what grows after that leaks.
    *("--prompt-memory-bytes", str(2**20), "--admin-port", "-1"),
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


# -- replicas that only stream ----------------------------------------------------------------------------------------


class Streaming(asyncio.Protocol):
    """One connection. Answers probes at once, and any POST with as many events as it asks for, one a second."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._data = b""
        assert self._transport is not None
        if head.startswith(b"POST"):
            self._left = json.loads(body)["max_tokens"]
            self._transport.write(HEAD)
            self._step()
        elif head.startswith(b"GET /metrics"):
            self._say(
                b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%d"} 1\n'
                b"process_start_time_seconds 1.0\n" % POOL_BLOCKS
            )
        elif head.startswith(b"GET /v1/models"):
            self._say(b'{"object":"list","data":[{"id":"m","object":"model","root":"m","max_model_len":8192}]}')
        else:
            self._say(b"{}", b"404 Not Found")

    def _say(self, body: bytes, status: bytes = b"200 OK") -> None:
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    def _step(self) -> None:
        assert self._transport is not None
        if self._left:
            event = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._left -= 1
            self._timer = asyncio.get_running_loop().call_later(STEP_SECONDS, self._step)
        else:
            last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
            self._transport.write(b"%x\r\n%s\r\n" % (len(last), last) + END)


async def replicas(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Streaming, "127.0.0.1", port, backlog=1024) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


# -- clients ----------------------------------------------------------------------------------------------------------


class Clients:
    """So many streams at any time, each on a connection that it keeps."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self.stopping = False
        self.whole = 0
        self.left = 0
        self.wrong: list[str] = []

    async def one(self, number: int) -> None:
        await asyncio.sleep(self._rng.random() * TOKENS[1] * STEP_SECONDS / 2)
        while not self.stopping:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as error:
                self.wrong.append(repr(error))
                return
            try:
                while not self.stopping and await self._stream(reader, writer):
                    pass
            except (asyncio.IncompleteReadError, OSError) as error:
                self.wrong.append(repr(error))
            finally:
                writer.close()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One answer; False where it was left, and the connection with it."""
        tokens = self._rng.randint(*TOKENS)
        leave_after = self._rng.randint(0, tokens) if self._rng.random() < LEAVING else None
        text = f"Question {next(self._numbers)}: " + "word " * self._rng.randint(10, 800)
        body = json.dumps(
            {"model": "m", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
        ).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            self.wrong.append(head.decode("latin-1").partition("\r\n")[0])
            return False
        events = 0
        while size := int(await reader.readuntil(b"\r\n"), 16):
            events += (await reader.readexactly(size + 2)).count(b'" word"')
            if events == leave_after:
                self.left += 1
                return False
        await reader.readexactly(2)
        if events != tokens:
            self.wrong.append(f"{events} events of {tokens}")
        self.whole += 1
        return True


# -- the run ----------------------------------------------------------------------------------------------------------


async def soak(seconds: float, streams: int, seed: int, directory: Path) -> list[str]:
    *ports, front = free_ports(REPLICAS + 1)
    url = f"http://127.0.0.1:{front}"
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=30)
            )
        )
        named = [f"http://127.0.0.1:{port}" for port in ports]
        await stack.enter_async_context(
            Child(("tests.chaos.soak", "--serve", *map(str, ports)), directory / "replicas.log")
        )
        flags = ("serve", *named, "--port", str(front), *ROUTER)
        router = await stack.enter_async_context(Child(("router", *flags), directory / "router.log"))
        await router.answers(session, f"{url}/ready")
        clients = Clients(front, seed)
        running = [asyncio.create_task(clients.one(number)) for number in range(streams)]
        begun, warm_up = time.monotonic(), min(WARM_UP_SECONDS, seconds / 2)
        warm = most = 0
        told = 0.0
        while (at := time.monotonic() - begun) < seconds and router.alive:
            await asyncio.sleep(1.0)
            size = router.resident_bytes()
            if at < warm_up:
                warm = max(warm, size)
            else:
                most = max(most, size)
            if at - told >= 60:
                told = at
                done = f"{clients.whole} whole, {clients.left} left"
                say(f"{at:6.0f} s  {size / 2**20:.1f} MiB, {done}, {router.cpu_seconds():.0f} s of CPU")
        clients.stopping = True
        await asyncio.gather(*running)
        wrong = clients.wrong[:20]
        if not router.alive:
            wrong.append("the router has ended")
            return wrong
        await asyncio.sleep(2.0)
        page = await series(session, url)
        for name in ("warmroute_in_flight", "warmroute_decoding", "warmroute_buffered_bytes"):
            if left := total(page, name):
                wrong.append(f"{name} is {left:g} at rest")
        growth = most / warm - 1
        say(f"{clients.whole} answers whole, {clients.left} left; memory {warm / 2**20:.1f} MiB at most in the first "
            f"{warm_up:.0f} s, {most / 2**20:.1f} MiB after them: {growth:+.1%}")  # fmt: skip
        if most > warm * GROWTH:
            wrong.append(f"memory grew by {growth:.1%}")
        if "Traceback" in (said := (directory / "router.log").read_text(errors="replace")):
            wrong.append(said[said.find("Traceback") :][:2000])
        return wrong


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(replicas(arguments.serve))
        return 0
    with tempfile.TemporaryDirectory(prefix="warmroute-soak-") as directory:
        wrong = asyncio.run(soak(arguments.seconds, arguments.streams, arguments.seed, Path(directory)))
    for what in wrong:
        say(f"WRONG {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
