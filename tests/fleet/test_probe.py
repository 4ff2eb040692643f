"""What probes make of a replica: ready, silent, lost, another process. Real sockets; rounds are run by hand."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from router.app import Router
from router.config import Fleet
from router.fleet.probe import FAILURES_TO_LOSE
from router.fleet.replica import State
from tests.wire.conftest import Bench, probed
from tests.wire.scripted import BOUND, CHAT, STREAM_HEAD, Received, Scripted, chunk, delta

BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"hello " * 400)
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


async def by_hand(bench: Bench, *replicas: Scripted, **changes: object) -> Router:
    return await bench.router(*replicas, **{"probe_seconds": 3600, "probe_timeout_seconds": BOUND, **changes})


def long_ago() -> float:
    return asyncio.get_running_loop().time() - Fleet().silence_seconds - 1


async def ask(bench: Bench, router: Router, body: bytes = BODY) -> tuple[int, bytes | None]:
    client = await bench.client(router)
    client.post("/v1/chat/completions", body)
    reply = await client.reply()
    return reply.status, reply.header(b"x-warmroute-replica")


async def test_one_whose_streams_go_on_is_not_lost_however_late_its_probes(bench: Bench) -> None:
    more = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await more.wait()
        writer.write(chunk(delta("b")) + b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await by_hand(bench, replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    await client.head()
    assert await client.chunk() == delta("a")
    replica.deaf = True
    known = router.fleet[replica.name]
    known.heard_at = long_ago()
    assert await probed(router, replica, FAILURES_TO_LOSE - 1) is State.READY
    more.set()
    assert await client.chunk() == delta("b")
    assert await probed(router, replica, 3) is State.READY
    # The stream is over and nothing has come for long enough.
    known.heard_at = long_ago()
    assert await probed(router, replica) is State.SILENT
    assert known.why == "no answer in time"


@pytest.mark.fault("hung replica")
async def test_a_silent_one_is_used_only_where_there_is_nothing_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    silent, other = await bench.replica(), await bench.replica()
    router = await by_hand(bench, silent, other)
    for _ in range(2):
        await ask(bench, router, STREAM_BODY)
    silent.deaf = True
    router.fleet[silent.name].heard_at = long_ago()
    assert await probed(router, silent, FAILURES_TO_LOSE) is State.SILENT
    for _ in range(6):
        assert await ask(bench, router) == (200, other.name.encode())
    await other.stop()
    assert await probed(router, other) is State.LOST
    assert await ask(bench, router) == (200, silent.name.encode())
    client = await bench.client(router)
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    ready = await client.reply()
    assert ready.status == 503
    gone = router.fleet[other.name].why
    assert gone.startswith("connect")
    assert ready.json["missing"] == [
        f"{silent.name}: silent (no answer in time)",
        f"{other.name}: lost ({gone})",
    ]
    # It speaks again: what it holds was never in doubt.
    held = router.index.blocks(silent.name)
    assert held > 0
    silent.deaf = False
    assert await probed(router, silent) is State.READY
    assert router.index.blocks(silent.name) == held
    told = [record.getMessage() for record in caplog.records if record.name == "warmroute.fleet"]
    assert told[-3:] == [
        f"{silent.name} is silent: no answer in time",
        f"{other.name} is lost: {gone}",
        f"{silent.name} is ready again: m, read as bytes, 4 per token; predicted: it publishes no KV events",
    ]


async def test_a_silent_one_whose_port_closes_is_lost(bench: Bench) -> None:
    replica = await bench.replica()
    router = await by_hand(bench, replica)
    replica.deaf = True
    router.fleet[replica.name].heard_at = long_ago()
    assert await probed(router, replica, FAILURES_TO_LOSE) is State.SILENT
    await replica.stop()
    assert await probed(router, replica) is State.LOST
    assert (await ask(bench, router))[0] == 503


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (b"process_start_time_seconds 1.0\n", b"process_start_time_seconds 1.0\n", True),
        (b"process_start_time_seconds 1.0\n", b"process_start_time_seconds 2.0\n", False),
        (b"vllm:prefix_cache_queries_total 50\n", b"vllm:prefix_cache_queries_total 60\n", False),
    ],
    ids=["the same process", "another process", "it does not say"],
)
async def test_one_that_comes_back_holds_what_its_process_held(
    bench: Bench, before: bytes, after: bytes, kept: bool
) -> None:
    replica = await bench.replica()
    replica.metrics = before
    router = await by_hand(bench, replica)
    await ask(bench, router)
    held = router.index.blocks(replica.name)
    assert held > 0
    await replica.stop()
    assert await probed(router, replica) is State.LOST
    replica.metrics = after
    await replica.start()
    assert await probed(router, replica) is State.READY
    assert router.index.blocks(replica.name) == (held if kept else 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"process_start_time_seconds 1.0\n", b"process_start_time_seconds 2.0\n"),
        (b"vllm:prefix_cache_queries_total 50\n", b"vllm:prefix_cache_queries_total 49\n"),
    ],
    ids=["start time", "counters fell"],
)
async def test_a_restart_between_two_rounds_forgets_all_that_was_learned(
    bench: Bench, caplog: pytest.LogCaptureFixture, before: bytes, after: bytes
) -> None:
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("text " * 200)))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    replica.metrics = before
    router = await by_hand(bench, replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY[:-1] + b',"stream":true}')
    await client.head()
    await client.chunk()
    for _ in range(30):
        for name, ttft in ((replica.name, 5000.0), ("x", 100.0), ("y", 100.0)):
            router.rates.observe(name, tokens=1000, cached=0, queued_ms=0.0, ttft_ms=ttft)
    router.feedback.of(replica.name).pool_share = 0.5
    assert router.rates.slowness(replica.name) > 1.0
    replica.metrics = after
    replica.models = [{"id": "m2", "root": "m2"}]
    assert await probed(router, replica) is State.READY
    assert router.index.blocks(replica.name) == 0
    assert router.rates.slowness(replica.name) == 1.0
    assert router.feedback.of(replica.name).pool_share == 1.0
    assert list(router.fleet[replica.name].models) == ["m2"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{replica.name} was restarted: its cache is taken to be empty"
    ]
    # The old process's answer is passed on, and recorded nowhere.
    release.set()
    while await client.chunk() is not None:
        pass
    assert router.fleet[replica.name].load.in_flight == 0
    assert router.index.blocks(replica.name) == 0


async def test_one_refused_round_loses_it_and_one_late_round_does_not(bench: Bench) -> None:
    late, gone = await bench.replica(), await bench.replica()
    router = await by_hand(bench, late, gone)
    late.deaf = True
    router.fleet[late.name].heard_at = long_ago()
    await gone.stop()
    assert await probed(router, late, FAILURES_TO_LOSE - 1) is State.READY
    assert await probed(router, gone) is State.LOST
    late.deaf = False
    assert await probed(router, late) is State.READY
    # A round that went well is a new beginning.
    late.deaf = True
    router.fleet[late.name].heard_at = long_ago()
    assert await probed(router, late, FAILURES_TO_LOSE - 1) is State.READY


async def test_late_ones_become_ready_and_say_so_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    here, late = await bench.replica(), await bench.replica()
    await late.stop()
    router = await by_hand(bench, here, late)
    assert await probed(router, late, 3) is State.UNSEEN  # the fourth failure, with the one at start-up
    assert router.fleet.ready() == [router.fleet[here.name]]
    await late.start()
    assert await probed(router, late, 2) is State.READY
    told = [record.getMessage() for record in caplog.records if late.name in record.getMessage()]
    assert [line.partition(": ")[0] for line in told] == [f"{late.name} is not ready yet", f"{late.name} is ready"]
    assert told[1].startswith(f"{late.name} is ready: m, read as bytes, 4 per token")


@pytest.mark.parametrize("key", [b"s3cret", b""], ids=["key", "no key"])
async def test_probes_bring_the_key_and_requests_keep_their_own(bench: Bench, tmp_path: Path, key: bytes) -> None:
    replica = await bench.replica()
    file = tmp_path / "key"
    file.write_bytes(key + b"\n")
    router = await by_hand(bench, replica, **({"api_key_file": file} if key else {}))
    await probed(router, replica)
    assert {probe.header(b"authorization") for probe in replica.probes} == {b"Bearer " + key if key else None}
    assert {probe.line for probe in replica.probes} >= {b"GET /metrics HTTP/1.1", b"GET /v1/models HTTP/1.1"}
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).body == CHAT
    client.post("/v1/chat/completions", BODY, b"Authorization: Bearer mine\r\n")
    assert (await client.reply()).body == CHAT
    assert [got.header(b"authorization") for got in replica.received] == [None, b"Bearer mine"]


async def test_models_are_asked_for_again(bench: Bench) -> None:
    """An adapter that was loaded since is known some rounds later."""
    replica = await bench.replica()
    router = await by_hand(bench, replica)
    replica.models = [*replica.models, {"id": "late", "root": "/late", "parent": "m"}]
    await probed(router, replica, 11)
    assert list(router.fleet[replica.name].models) == ["m", "late"]
