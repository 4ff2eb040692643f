"""Which failures are a replica's doing, and what requests see of a replica that is left alone."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from router import evidence
from router.app import Router
from router.fleet.breaker import FAILURES_TO_OPEN, Condition
from router.journey import Journey
from tests.wire.conftest import Bench, probed
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, Script, Scripted, answer, chunk, delta, until, until_closed

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


@pytest.fixture(autouse=True)
def never_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is the shunning that keeps requests away."""
    monkeypatch.setattr(evidence, "SHUN_SECONDS", 0.0)


class Clock:
    """What breakers take for the time: it stands still until a test moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    original = Journey.__init__

    def init(journey: Journey, **parts: Any) -> None:
        original(journey, **parts)
        clock.now = asyncio.get_running_loop().time()
        journey._clock = lambda: clock.now

    monkeypatch.setattr(Journey, "__init__", init)
    return clock


def says(status: bytes) -> Script:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"error":{}}', status=status))

    return script


async def hang_up(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def break_off(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(delta("a")))
    await writer.drain()
    writer.transport.abort()


async def sound(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(CHAT))


def condition(router: Router, replica: Scripted, clock: Clock) -> Condition:
    return router.fleet[replica.name].breaker.state(clock.now)


async def ask(bench: Bench, router: Router, times: int = 1, body: bytes = BODY) -> list[int]:
    client, told = await bench.client(router), []
    for _ in range(times):
        client.post("/v1/chat/completions", body)
        reply = await client.reply()
        told.append(reply.status)
        if reply.header(b"connection") == b"close" or not reply.clean or b'"error"' in reply.body[-400:]:
            client = await bench.client(router)
    return told


@pytest.mark.parametrize(
    "failing", [says(b"500 Internal Server Error"), says(b"502 Bad Gateway"), hang_up], ids=["500", "502", "reset"]
)
async def test_one_that_fails_where_another_answers_is_left_alone(
    bench: Bench, clock: Clock, failing: Script, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute.fleet")
    bad, good = await bench.replica(failing), await bench.replica()
    router = await bench.router(bad, good, policy="round_robin", probe_seconds=60)
    assert await ask(bench, router, 2 * FAILURES_TO_OPEN + 4) == [200] * (2 * FAILURES_TO_OPEN + 4)
    assert len(bad.received) == FAILURES_TO_OPEN
    assert condition(router, bad, clock) is Condition.OPEN
    clock(1.0)
    assert condition(router, bad, clock) is Condition.HALF_OPEN
    assert await ask(bench, router, 4) == [200] * 4
    assert len(bad.received) == FAILURES_TO_OPEN + 1  # the trial
    clock(1.9)
    assert await ask(bench, router, 4) == [200] * 4
    assert len(bad.received) == FAILURES_TO_OPEN + 1
    clock(0.1)
    bad.script = sound
    assert await ask(bench, router, 4) == [200] * 4
    assert condition(router, bad, clock) is Condition.CLOSED
    assert len(bad.received) == FAILURES_TO_OPEN + 3
    told = [r.getMessage().partition(":")[0] for r in caplog.records if "given" in r.getMessage()]
    assert [line for line in caplog.text.splitlines() if "answers again: it is given requests as before" in line]
    assert len(told) == 3  # opened, opened again by the trial, closed


async def test_streams_that_break_off_count(bench: Bench, clock: Clock) -> None:
    replica = await bench.replica(break_off)
    router = await bench.router(replica, probe_seconds=60)
    assert await ask(bench, router, FAILURES_TO_OPEN, STREAM_BODY) == [200] * FAILURES_TO_OPEN
    assert condition(router, replica, clock) is Condition.OPEN


@pytest.mark.fault("429 or 503")
@pytest.mark.parametrize(
    "failing",
    [
        says(b"400 Bad Request"),
        says(b"404 Not Found"),
        says(b"429 Too Many Requests"),
        says(b"503 Service Unavailable"),
    ],
    ids=["400", "404", "429", "503"],
)
async def test_clients_errors_and_busy_engines_open_nothing(bench: Bench, clock: Clock, failing: Script) -> None:
    bad, good = await bench.replica(failing), await bench.replica()
    router = await bench.router(bad, good, policy="round_robin", probe_seconds=60)
    await ask(bench, router, 4 * FAILURES_TO_OPEN)
    assert len(bad.received) >= 2 * FAILURES_TO_OPEN
    known = router.fleet[bad.name].breaker
    assert (condition(router, bad, clock), known.failures) == (Condition.CLOSED, 0)


@pytest.mark.parametrize("failing", [says(b"500 Internal Server Error"), hang_up], ids=["500", "reset"])
async def test_a_request_that_fails_everywhere_opens_nothing(bench: Bench, clock: Clock, failing: Script) -> None:
    """Else one client could close every door of the fleet."""
    replicas = [await bench.replica(failing) for _ in range(3)]
    router = await bench.router(*replicas, probe_seconds=60)
    await ask(bench, router, 3 * FAILURES_TO_OPEN)
    assert [condition(router, replica, clock) for replica in replicas] == [Condition.CLOSED] * 3
    assert sum(len(replica.received) for replica in replicas) == 2 * 3 * FAILURES_TO_OPEN


@pytest.mark.fault("429 or 503")
@pytest.mark.parametrize("begun", [False, True], ids=["before the head", "mid-answer"])
async def test_clients_that_leave_open_nothing(bench: Bench, clock: Clock, begun: bool) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun:
            writer.write(STREAM_HEAD + chunk(delta("a")))
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = await bench.router(replica, probe_seconds=60)
    for i in range(2 * FAILURES_TO_OPEN):
        client = await bench.client(router)
        client.post("/v1/chat/completions", STREAM_BODY)
        if begun:
            await client.head()
            await client.chunk()
        else:
            await until(lambda i=i: len(replica.received) == i + 1, "it has the request")  # type: ignore[misc]
        client.leave()
        await until(lambda: router.fleet[replica.name].load.in_flight == 0, "it is over")
    known = router.fleet[replica.name].breaker
    assert (condition(router, replica, clock), known.failures) == (Condition.CLOSED, 0)


async def test_a_trial_whose_client_leaves_makes_way_for_another(bench: Bench, clock: Clock) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    replica = await bench.replica()
    router = await bench.router(replica, probe_seconds=60)
    known = router.fleet[replica.name]
    for _ in range(FAILURES_TO_OPEN):
        known.breaker.failed(clock.now)
    clock(1.0)
    replica.script = script
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    await until(lambda: len(replica.received) == 1, "the trial is on its way")
    assert await ask(bench, router) == [503]
    client.leave()
    await until(lambda: known.load.in_flight == 0, "the trial is over")
    replica.script = sound
    assert await ask(bench, router, 2) == [200, 200]


@pytest.mark.fault("429 or 503")
async def test_all_left_alone_is_a_503_that_says_when_to_come_back(bench: Bench, clock: Clock) -> None:
    replicas = [await bench.replica() for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=60)
    for replica in replicas:
        await replica.stop()
    assert await ask(bench, router, FAILURES_TO_OPEN) == [502] * FAILURES_TO_OPEN
    for pause in (1, 2, 4, 8):
        client = await bench.client(router)
        client.post("/v1/chat/completions", BODY)
        reply = await client.reply()
        assert (reply.status, reply.header(b"retry-after")) == (503, b"%d" % pause)
        error = reply.json["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert all(replica.name in error["message"] for replica in replicas)
        clock(pause)
        assert await ask(bench, router) == [502]
    # A probe that gets through settles it, since connecting was what failed.
    await replicas[1].start()
    await probed(router, replicas[1])
    assert await ask(bench, router, 3) == [200] * 3
    assert len(replicas[1].received) == 3


async def test_another_process_has_a_clean_record(bench: Bench, clock: Clock) -> None:
    replica = await bench.replica(break_off)
    router = await bench.router(replica, probe_seconds=60)
    await ask(bench, router, FAILURES_TO_OPEN, STREAM_BODY)
    assert condition(router, replica, clock) is Condition.OPEN
    replica.metrics = b"process_start_time_seconds 2.0\n"
    await probed(router, replica)
    assert condition(router, replica, clock) is Condition.CLOSED


async def test_its_state_is_shown(bench: Bench, clock: Clock) -> None:
    replica = await bench.replica(break_off)
    router = await bench.router(replica, probe_seconds=60, admin_port=0)
    await ask(bench, router, FAILURES_TO_OPEN, STREAM_BODY)
    client = await bench.client(router)
    client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    page = (await client.reply()).body.decode()
    states = [line for line in page.splitlines() if line.startswith("warmroute_breaker{")]
    assert states == [
        f'warmroute_breaker{{replica="{replica.name}",state="{state}"}} {value}'
        for state, value in (("closed", "0.0"), ("open", "1.0"), ("half_open", "0.0"))
    ]
    assert router.admin_address is not None
    reader, writer = await asyncio.open_connection(*router.admin_address)
    writer.write(b"GET /router/replicas HTTP/1.0\r\n\r\n")
    (shown,) = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["replicas"]
    writer.close()
    assert shown["breaker"]["state"] == "open"
    assert shown["breaker"]["failures_in_a_row"] == FAILURES_TO_OPEN
