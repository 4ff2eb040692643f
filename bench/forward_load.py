"""Load for routers: wrk for whole answers, connections of our own for streams. What load costs is not counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import aiohttp

from bench.forward_backend import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

CHAT = "/v1/chat/completions"
PLAIN = "/v1/score"
EMBEDDINGS = "/v1/embeddings"

# Takes the parts of a body from files, puts a number between each two of them, and says at the end what was done.
_LUA = """
local parts, n, seed = {}, 0, 0
function init(args)
  for i = 3, #args do
    local f = io.open(args[i], "rb")
    parts[#parts + 1] = f:read("*a")
    f:close()
  end
  path, seed = args[1], tonumber(args[2])
end
function request()
  n = n + 1
  local body = parts[1]
  if #parts == 3 then
    body = body .. string.format("%08d", n % 8) .. parts[2] .. string.format("%08d", seed + n) .. parts[3]
  elseif #parts == 2 then
    body = body .. string.format("%08d", seed + n) .. parts[2]
  end
  return wrk.format("POST", path, {["Content-Type"] = "application/json", ["User-Agent"] = "bench"}, body)
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\n{"requests": %d, "failed": %d, "p50_us": %d, "microseconds": %d}\\n', summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), summary.duration))
end
"""

CONVERSATIONS = 8
# Words that the stand-in's small vocabulary knows whole, so that a token is about 4 bytes, as real ones are.
_WORDS = (
    *("about", "again", "and", "because", "before", "between", "by", "call", "change", "could", "different"),
    *("each", "even", "every", "example", "in", "is", "of", "the", "to"),
)


@dataclass(frozen=True, slots=True)
class Body:
    """A POST whose body changes from one to the next where its `parts` meet."""

    path: str
    parts: tuple[bytes, ...]
    earlier: tuple[bytes, ...] = ()
    """What is sent once beforehand: the turns of the conversations that the others go on with."""


@dataclass(frozen=True, slots=True)
class Run:
    """What wrk did in one run. `p50_us` is the median time of a request."""

    requests: int
    failed: int
    p50_us: float


class LoadError(ValueError):
    """The load could not be run, or not all of it was answered."""


def prose(chance: Random, size: int) -> str:
    """About `size` bytes of words."""
    words: list[str] = []
    length = 0
    while length < size:
        word = chance.choice(_WORDS) if chance.random() < 0.97 else str(chance.randrange(10_000))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def bodies(seed: int) -> dict[str, Body]:
    """The workloads by name. `#` in a body's text is where a number comes in."""
    chance = Random(seed)

    def chat(messages: Sequence[tuple[str, str]]) -> bytes:
        said = [{"role": role, "content": content} for role, content in messages]
        return json.dumps({"messages": said, "model": MODEL, "max_tokens": 64}, separators=(",", ":")).encode()

    def conversation(size: int, messages: int) -> Body:
        """The next turns of CONVERSATIONS that were sent before: an answer and a new question, each time another."""
        each = (size - 400) // (messages - 1)
        texts = [prose(chance, each) for _ in range(messages - 1)]
        said = [("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)]
        said[0] = ("user", f"# {texts[0]}")
        said[-1] = ("assistant", texts[-1][:200])
        before = chat(said[:-1])
        earlier = tuple(before.replace(b"#", b"%08d" % number) for number in range(CONVERSATIONS))
        return Body(CHAT, tuple(chat([*said, ("user", f"# {prose(chance, 200)}")]).split(b"#")), earlier)

    documents = [prose(chance, 150) for _ in range(6)]
    score = {"model": MODEL, "text_1": "what does a cache hold", "text_2": documents}
    embed = {"model": MODEL, "input": f"# {prose(chance, 950)}"}
    short = chat([("system", prose(chance, 2_500)), ("user", f"# {prose(chance, 350)}")])
    return {
        "plain": Body(PLAIN, (json.dumps(score, separators=(",", ":")).encode(),)),
        "embed": Body(EMBEDDINGS, tuple(json.dumps(embed, separators=(",", ":")).encode().split(b"#"))),
        "short": Body(CHAT, tuple(short.split(b"#"))),
        "chat": conversation(100_000, 51),
        "long": conversation(400_000, 51),
    }


class Wrk:
    """Runs wrk with the workloads' bodies."""

    def __init__(self, directory: Path, workloads: dict[str, Body]) -> None:
        """Raises LoadError where wrk is not installed."""
        if shutil.which("wrk") is None:
            raise LoadError("wrk is not installed (apt-get install wrk)")
        self._script = directory / "load.lua"
        self._script.write_text(_LUA)
        self._arguments: dict[str, list[str]] = {}
        for name, body in workloads.items():
            files = [directory / f"{name}-{number}" for number in range(len(body.parts))]
            for file, part in zip(files, body.parts, strict=True):
                file.write_bytes(part)
            self._arguments[name] = [str(file) for file in files]
        self._workloads = workloads
        self._begin = 0

    async def prepare(self, url: str, name: str) -> None:
        """Send what the workload goes on with."""
        body = self._workloads[name]
        async with aiohttp.ClientSession() as session:
            for earlier in body.earlier:
                headers = {"Content-Type": "application/json"}
                async with session.post(url + body.path, data=earlier, headers=headers) as answer:
                    await answer.read()

    async def run(self, url: str, name: str, *, connections: int, seconds: int) -> Run:
        """Load `url` for some time. No two runs send the same numbers."""
        self._begin += 1_000_000
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(self._script), url]
        command += ["--", self._workloads[name].path, str(self._begin % 90_000_000), *self._arguments[name]]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, complaint = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode:
            raise LoadError(f"wrk failed: {complaint.decode(errors='replace').strip()}")
        found = json.loads(output.decode().strip().splitlines()[-1])
        return Run(found["requests"], found["failed"], float(found["p50_us"]))


def _where(url: str) -> tuple[str, int]:
    found = urlsplit(url)
    return found.hostname or "", found.port or 80


def stream_request(url: str, kind: str) -> bytes:
    """A streamed chat whose answer is of a kind that the replica knows."""
    whole = {
        "messages": [{"role": "user", "content": "Tell me."}],
        "model": MODEL,
        "stream": True,
        "max_tokens": 100_000,
        "user": kind,
    }
    body = json.dumps(whole, separators=(",", ":")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


class _Stream(asyncio.Protocol):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.transport: asyncio.Transport | None = None
        self.begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"data: ")
        self._streams.events += events
        if events and not self.begun:
            self.begun = True
            self._streams.begun += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.ended += 1


class Streams:
    """Many streams through one router, open at one time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: list[_Stream] = []
        self.events = self.begun = self.ended = 0

    async def open(self, count: int, kind: str, *, at_once: int = 64, seconds: float = 60.0) -> int:
        """Open up to `count`; returns how many have begun within the time."""
        loop = asyncio.get_running_loop()
        host, port = _where(self._url)
        request = stream_request(self._url, kind)
        deadline = loop.time() + seconds
        while len(self._open) < count and loop.time() < deadline:
            for _ in range(min(at_once, count - len(self._open))):
                _, stream = await loop.create_connection(lambda: _Stream(self), host, port)
                assert stream.transport is not None
                stream.transport.write(request)
                self._open.append(stream)
            while self.begun + self.ended < len(self._open) and loop.time() < deadline:  # noqa: ASYNC110 - counted by many
                await asyncio.sleep(0.005)
        return self.begun - self.ended

    async def close(self) -> None:
        for stream in self._open:
            if stream.transport is not None:
                stream.transport.abort()
        while self.ended < len(self._open):  # noqa: ASYNC110 - counted by many
            await asyncio.sleep(0.01)
        self._open.clear()


@contextlib.contextmanager
def stalled(url: str, kind: str) -> Iterator[None]:
    """A client that asks for a stream and reads nothing of it."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(_where(url))
        client.sendall(stream_request(url, kind))
        yield
