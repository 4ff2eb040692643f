"""A reload takes up other replicas, keys and rules without a stream noticing; what is wrong changes nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from router.app import Router
from router.config import LIVE, ConfigError, leaves, load, reloaded
from tests.wire.conftest import Bench, settings_for
from tests.wire.running import Running
from tests.wire.scripted import (
    CHAT,
    STREAM_HEAD,
    Raw,
    Received,
    Script,
    Scripted,
    chunk,
    delta,
    until,
    within,
)

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def held(release: asyncio.Event) -> Script:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def names(router: Router) -> list[str]:
    return [replica.name for replica in router.fleet]


@pytest.mark.fault("series of the removed")
@pytest.mark.fault("series of the gone")
async def test_a_replica_that_leaves_ends_its_answers_and_then_its_series_go(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute")
    release = asyncio.Event()
    old = await bench.replica(held(release))
    new = await bench.replica()
    router = await bench.router(old)
    streaming = await bench.client(router)
    streaming.post("/v1/chat/completions", STREAM_BODY)
    assert (await streaming.head()).status == 200
    assert await streaming.chunk() == delta("a")
    label = b'replica="%s"' % old.name.encode()

    await router.reload(settings_for([new.url]))
    assert names(router) == [new.name]
    client = await bench.client(router)
    for _ in range(4):
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).body == CHAT
    assert (len(old.received), len(new.received)) == (1, 4)
    page = router.telemetry.page()
    assert b"warmroute_replica_ready{%s} 0.0" % label in page
    assert b"warmroute_in_flight{%s} 1.0" % label in page
    probes = len(old.probes)

    release.set()
    assert await streaming.chunk() == b"data: [DONE]\n\n"
    assert await streaming.chunk() is None
    await until(lambda: label not in router.telemetry.page(), "the series of the one that left are gone")
    assert len(old.probes) == probes
    assert old.name not in router.index
    assert old.name not in router.feedback.records
    await until(lambda: old.open_connections == 0, "no connection to it is kept")
    said = [record.getMessage() for record in caplog.records]
    assert f"settings reloaded: +{new.name}, -{old.name}" in said
    assert f"{old.name} has left: its last answer has ended" in said


async def test_the_last_ready_replica_serves_until_its_successor_does(bench: Bench) -> None:
    old, new = await bench.replica(), await bench.replica()
    router = await bench.router(old)
    await router.reload(settings_for([new.url]))
    assert [replica.name for replica in router.fleet.ready()] == [new.name]


async def test_one_that_comes_back_while_it_leaves_is_in_again(bench: Bench) -> None:
    release = asyncio.Event()
    one, other = await bench.replica(held(release)), await bench.replica()
    router = await bench.router(one)
    streaming = await bench.client(router)
    streaming.post("/v1/chat/completions", STREAM_BODY)
    await streaming.head()
    await router.reload(settings_for([other.url]))
    await router.reload(settings_for([other.url, one.url]))
    assert names(router) == [other.name, one.name]
    assert router.fleet.leaving == []
    page = router.telemetry.page()
    assert page.count(b'warmroute_replica_ready{replica="%s"}' % one.name.encode()) == 1
    release.set()
    assert await streaming.chunk() == delta("a")
    assert await streaming.chunk() == b"data: [DONE]\n\n"
    await until(lambda: len(router.fleet.ready()) == 2, "both are ready")


async def test_rules_change_for_the_next_request(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).header(b"x-warmroute-replica") == replica.name.encode()
    await router.reload(settings_for([replica.url], show_choice="false", max_body_bytes=1024, policy="round_robin"))
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).header(b"x-warmroute-replica") is None
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1025\r\n\r\n")
    assert (await client.reply()).status == 413
    assert "for round_robin" not in router.announcement()
    assert "policy: round_robin" in router.announcement()


async def test_keys_come_and_go(bench: Bench, tmp_path: Path) -> None:
    keys, replica_key = tmp_path / "keys", tmp_path / "replica-key"
    keys.write_text("sk-one\n")
    replica_key.write_text("first\n")
    replica = await bench.replica()
    changes = {"client_keys_file": keys, "api_key_file": replica_key, "probe_seconds": 0.02}
    router = await bench.router(replica, **changes)

    async def enter(key: str) -> int:
        client = await bench.client(router)
        client.post("/v1/chat/completions", BODY, f"Authorization: Bearer {key}\r\n".encode())
        return (await client.reply()).status

    assert [await enter("sk-one"), await enter("sk-two")] == [200, 401]
    keys.write_text("sk-two\n")
    replica_key.write_text("second\n")
    assert [await enter("sk-one"), await enter("sk-two")] == [200, 401]
    await router.reload(settings_for([replica.url], **changes))
    assert [await enter("sk-one"), await enter("sk-two")] == [401, 200]
    assert replica.received[-1].header(b"authorization") == b"Bearer second"
    await until(lambda: replica.probes[-1].header(b"authorization") == b"Bearer second", "probes have it too")

    keys.write_text("\n")
    with pytest.raises(ConfigError, match="it has no key"):
        await router.reload(settings_for([replica.url, "http://127.0.0.1:1"], **changes))
    assert [await enter("sk-one"), await enter("sk-two")] == [401, 200]
    assert names(router) == [replica.name]


async def test_what_needs_a_restart_is_named_and_stays(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    await router.reload(settings_for([replica.url], port=8080, probe_seconds=9, drain_seconds=0.3))
    assert (router.settings.listen.port, router.settings.fleet.probe_seconds) == (0, 1.0)
    assert router.settings.listen.drain_seconds == 0.3
    said = [record.getMessage() for record in caplog.records if "restart" in record.getMessage()]
    assert said == [
        "port is read at start alone: a restart is needed for another one",
        "probe_seconds is read at start alone: a restart is needed for another one",
    ]


def test_every_live_setting_exists() -> None:
    assert {leaf.name for leaf in leaves()} >= LIVE


def test_what_changes_is_told_apart() -> None:
    old = load(replicas=["http://a:1"], flags={"port": "1", "max_attempts": "2"}, environ={})
    new = load(replicas=["http://b:1"], flags={"port": "2", "max_attempts": "3"}, environ={})
    settings, changed, fixed = reloaded(old, new)
    assert (changed, fixed) == (["max_attempts"], ["port"])
    assert (settings.replicas, settings.listen.port, settings.fleet.max_attempts) == (["http://b:1"], 1, 3)


async def test_a_hangup_reloads_the_file_and_a_wrong_one_is_refused(bench: Bench, tmp_path: Path) -> None:
    """The real process and the real signal, with a stream open all the while."""
    release = asyncio.Event()
    one, two = await bench.replica(held(release)), await bench.replica()
    file = tmp_path / "warmroute.yaml"

    def write(replicas: list[Scripted], more: str = "") -> None:
        file.write_text(f"replicas: [{', '.join(each.url for each in replicas)}]\n{more}")

    write([one])
    running = await Running.start("--config", str(file), "--port", "0", "--admin-port", "-1")
    try:
        await running.until_said(b"memory bounds")
        streaming = await Raw.connect(running.address)
        streaming.post("/v1/chat/completions", STREAM_BODY)
        assert (await streaming.head()).status == 200
        write([two])
        running.process.send_signal(signal.SIGHUP)
        await running.until_said(f"settings reloaded: +{two.name}, -{one.name}".encode())
        write([one, two], "lisen: {}\n")
        running.process.send_signal(signal.SIGHUP)
        await running.until_said(b"settings not reloaded, the old ones stay: --config ")
        assert b"`lisen`; did you mean `listen`?" in running.said
        client = await Raw.connect(running.address)
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).header(b"x-warmroute-replica") == two.name.encode()
        release.set()
        assert await streaming.chunk() == delta("a")
        assert await streaming.chunk() == b"data: [DONE]\n\n"
        assert await streaming.chunk() is None
        client.leave()
        streaming.leave()
        running.process.send_signal(signal.SIGINT)
        assert await within(running.process.wait()) == 0
        assert b"Traceback" not in running.said
    finally:
        await running.kill()
