"""300 requests that real vLLM answered with a pool of 40 blocks, played to the fake: the same hits, the same events.

tests/real_vllm/engine_sequence.py makes the record.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from tests.fake_backend.raw import ask
from tests.real_vllm import engine_sequence

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from fake_backend.server import Server

RECORDED = engine_sequence.RECORD.read_text()
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}


async def replay(server: Server) -> list[list[str]]:
    """Every batch of events that the replica remembers."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.replica.ranks[0].publisher.config["replay_endpoint"])
    await socket.send_multipart([b"", (0).to_bytes(8, "big")])
    batches: list[list[str]] = []
    while True:
        *_topic, number, payload = await socket.recv_multipart()
        sequence = int.from_bytes(number, "big", signed=True)
        if sequence < 0:
            break
        assert sequence == len(batches)
        batches.append([engine_sequence.line(event) for event in msgspec.msgpack.decode(payload)[1]])
    context.destroy(linger=0)
    return batches


async def test_every_hit_and_every_event(
    start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = json.loads(RECORDED)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    server = await start(
        *engine_sequence.FLAGS, "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(EVENTS),
    )  # fmt: skip
    turns = engine_sequence.unpack(recorded)
    assert len(turns) == 300
    for number, turn in enumerate(turns):
        answer = await ask(server.port, "POST", "/v1/completions", json.dumps(turn.body(turn.answer)).encode())
        got = json.loads(answer.body)
        assert got["choices"][0]["token_ids"] == turn.answer, f"request {number}"
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == turn.cached, f"request {number}"
    metrics = (await ask(server.port, "GET", "/metrics")).body.decode()
    counters = {
        name: int(float(re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)[0]))
        for name in recorded["counters"]
    }
    assert counters == recorded["counters"]
    ours, theirs = await replay(server), recorded["events"]
    assert sum(len(batch) for batch in theirs) > 1000
    flat = [event for batch in ours for event in batch]
    assert flat == [event for batch in theirs for event in batch]
    assert ours == theirs
