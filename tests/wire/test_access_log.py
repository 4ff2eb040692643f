"""One line for each request, and the id that it is known by on both sides."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from router.access import MAX_HELD_BYTES, AccessLog
from router.config import ConfigError
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, answer, chunk, delta, until, until_closed

BODY = b'{"model":"m","messages":[{"role":"user","content":"a secret prompt"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a secret prompt"}]}'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":'
    b'{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def told(file: Path, count: int) -> list[dict[str, Any]]:
    await until(lambda: len(lines(file)) >= count, f"{count} lines are written")
    return lines(file)


async def test_a_stream_is_told_whole_and_nothing_secret(bench: Bench, tmp_path: Path) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("an answer")) + chunk(USAGE) + b"0\r\n\r\n")

    file, keys = tmp_path / "access.log", tmp_path / "keys"
    keys.write_text("sk-secret\n")
    replica = await bench.replica(script)
    router = await bench.router(replica, access_log=file, client_keys_file=keys)
    client = await bench.client(router)
    client.post(
        "/v1/chat/completions?token=hidden", STREAM_BODY, b"X-Request-Id: r-1\r\nAuthorization: Bearer sk-secret\r\n"
    )
    head = await client.head()
    size = len(head.head)
    while (piece := await client.chunk()) is not None:
        size += len(chunk(piece))
    size += len(b"0\r\n\r\n")
    (said,) = await told(file, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", said.pop("time"))
    assert said.pop("duration_ms") >= said.pop("ttft_ms") >= 0
    assert said == {
        "request_id": "r-1",
        "trace_id": None,
        "client": "127.0.0.1",
        "key": "line 1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "m",
        "stream": True,
        "status": 200,
        "ending": "complete",
        "attempts": 1,
        "bytes_in": len(STREAM_BODY),
        "bytes_out": size,
        "replica": replica.name,
        "prompt_tokens": said["prompt_tokens"],
        "predicted_cached_tokens": 0,
        "cached_tokens": 4,
        "completion_tokens": 3,
    }
    text = file.read_text()
    assert not [word for word in ("secret", "hidden", "an answer") if word in text]


async def test_refusals_retries_and_leaving_are_told(bench: Bench, tmp_path: Path) -> None:
    async def fails(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", status=b"503 Service Unavailable"))

    async def hangs(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(request, reader)

    file = tmp_path / "access.log"
    replicas = [await bench.replica(fails) for _ in range(2)]
    router = await bench.router(*replicas, access_log=file, max_body_bytes=2048)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).status == 503
    client.send(b"POST /v1/embeddings?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 4096\r\n\r\n")
    assert (await client.reply()).status == 413
    for replica in replicas:
        replica.script = hangs
    other = await bench.client(router)
    other.post("/v1/chat/completions", BODY)
    await until(lambda: any(replica.received[-1].body and len(replica.received) > 1 for replica in replicas), "sent")
    other.leave()
    first, second, third = await told(file, 3)
    assert (first["status"], first["ending"], first["attempts"], first["ttft_ms"]) == (503, "complete", 2, None)
    assert (second["status"], second["ending"], second["path"]) == (413, "refused", "/v1/embeddings")
    assert (third["status"], third["ending"], third["bytes_out"]) == (None, "left", 0)


async def test_a_rotated_file_is_left_and_a_new_one_begun(bench: Bench, tmp_path: Path) -> None:
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    replica = await bench.replica()
    router = await bench.router(replica, access_log=file)
    client = await bench.client(router)

    async def ask() -> None:
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).body == CHAT

    await ask()
    await told(file, 1)
    file.rename(moved)
    await ask()
    await told(moved, 2)
    await router.reload(settings_for([replica.url], access_log=file))
    await until(file.exists, "the new file is there")
    await ask()
    await told(file, 1)
    assert len(lines(moved)) == 2

    other = tmp_path / "other.log"
    await router.reload(settings_for([replica.url], access_log=other))
    await ask()
    await told(other, 1)
    await router.reload(settings_for([replica.url]))
    await ask()
    with pytest.raises(ConfigError, match=r"--access-log .*: no such file or directory"):
        await router.reload(settings_for([replica.url], access_log=tmp_path / "absent" / "access.log"))
    assert (len(lines(file)), len(lines(other))) == (1, 1)
    assert b"access_log_dropped" not in router.telemetry.page()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, on Linux")
def test_a_full_disk_costs_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    full = AccessLog("/dev/full")
    for _ in range(3):
        full.write(b"a line\n")
    full.close()
    assert full.dropped == 3
    assert [record.getMessage() for record in caplog.records] == [
        "access log /dev/full: no space left on device; lines are dropped until it goes again"
    ]


def test_a_line_that_was_torn_is_not_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    write, room = os.write, [4, 0]

    def little(number: int, data: bytes) -> int:
        """A disk that fills up within a line, and is cleaned up afterwards."""
        if not room:
            return write(number, data)
        if (left := room.pop(0)) == 0:
            raise OSError(28, "No space left on device")
        return write(number, data[:left])

    access = AccessLog(str(file))
    monkeypatch.setattr(os, "write", little)
    access.write(b'{"n":1}\n')
    access._now.set()
    while not access.dropped:
        access._now.set()
    access.write(b'{"n":2}\n')
    access.close()
    assert file.read_text() == '{"n"\n{"n":2}\n'


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="opens a pipe by its name")
def test_what_waits_is_bounded() -> None:
    """A reader that does not read: a pipe that is full."""
    reading, writing = os.pipe()
    access = AccessLog(f"/proc/self/fd/{writing}")
    try:
        text = b"x" * 65_535 + b"\n"
        for _ in range(2 * MAX_HELD_BYTES // len(text)):
            access.write(text)
        assert access.dropped >= MAX_HELD_BYTES // len(text)
        assert access._held <= MAX_HELD_BYTES
    finally:
        os.close(reading)
        os.close(writing)
        access.close()


# -- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("identity")
async def test_an_id_goes_to_the_replica_and_back_once(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, b"x-request-id: mine\r\ntraceparent: 00-a-b-01\r\n")
    reply = await client.reply()
    assert reply.headers(b"x-request-id") == [b"mine"]
    assert replica.received[0].head.lower().count(b"x-request-id") == 1
    assert replica.received[0].header(b"x-request-id") == b"mine"
    assert replica.received[0].header(b"traceparent") == b"00-a-b-01"


@pytest.mark.fault("identity")
async def test_an_id_is_made_where_there_is_none_and_a_replicas_own_is_kept(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    client = await bench.client(router)
    made = []
    for _ in range(2):
        client.post("/v1/chat/completions", BODY)
        (name,) = (await client.reply()).headers(b"x-request-id")
        assert re.fullmatch(rb"[0-9a-f]{32}", name)
        assert replica.received[-1].header(b"x-request-id") == name
        made.append(name)
    assert len(set(made)) == 2

    async def own(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(CHAT, extra=b"X-Request-Id: theirs\r\n"))

    replica.script = own
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).headers(b"x-request-id") == [b"theirs"]


async def test_a_refusal_names_its_request_too(bench: Bench) -> None:
    replica = await bench.replica()
    router = await bench.router(replica)
    await replica.stop()
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, b"X-Request-Id: mine\r\n")
    reply = await client.reply()
    assert reply.status in (502, 503)
    assert reply.headers(b"x-request-id") == [b"mine"]


def test_the_log_can_be_json(caplog: pytest.LogCaptureFixture) -> None:
    from router.logs import Json

    record = logging.LogRecord("warmroute.fleet", logging.WARNING, __file__, 1, "%s is %s", ("gpu1", "lost"), None)
    said = json.loads(Json(2).format(record))
    assert said.pop("time").endswith("+00:00")
    assert said == {"level": "warning", "logger": "warmroute.fleet", "worker": 2, "message": "gpu1 is lost"}
