"""KV events on the wire."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from fake_backend import kv_events
from fake_backend.naming import Namer
from fake_backend.pool import BlockPool, Cleared, Removed, Stored
from fake_backend.request import Request
from tests.fake_backend.raw import ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fake_backend.server import Server

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).resolve().parents[1] / "data" / "vllm" / "kv_events.jsonl").read_text().splitlines()
]
FLAGS = ("--block-size", "32", "--max-model-len", "512", "--num-gpu-blocks-override", "24")


def events_flag(**more: object) -> tuple[str, str]:
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"}
    return "--kv-events-config", json.dumps(config | more)


@pytest.fixture
async def subscribe() -> AsyncIterator[Callable[[str], Awaitable[zmq.asyncio.Socket]]]:
    context = zmq.asyncio.Context()

    async def to(endpoint: str) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.XSUB)
        socket.connect(endpoint)
        await socket.send(b"\x01")  # subscribe to everything
        return socket

    yield to
    context.destroy(linger=0)


async def sources(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ask(server.port, "GET", "/kv_event_sources")).body)
    return found


async def complete(server: Server, prompt: list[int], **more: object) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    assert (await ask(server.port, "POST", "/v1/completions", json.dumps(body).encode())).status == 200


async def heard(server: Server, socket: zmq.asyncio.Socket) -> None:
    """A subscription takes effect when the publisher has read it: publish until it is heard, then drop what came."""
    number = 0
    while not await socket.poll(20):
        number += 1
        await complete(server, [4000 - number] * 40)
    while await socket.poll(50):
        await socket.recv_multipart()


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor"])
def test_the_bytes_are_those_that_vllm_sent(algorithm: str) -> None:
    batch = next(b for b in RECORDED if b["algorithm"] == algorithm and "payload" in b)
    (event,) = batch["events"]
    namer = Namer(algorithm, 32, batch["seed"])
    names = namer.names(event["token_ids"])
    request = Request("r", 96, 1, names.keys)
    content = kv_events.Content(event["token_ids"], names.digests)
    describer = kv_events.Describer(kv_events.Encoding(32), lambda _request: content)
    payload = kv_events.Encoding(32).payload(describer.describe(Stored(request, 0, 3)), 0.0, 0)
    theirs = bytes.fromhex(batch["payload"])
    assert payload[10:] == theirs[10:]  # array of 3, and a time in 9 bytes
    assert (payload[:2], theirs[:2]) == (b"\x93\xcb", b"\x93\xcb")


def test_removed_and_cleared_are_written_as_vllm_writes_them() -> None:
    describer = kv_events.Describer(kv_events.Encoding(32), lambda _request: kv_events.Content([], []))
    recorded = [event for batch in RECORDED for event in batch["events"]]
    removed = next(event for event in recorded if event["type"] == "BlockRemoved")
    assert describer.describe(Removed(removed["block_hashes"][0])) == [removed]
    assert describer.describe(Cleared())[0] in recorded


def test_whole_hashes() -> None:
    names = Namer("sha256_cbor", 4, "0").names(list(range(12)))
    request = Request("r", 12, 1, names.keys)
    encoding = kv_events.Encoding(4, whole_hashes=True)
    describer = kv_events.Describer(encoding, lambda _request: kv_events.Content(list(range(12)), names.digests))
    (stored,) = describer.describe(Stored(request, 1, 3))
    assert stored["block_hashes"] == names.digests[1:]
    assert stored["parent_block_hash"] == names.digests[0]
    assert len(names.digests[0]) == 32
    assert describer.describe(Removed(names.keys[2]))[0]["block_hashes"] == [names.digests[2]]
    assert int.from_bytes(names.digests[2][-8:], "big") == names.keys[2]


def test_old_versions_write_arrays() -> None:
    names = Namer("sha256", 4).names(list(range(4)))
    request = Request("r", 4, 1, names.keys)
    encoding = kv_events.Encoding(4, as_maps=False)
    describer = kv_events.Describer(encoding, lambda _request: kv_events.Content([0, 1, 2, 3], names.digests))
    payload = encoding.payload(describer.describe(Stored(request, 0, 1)) + describer.describe(Cleared()), 1.5, 2)
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", names.keys, None, [0, 1, 2, 3], 4, None, "GPU", None, [None], 0, "full_attention", None],
            ["AllBlocksCleared"],
        ],
        2,
    ]


async def test_frames_and_their_numbers(
    start: Callable[..., Awaitable[Server]], subscribe: Callable[[str], Awaitable[zmq.asyncio.Socket]]
) -> None:
    server = await start(*FLAGS, *events_flag())
    described = (await sources(server))["0"]
    assert list(described) == [
        "enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size",
        "topic",
    ]  # fmt: skip
    socket = await subscribe(described["endpoint"])
    await heard(server, socket)
    await complete(server, list(range(100, 170)), cache_salt="tenant-A")
    topic, first, payload = await socket.recv_multipart()
    _timestamp, (event,), rank = msgspec.msgpack.decode(payload)
    assert (topic, len(first), rank) == (b"kv", 8, 0)
    assert event["extra_keys"] == [["tenant-A"], None]
    await complete(server, list(range(200, 270)))
    _topic, second, _payload = await socket.recv_multipart()
    assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1


async def test_each_rank_has_its_own_port(start: Callable[..., Awaitable[Server]], unused_ports: int) -> None:
    base = unused_ports
    server = await start("--data-parallel-size", "2", *events_flag(endpoint=f"tcp://*:{base}", replay_endpoint=None))
    described = await sources(server)
    assert [described[rank]["endpoint"] for rank in ("0", "1")] == [f"tcp://*:{base}", f"tcp://*:{base + 1}"]


@pytest.fixture
def unused_ports() -> int:
    """The first of two free ports in a row."""
    import socket

    while True:
        with socket.create_server(("", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                with socket.create_server(("", port + 1)):
                    return port
            except OSError:
                continue


async def test_a_taken_port_is_an_error(start: Callable[..., Awaitable[Server]], unused_ports: int) -> None:
    await start(*events_flag(endpoint=f"tcp://*:{unused_ports}"))
    with pytest.raises(OSError, match="KV events cannot be published"):
        await start(*events_flag(endpoint=f"tcp://*:{unused_ports}"))


async def test_faults_of_events(
    start: Callable[..., Awaitable[Server]], subscribe: Callable[[str], Awaitable[zmq.asyncio.Socket]]
) -> None:
    server = await start(*FLAGS, *events_flag())
    socket = await subscribe((await sources(server))["0"]["endpoint"])
    await heard(server, socket)
    base = server.replica.ranks[0].publisher.published
    fresh = itertools.count(500)

    async def numbers(kind: str, count: int) -> list[int]:
        rule = json.dumps({"kind": kind, "times": 1}).encode()
        await ask(server.port, "POST", "/fake/faults", rule)
        for _ in range(2):
            await complete(server, [next(fresh)] * 40)
        got = [await asyncio.wait_for(socket.recv_multipart(), 60) for _ in range(count)]
        return [int.from_bytes(frames[1], "big") - base for frames in got]

    assert await numbers("events_lost", 1) == [1]
    assert await numbers("events_repeated", 3) == [2, 2, 3]
    assert await numbers("events_reordered", 2) == [5, 4]


async def test_a_reset_is_told_with_the_next_step(
    start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch,
    subscribe: Callable[[str], Awaitable[zmq.asyncio.Socket]],
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    server = await start(*FLAGS, *events_flag())
    socket = await subscribe((await sources(server))["0"]["endpoint"])
    await heard(server, socket)
    assert (await ask(server.port, "POST", "/reset_prefix_cache")).body == b'{"success":true}'
    assert not await socket.poll(50)
    await complete(server, list(range(100, 140)))
    _topic, _number, payload = await socket.recv_multipart()
    assert [event["type"] for event in msgspec.msgpack.decode(payload)[1]] == ["AllBlocksCleared", "BlockStored"]


def test_pools_record_only_when_asked() -> None:
    pool = BlockPool(4)
    request = Request("r", 4, 1, [1])
    request.blocks = pool.allocate(1)
    pool.register(request, 1)
    assert pool.events == []


async def test_a_restart_numbers_from_0_at_the_same_endpoint(
    start: Callable[..., Awaitable[Server]], unused_ports: int
) -> None:
    endpoint = f"tcp://*:{unused_ports}"
    server = await start(*FLAGS, *events_flag(endpoint=endpoint, replay_endpoint=f"tcp://*:{unused_ports + 1}"))
    for first in (100, 200, 300):
        await complete(server, list(range(first, first + 40)))
    publisher = server.replica.ranks[0].publisher
    assert publisher is not None
    assert publisher.published == 3
    await server.restart()
    assert (await sources(server))["0"]["endpoint"] == endpoint
    again = server.replica.ranks[0].publisher
    assert again is not None
    assert again.published == 0
    await complete(server, list(range(100, 140)))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{unused_ports + 1}")
    await socket.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = [int.from_bytes((await socket.recv_multipart())[2], "big", signed=True) for _ in range(2)]
    context.destroy(linger=0)
    assert numbers == [0, -1]
