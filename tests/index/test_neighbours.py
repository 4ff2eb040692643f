"""Workers of one router tell each other what they sent where and what they have in flight."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import uvloop

from router.app import Router
from router.index import neighbours as module
from router.index.memory import Match
from router.index.neighbours import MAX_MESSAGE_BYTES, Neighbours
from router.index.news import Load, News, Record, encoded
from router.index.shared import Busy
from router.index.shared_codec import Others
from router.worker import Place
from tests.wire.conftest import settings_for
from tests.wire.scripted import CHAT, Raw, Scripted, until

KEYS = [2**64 - 1, 2, 3, 4]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


class Worker:
    def __init__(self, directory: Path, number: int, workers: int = 2) -> None:
        self.busy: list[Busy] = []
        self.heard: Mapping[str, Others] = {}
        self.neighbours = Neighbours(
            directory, number, workers, loads=lambda _: self.busy, heard=lambda others: setattr(self, "heard", others)
        )
        self.index = self.neighbours.index
        self.index.size("gpu1", 100)

    async def joined(self, count: int) -> Worker:
        await until(lambda: len(self.neighbours._links) == count, "the neighbours are reached")
        return self


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    # A unix socket's path is short by law of the kernel.
    with tempfile.TemporaryDirectory(prefix="wr-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def started(stack: AsyncExitStack, *workers: Worker) -> None:
    for worker in workers:
        await worker.neighbours.start()
        stack.push_async_callback(worker.neighbours.stop)
    for worker in workers:
        await worker.joined(len(workers) - 1)


async def test_what_one_records_and_forgets_all_do(directory: Path, stack: AsyncExitStack) -> None:
    workers = [Worker(directory, number, 3) for number in (1, 2, 3)]
    await started(stack, *workers)
    first, *others = workers
    first.index.record("gpu1", KEYS, ended=True, prompt_blocks=3, now=1.0)
    for other in others:
        await until(lambda other=other: other.index.match("gpu1", KEYS).depth == 4, "it knows too")  # type: ignore[misc]
        assert other.index.match("gpu1", KEYS) == Match(4, True)
    others[0].index.record("gpu1", [7, 8], now=2.0, until=3.0)
    await until(lambda: first.index.match("gpu1", [7, 8]).depth == 2, "the first one knows")
    others[0].index.forget("gpu1", [8])
    await until(lambda: first.index.match("gpu1", [7, 8]).depth == 1, "and that it was taken back")
    # Nobody tells on what he was told.
    assert all(worker.neighbours._records == [] for worker in workers)
    # Of a replica that one of them does not know yet, or no more, nothing is kept.
    first.index.record("gpu2", KEYS)
    first.index.record("gpu1", [9])
    await until(lambda: others[1].index.match("gpu1", [9]).depth == 1, "the later one has come")
    assert "gpu2" not in others[1].index


async def test_loads_are_told_age_and_end_with_their_worker(
    directory: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = workers = [Worker(directory, number, 3) for number in (1, 2, 3)]
    told_at = now = asyncio.get_running_loop().time()
    monkeypatch.setattr(three.neighbours, "_clock", lambda: now)
    await started(stack, *workers)
    one.busy = [Busy("gpu1", Others(3, 1, 500.0, 1e4), 200.0)]
    two.busy = [Busy("gpu1", Others(1, 0, 80.0, 1e3), 0.0)]
    for worker in (one, two):
        worker.neighbours.load_changed()
    await until(lambda: three.heard.get("gpu1", Others()).in_flight == 4, "both are heard")
    outside = await three.neighbours.consult([])
    assert outside.matches == {}
    seen = outside.loads["gpu1"]
    assert (seen.in_flight, seen.decoding, seen.waiting_ms, seen.routed) == (4, 1, 580.0, 11_000.0)
    now = told_at + 1.0
    assert three.neighbours.elsewhere()["gpu1"].waiting_ms == 380.0  # up to 200 pass by themselves
    now = told_at + module.LEASE_SECONDS + 1
    assert three.neighbours.elsewhere() == {}
    monkeypatch.setattr(three.neighbours, "_clock", asyncio.get_running_loop().time)
    await two.neighbours.stop()
    await until(
        lambda: three.neighbours.elsewhere().get("gpu1", Others()).in_flight == 3,
        "the one that ended has nothing there",
    )


async def test_one_that_is_started_again_is_reached_again(directory: Path, stack: AsyncExitStack) -> None:
    one, two = Worker(directory, 1), Worker(directory, 2)
    await started(stack, one, two)
    await two.neighbours.stop()
    await until(lambda: not one.neighbours._links, "it is gone")
    one.index.record("gpu1", [1])  # told to nobody
    again = Worker(directory, 2)
    await again.neighbours.start()
    stack.push_async_callback(again.neighbours.stop)
    await one.joined(1)
    one.index.record("gpu1", [2])
    await until(lambda: again.index.match("gpu1", [2]).depth == 1, "it is told again")
    assert again.index.match("gpu1", [1]).depth == 0


async def test_one_that_does_not_read_costs_no_memory_without_bound(
    directory: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 100_000)
    one, two = Worker(directory, 1), Worker(directory, 2)
    await started(stack, one, two)
    for reader in two.neighbours._readers:
        reader.transport.pause_reading()  # type: ignore[attr-defined]
    keys = list(range(20_000))
    while not one.neighbours.untold:
        keys = [key + len(keys) for key in keys]  # what it knows is not told again
        one.index.record("gpu1", keys)
        one.neighbours._tell()
    (link,) = one.neighbours._links.values()
    assert link.get_write_buffer_size() < 100_000 + 2 * 8 * len(keys)


async def test_an_answer_is_told_whole_to_who_does_not_know_its_prompt(
    directory: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, other = KEYS[:2], list(range(100, 150))
    one, two, three = (Worker(directory, number, 3) for number in (1, 2, 3))
    for worker in (one, two):
        await worker.neighbours.start()
        stack.push_async_callback(worker.neighbours.stop)
    await one.joined(1)
    one.index.record("gpu1", prompt)
    await until(lambda: two.index.match("gpu1", prompt).depth == 2, "the prompt is told")
    await three.neighbours.start()
    stack.push_async_callback(three.neighbours.stop)
    await one.joined(2)
    one.index.record("gpu1", KEYS, ended=True, prompt_blocks=2)
    for worker in (two, three):
        await until(lambda worker=worker: worker.index.match("gpu1", KEYS).depth == 4, "it knows all")  # type: ignore[misc]

    one.index.record("gpu1", [7, 8])
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_UNREAD_BYTES", -1)
        one.index.record("gpu1", other)
        await until(lambda: one.neighbours.untold > 0, "nobody is told")
    one.index.record("gpu1", [*other, 150], ended=True, prompt_blocks=len(other))
    for worker in (two, three):
        await until(lambda worker=worker: worker.index.match("gpu1", [*other, 150]).depth == 51, "it knows all")  # type: ignore[misc]
    assert one.neighbours.untold == 2


def said(what: object) -> bytes:
    message = msgspec.msgpack.Encoder(enc_hook=encoded).encode(what)
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(
    "message",
    [
        b"\0\0\0\x04nope",
        *(said([2, [], [["gpu1", keys]]]) for keys in (b"1234567", [-1], {1: 2}, 7, "12345678")),
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        said(News(2, [], [Record("gpu1", array("Q", [1]), ended=True, prompt=5)])),
        said(News(2, [], [Record("gpu1", array("Q", [1]), common=1)])),
    ],
)
async def test_who_talks_nonsense_is_no_neighbour(directory: Path, stack: AsyncExitStack, message: bytes) -> None:
    one = Worker(directory, 1)
    await started(stack, one)
    reader, writer = await asyncio.open_unix_connection(str(directory / "1.news"))
    writer.write(message)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_a_prompt_that_one_worker_sent_is_followed_by_the_other(directory: Path, stack: AsyncExitStack) -> None:
    replicas = [await Scripted().start() for _ in range(3)]
    for replica in replicas:
        stack.push_async_callback(replica.stop)
    settings = settings_for([replica.url for replica in replicas], workers=2)
    routers = [await stack.enter_async_context(Router(settings, Place(number, directory))) for number in (1, 2)]
    for router in routers:
        assert router.neighbours is not None
        await until(lambda router=router: len(router.neighbours._links) == 1, "they know each other")  # type: ignore[misc]
    for turn in range(6):
        text = b"%d " % turn * 2000
        body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % text
        served = []
        for router in (routers[turn % 2], routers[1 - turn % 2]):
            client = await Raw.connect(router.address)
            client.post("/v1/chat/completions", body)
            reply = await client.reply()
            assert reply.body == CHAT
            served.append(
                (reply.header(b"x-warmroute-replica"), int(reply.header(b"x-warmroute-predicted-tokens") or 0))
            )
            client.leave()
            await until(
                lambda: (
                    len({tuple(each.index.blocks(one.name) for one in replicas) for each in routers}) == 1
                    and not any(
                        load.in_flight
                        for each in routers
                        if each.neighbours
                        for load in each.neighbours.elsewhere().values()
                    )
                ),
                "both know the same, and that nothing is in flight",
            )
        (first, cold), (second, warm) = served
        assert first == second
        assert cold == 0
        assert warm > 900


@pytest.mark.parametrize("path", ["/v1/score", "/v1/chat/completions"])
async def test_what_others_have_in_flight_counts_and_nobody_is_waited_for(
    directory: Path, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    replicas = [await Scripted().start() for _ in range(2)]
    for replica in replicas:
        stack.push_async_callback(replica.stop)
    settings = settings_for([replica.url for replica in replicas], workers=2)
    router = await stack.enter_async_context(Router(settings, Place(1, directory)))
    neighbours = router.neighbours
    assert neighbours is not None

    async def consult(_: object) -> None:
        raise AssertionError("what is at hand is asked for")

    monkeypatch.setattr(neighbours, "consult", consult)
    monkeypatch.setattr(module, "LEASE_SECONDS", 600.0)
    client = await Raw.connect(router.address)
    for busy, free in (replicas, replicas[::-1], replicas):
        neighbours.hear(News(2, [Load(busy.name, 50, 40, 30_000.0, 0.0, 1e6)], []))
        client.post(path, b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')
        assert (await client.reply()).header(b"x-warmroute-replica") == free.name.encode()
    client.leave()
