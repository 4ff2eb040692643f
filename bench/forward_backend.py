"""A replica that answers at once, with fixed bytes: what is measured is the router before it, not an engine.

`python -m bench.forward_backend PORT` answers what routers ask of vLLM (/health, /v1/models, /metrics, /version,
render) and every POST. The word in a body's `user` field chooses the answer: PACED streams an event every PACE_SECONDS
until the client leaves, IDLE one event and then nothing, FLOOD as many as are taken; any other body gets one JSON
object.
"""

from __future__ import annotations

import asyncio
import re
import sys
from random import Random
from typing import TYPE_CHECKING, cast

import orjson
import uvloop

from bench.overhead_decision import TINY
from bench.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "m"
PACED, IDLE, FLOOD = "bench-paced", "bench-idle", "bench-flood"
PACE_SECONDS = 0.02
# One token of an answer takes about as many bytes of a body as this, for engines that are asked for a prompt's tokens.
BYTES_PER_TOKEN = 4
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_FLOOD_EVENTS = 256

_CARD = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": str(TINY), "parent": None, "max_model_len": 262144}
_METRICS = b"""\
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="60000",\
prefix_caching_hash_algo="sha256"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""
_ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Certainly. Here is what you asked for, in one line."},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 700, "total_tokens": 712, "completion_tokens": 12},
    }
)
_EVENT = (
    b"data: "
    + orjson.dumps(
        {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
        }
    )
    + b"\n\n"
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _whole(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return (
        b"HTTP/1.1 %b\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-length: %d\r\ncontent-type: %b\r\n\r\n%b" % (status, len(body), kind, body)
    )


_SCORED = orjson.dumps(
    {
        "id": "score-0123456789abcdef",
        "object": "list",
        "created": 1,
        "model": MODEL,
        "data": [{"index": i, "object": "score", "score": 0.9 - i / 10} for i in range(6)],
        "usage": {"prompt_tokens": 250, "total_tokens": 250, "completion_tokens": 0, "prompt_tokens_details": None},
    }
)
_POSTED = _whole(_ANSWER)
_ANSWERS = {b"/v1/score": _whole(_SCORED)}
_ASKED = {
    b"/health": _whole(b""),
    b"/v1/models": _whole(orjson.dumps({"object": "list", "data": [_CARD]})),
    b"/metrics": _whole(_METRICS, b"text/plain; version=0.0.4; charset=utf-8"),
    b"/version": _whole(b'{"version":"0.31.0"}'),
}
_UNKNOWN = _whole(b'{"detail":"Not Found"}', status=b"404 Not Found")
_RENDERED = (b"/v1/chat/completions/render", b"/tokenize")


class Replica(asyncio.Protocol):
    """One connection. Requests come whole or in pieces, one after the other, their bodies of a known length."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._body_at = 0
        self._end = 0
        self._due = 0.0
        self._next: asyncio.TimerHandle | None = None
        self._paused = self._flooding = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._next is not None:
            self._next.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._flooding:
            self._flood()

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while self._transport is not None and self._pending:
            if not self._end:
                at = self._pending.find(b"\r\n\r\n")
                if at < 0:
                    return
                found = _LENGTH.search(self._pending, 0, at + 2)
                self._body_at = at + 4
                self._end = self._body_at + (int(found.group(1)) if found else 0)
            if len(self._pending) < self._end:
                return
            request = bytes(self._pending[: self._end])
            del self._pending[: self._end]
            body_at, self._body_at, self._end = self._body_at, 0, 0
            self._answer(request, body_at)

    def _answer(self, request: bytes, body_at: int) -> None:
        assert self._transport is not None
        method, target, _ = request.split(b" ", 2)
        if method == b"POST":
            if target in _RENDERED:
                ids = list(range((len(request) - body_at) // BYTES_PER_TOKEN))
                self._transport.write(_whole(orjson.dumps({"token_ids": ids, "tokens": ids, "count": len(ids)})))
            elif (at := request.find(b'"bench-', body_at)) >= 0:
                self._stream(request[at + 1 : request.index(b'"', at + 1)].decode())
            else:
                self._transport.write(_ANSWERS.get(target, _POSTED))
        elif method in (b"GET", b"HEAD"):
            self._transport.write(_ASKED.get(target, _UNKNOWN))
        else:
            self._transport.close()  # a preface of another protocol, perhaps

    def _stream(self, kind: str) -> None:
        assert self._transport is not None
        self._transport.write(_STREAM_HEAD + _CHUNK)
        if kind == PACED:
            # Each at its own moment: engines' steps differ, and so do the tokens of many replicas.
            self._due = self._loop.time() + PACE_SECONDS * self._chance.random()
            self._next = self._loop.call_at(self._due, self._beat)
        elif kind == FLOOD:
            self._flooding = True
            self._flood()

    def _beat(self) -> None:
        if self._transport is not None:
            self._transport.write(_CHUNK)
            self._due += PACE_SECONDS
            self._next = self._loop.call_at(self._due, self._beat)

    def _flood(self) -> None:
        while not self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.write(_CHUNK * _FLOOD_EVENTS)


async def serve(port: int) -> None:
    chance = Random(port)
    make: Callable[[], Replica] = lambda: Replica(chance)  # noqa: E731
    server = await asyncio.get_running_loop().create_server(make, HOST, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
