"""Where events are published, and hearing a publisher over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from router.fleet.subscription import Source, SourceError, Subscription, parse_sources, read_sources
from tests.wire.scripted import until


def page(**ranks: dict[str, object]) -> bytes:
    return json.dumps({name.removeprefix("rank"): config for name, config in ranks.items()}).encode()


def test_every_rank_has_its_source_and_a_wildcard_is_the_replica() -> None:
    told = page(
        rank0={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557",
               "replay_endpoint": "tcp://*:5558", "topic": "kv"},
        rank1={"endpoint": "tcp://10.0.0.7:5558", "replay_endpoint": None},
        rank2={"endpoint": "ipc:///tmp/events"},
        rank3={"enable_kv_cache_events": False, "endpoint": "tcp://*:1"},
        rank4={"publisher": "null", "endpoint": "tcp://*:1"},
    )  # fmt: skip
    assert read_sources(told, "gpu1") == {
        0: Source("tcp://gpu1:5557", "tcp://gpu1:5558"),
        1: Source("tcp://10.0.0.7:5558"),
        2: Source("ipc:///tmp/events"),
    }
    assert read_sources(page(rank0={"endpoint": "tcp://[::]:1"}), "fd00::1") == {0: Source("tcp://[fd00::1]:1")}
    assert read_sources(b"{}", "gpu1") == {}


@pytest.mark.parametrize(
    "told",
    [b"", b"[]", b'{"a": {"endpoint": "tcp://*:1"}}', b'{"0": {}}', b'{"0": {"endpoint": 1}}',
     b'{"0": {"endpoint": "tcp://*:1", "replay_endpoint": 2}}', b'{"0": {"endpoint": "inproc://x"}}'],
)  # fmt: skip
def test_an_answer_that_makes_no_sense(told: bytes) -> None:
    with pytest.raises(SourceError):
        read_sources(told, "gpu1")


def test_configured_sources() -> None:
    assert parse_sources("") == {}
    assert parse_sources("gpu1:8000=tcp://gpu1:5557,tcp://gpu1:5558 gpu2:8000/1=tcp://*:5557") == {
        "gpu1:8000": {0: Source("tcp://gpu1:5557", "tcp://gpu1:5558")},
        "gpu2:8000": {1: Source("tcp://*:5557", None, binds=True)},
    }
    for wrong in ("gpu1", "gpu1=5557", "=tcp://a:1", "a/x=tcp://a:1", "a=tcp://a:1,5", "a=tcp://a:1 a/0=tcp://a:2"):
        with pytest.raises(SourceError):
            parse_sources(wrong)


class Notes:
    """A feed that notes what it is told."""

    def __init__(self) -> None:
        self.wanted = False
        self.holding = False
        self.heard: list[int] = []
        self.told: list[str] = []
        self.failed: list[str] = []
        self.reconnections = 0

    def live(self, number: int, payload: bytes, now: float, wall: float) -> None:
        self.heard.append(number)

    def ask(self) -> int:
        return 7

    def replayed(self, number: int, payload: bytes) -> bool:
        self.told.append(f"{number} {payload.decode()}")
        return True

    def replay_ended(self) -> None:
        self.told.append("end")
        self.wanted = False

    def replay_failed(self, why: str) -> None:
        self.failed.append(why)

    def tick(self, now: float) -> None: ...

    def reconnected(self) -> None:
        self.reconnections += 1


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_is_heard_in_slices(context: zmq.asyncio.Context) -> None:
    publisher = context.socket(zmq.XPUB)
    publisher.set_hwm(0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    notes, lines = Notes(), list[str]()
    subscription = Subscription(context, Source(f"tcp://127.0.0.1:{port}"), notes, lines.append)
    task = asyncio.create_task(subscription.run())
    assert await publisher.recv() == b"\x01"  # subscribed to all topics
    turns = 0
    for number in range(5000):
        await publisher.send_multipart([b"topic", number.to_bytes(8, "big"), bytes(2000)])
    await publisher.send_multipart([b"malformed"])
    await publisher.send_multipart([b"topic", b"short", b""])
    async with asyncio.timeout(60):
        while len(notes.heard) < 5000:
            turns += 1
            await asyncio.sleep(0)
    assert notes.heard == list(range(5000))
    assert turns > 1, "others had their turn in between"
    assert subscription.settled.is_set()
    assert lines == ["connected"]
    assert notes.reconnections == 1
    publisher.close(linger=0)
    await until(lambda: lines == ["connected", "connection lost"], "its end is told once")
    await end(task)


async def test_a_replay_is_asked_for_as_vllm_wants_it(context: zmq.asyncio.Context) -> None:
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    notes = Notes()
    source = Source("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}")
    task = asyncio.create_task(Subscription(context, source, notes, lambda _line: None).run())
    client, empty, start = await server.recv_multipart()
    assert (empty, start) == (b"", (7).to_bytes(8, "big"))
    for number in (7, 8):
        await server.send_multipart([client, b"", b"topic", number.to_bytes(8, "big"), b"payload"])
    await server.send_multipart([client, b"", b"", b"\xff" * 8, b""])
    await until(lambda: len(notes.told) == 3, "the replay has ended")
    assert notes.told == ["7 payload", "8 payload", "end"]
    await end(task)


async def test_a_replay_that_nobody_answers(context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.subscription.REPLAY_SECONDS", 0.05)
    notes = Notes()
    source = Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    subscription = Subscription(context, source, notes, lambda _line: None)
    task = asyncio.create_task(subscription.run())
    await until(lambda: bool(notes.failed), "it is given up")
    assert notes.failed[0] == "tcp://127.0.0.1:2: no answer"
    await asyncio.wait_for(subscription.settled.wait(), 60)
    await end(task)


async def test_an_endpoint_that_is_none_is_told(context: zmq.asyncio.Context) -> None:
    lines: list[str] = []
    subscription = Subscription(context, Source("tcp://nowhere"), Notes(), lines.append)
    await asyncio.wait_for(subscription.run(), 60)
    assert lines[0].startswith("cannot be heard at tcp://nowhere: ")
    assert subscription.settled.is_set()
