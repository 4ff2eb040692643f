"""Replicas that just failed are spared for a moment, and what was booked there is taken back."""

from __future__ import annotations

import asyncio
import json

import pytest

from router import evidence
from router.app import Router
from tests.wire.conftest import Bench
from tests.wire.scripted import (
    CHAT,
    STREAM_HEAD,
    Received,
    Script,
    Scripted,
    answer,
    chunk,
    delta,
    until,
    until_closed,
    within,
)

LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 2000}]}).encode()
LONG_STREAM = json.dumps(
    {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello " * 2000}]}
).encode()
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


def failures_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gave no answer" in record.getMessage()]


async def by_name(bench: Bench, count: int) -> list[Scripted]:
    return sorted([await bench.replica() for _ in range(count)], key=lambda replica: replica.name)


def attempts(router: Router, replica: Scripted, ending: str) -> float:
    value: float = router.telemetry.attempts.labels(replica.name, ending).value
    return value


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is shunned until the test says otherwise."""
    monkeypatch.setattr(evidence, "SHUN_SECONDS", 1e9)


async def test_one_that_cannot_be_reached_is_asked_once(bench: Bench, endless: None) -> None:
    gone, here = await by_name(bench, 2)
    router = await bench.router(gone, here, policy="round_robin", probe_seconds=60)
    await gone.stop()
    client = await bench.client(router)
    for _ in range(6):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).header(b"x-warmroute-replica") == here.name.encode()
    assert attempts(router, gone, "unreached") == 1
    # And again once the moment is over.
    router.fleet[gone.name].shunned_until = 0.0
    for _ in range(4):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 200
    assert attempts(router, gone, "unreached") == 2


@pytest.mark.fault("hung replica")
async def test_one_that_stayed_silent_is_asked_once(bench: Bench, endless: None) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    mute, here = await by_name(bench, 2)
    mute.script = script
    router = await bench.router(mute, here, policy="round_robin", probe_seconds=60, first_byte_timeout_seconds=1)
    client = await bench.client(router)
    told = []
    for _ in range(6):
        client.post("/v1/chat/completions", BODY)
        told.append((await client.reply()).status)
    assert told == [504, 200, 200, 200, 200, 200]
    assert attempts(router, mute, "silent") == 1


async def test_one_that_says_it_is_busy_is_spared_without_a_word(
    bench: Bench, endless: None, caplog: pytest.LogCaptureFixture
) -> None:
    busy_one, here = await by_name(bench, 2)
    busy_one.script = busy
    router = await bench.router(busy_one, here, policy="round_robin", probe_seconds=60)
    client = await bench.client(router)
    for _ in range(6):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 200
    assert attempts(router, busy_one, "refused") == 1
    assert not failures_told(caplog)
    # Where all are, they are asked all the same.
    here.script = busy
    for _ in range(2):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 503
    assert len(busy_one.received) == 3


async def test_many_failures_are_one_line_and_all_shunned_are_still_asked(
    bench: Bench, endless: None, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = await by_name(bench, 2)
    router = await bench.router(*replicas, probe_seconds=60)
    for replica in replicas:
        await replica.stop()
    client = await bench.client(router)
    for _ in range(4):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).status == 502
    assert [attempts(router, replica, "unreached") for replica in replicas] == [4, 4]
    told = [line.partition(" gave no answer: ") for line in failures_told(caplog)]
    assert sorted(name for name, _, _ in told) == [replica.name for replica in replicas]
    assert all(why for _, _, why in told)
    await replicas[0].start()
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).header(b"x-warmroute-replica") == replicas[0].name.encode()


async def busy(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"{}", status=b"503 Service Unavailable"))


async def hang_up(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize("failing", [busy, hang_up], ids=["refused", "broken"])
async def test_what_failed_at_one_replica_is_not_remembered_there(bench: Bench, failing: Script) -> None:
    asked: list[Scripted] = []

    def first_fails(replica: Scripted) -> Script:
        async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(replica)
            if len(asked) == 1:
                await failing(request, reader, writer)
            else:
                writer.write(answer(CHAT))

        return script

    replicas = [await bench.replica() for _ in range(2)]
    for replica in replicas:
        replica.script = first_fails(replica)
    router = await bench.router(*replicas, probe_seconds=60)
    client = await bench.client(router)
    client.post("/v1/chat/completions", LONG)
    assert (await client.reply()).status == 200
    failed, answered = asked
    assert router.index.blocks(failed.name) == 0
    assert router.index.blocks(answered.name) > 100
    now = asyncio.get_running_loop().time()
    assert router.fleet[failed.name].load.routed(now) == 0.0
    assert router.fleet[answered.name].load.routed(now) > 0.0


async def left_unanswered(bench: Bench, rate: float, *, first_token: bool) -> int:
    """Blocks remembered of a streamed request whose client left. `rate`: the prefill rate taken to be the engine's."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first_token:
            writer.write(STREAM_HEAD + chunk(delta("a")))
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, probe_seconds=60, prefill_tokens_per_second=rate)
    client = await bench.client(router)
    client.post("/v1/chat/completions", LONG_STREAM)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    if first_token:
        await client.head()
        assert await client.chunk() == delta("a")
    client.leave()
    await within(replica.received[0].aborted.wait())
    await until(lambda: router.fleet[replica.name].load.in_flight == 0, "nothing is in flight")
    return router.index.blocks(replica.name)


async def test_a_client_that_leaves_before_the_prefill_is_done_leaves_nothing_cached(bench: Bench) -> None:
    assert await left_unanswered(bench, 0.001, first_token=False) == 0


async def test_one_that_leaves_after_it_leaves_its_prompt_cached(bench: Bench) -> None:
    assert await left_unanswered(bench, 1e9, first_token=False) > 100
    assert await left_unanswered(bench, 0.001, first_token=True) > 100
