"""What the router says when it starts, which tokenizers it finds, and how it ends when a supervisor says so."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.app import Router
from router.prompt.readers import Readers
from router.prompt.tokens import Tokenizer
from tests.wire.conftest import Bench, settings_for
from tests.wire.scripted import CHAT, STREAM_HEAD, Raw, Received, Scripted, chunk, delta, until, until_closed, within

TINY = Path(__file__).parents[2] / "fake_backend" / "tiny"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
CACHE = (
    b'vllm:cache_config_info{block_size="32",num_gpu_blocks="1001",enable_prefix_caching="%s",'
    b'prefix_caching_hash_algo="xxhash"} 1.0\nprocess_start_time_seconds 1.0\n'
)


async def gone(bench: Bench) -> Scripted:
    replica = await bench.replica()
    await replica.stop()
    return replica


def block_of(lines: list[str], replica: Scripted) -> str:
    (line,) = (line for line in lines if line.strip().startswith(replica.name))
    return line.strip().removeprefix(replica.name).strip()


async def test_the_start_up_block_tells_what_is_there_what_is_not_and_what_is_assumed(bench: Bench) -> None:
    told, untold, uncached, away = [await bench.replica() for _ in range(3)] + [await gone(bench)]
    told.metrics, uncached.metrics = CACHE % b"True", CACHE % b"False"
    told.models = [
        {"id": "big", "root": str(TINY), "max_model_len": 8192},
        {"id": "tuned", "root": "/adapters/tuned", "parent": "big"},
    ]
    router = await bench.router(
        *(told, untold, uncached, away),
        **{"admin_port": 0, "probe_seconds": 7, "max_connections": 123, "max_body_bytes": 3 * 2**20},
        **{"max_buffered_bytes": 5 * 2**20, "default_pool_blocks": 500, "max_pool_blocks": 900},
    )
    lines = router.announcement().splitlines()
    assert lines[0] == f"warmroute listens on http://127.0.0.1:{router.address[1]}  (policy: cost)"
    assert router.admin_address is not None
    assert f"  admin side on http://127.0.0.1:{router.admin_address[1]}" in lines
    assert block_of(lines, told) == "ready: big, tuned; 1000 blocks of 32 tokens, xxhash"
    assert block_of(lines, untold) == (
        "ready: m; its metrics do not tell of its cache: assumed 500 blocks of 16 tokens, sha256"
    )
    assert block_of(lines, uncached) == "ready: m; 1000 blocks of 32 tokens, xxhash, PREFIX CACHING IS OFF"
    assert re.fullmatch(r"not reached yet \(connect.+\); asked again every 7 s", block_of(lines, away))
    assert f"    big  read as tokens: {TINY}, up to 8192 tokens" in lines
    assert "    m  read as bytes, 4 per token, up to 4096 tokens; --tokenizer DIR makes predictions exact" in lines
    assert not any(line.strip().startswith("tuned") for line in lines)
    (bounds,) = (line for line in lines if "memory bounds" in line)
    # 900 of each pool are remembered at the most; 500 of those that do not say.
    assert "index 2800 blocks" in bounds
    assert "request bodies 5 MiB, each up to 3 MiB" in bounds
    assert bounds.endswith("; 123 connections")


async def test_without_any_replica_it_still_starts_and_says_so(bench: Bench) -> None:
    replicas = [await gone(bench) for _ in range(2)]
    router = await bench.router(*replicas, probe_seconds=0.02)
    lines = router.announcement().splitlines()
    for replica in replicas:
        assert block_of(lines, replica).startswith("not reached yet (connect")
    assert "    none known yet" in lines
    client = await bench.client(router)
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    ready = await client.reply()
    assert (ready.status, ready.json["ready"]) == (503, False)
    assert [str(each).partition(": ")[0] for each in ready.json["missing"]] == [  # type: ignore[attr-defined]
        replica.name for replica in replicas
    ]
    await replicas[0].start()
    await until(lambda: bool(router.fleet.ready()), "one has come")
    client.post("/v1/chat/completions", BODY)
    assert (await client.reply()).body == CHAT


# -- tokenizers -----------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
async def test_a_tokenizer_is_loaded_once_for_all_replicas_and_aliases(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replicas become ready together; the first to load waits until all of them have asked for it."""
    loads: list[Path] = []
    all_asked = threading.Semaphore(0)
    load = Tokenizer.load

    def counted(directory: Path) -> Tokenizer:
        loads.append(directory)
        for _ in range(4):
            assert all_asked.acquire(timeout=60)
        for _ in range(4):
            all_asked.release()
        return load(directory)

    monkeypatch.setattr(Tokenizer, "load", counted)
    replicas = [await bench.replica() for _ in range(4)]
    for replica in replicas:
        replica.models = [{"id": "m", "root": str(TINY)}, {"id": "alias", "root": str(TINY)}]
    router = Router(settings_for([replica.url for replica in replicas]))
    find = router.readers.find

    def asked(model: str, root: str | None) -> object:
        all_asked.release()
        return find(model, root)

    monkeypatch.setattr(router.readers, "find", asked)
    async with router:
        assert len(router.fleet.ready()) == 4
        assert loads == [TINY]
        assert router.readers["m"] is router.readers["alias"]
        assert router.readers["m"].exact


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Open to other users, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_tokenizer_that_cannot_be_read_means_bytes_and_a_warning(
    open_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, locked, fine = (open_directory / name for name in ("broken", "locked", "fine"))
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    shutil.copytree(TINY, fine)
    shutil.copytree(TINY, locked)
    locked.chmod(0)
    try:
        with as_somebody():
            found = {
                name: Readers("", 2**20).find(name, str(open_directory / name)).exact
                for name in ("broken", "locked", "fine", "absent")
            }
            long = Readers("", 2**20).find("long", "/" + "x" * 5000).exact
    finally:
        locked.chmod(0o755)
    assert found == {"broken": False, "locked": False, "fine": True, "absent": False}
    assert not long
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(": the tokenizer in ")[0] for line in told] == [
        "model broken",
        "model locked",
        "model long",
    ]


@contextlib.contextmanager
def as_somebody() -> Iterator[None]:
    """The superuser may read everything; these lines run as nobody in particular."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# -- the end --------------------------------------------------------------------------------------------------------


async def ready(client: Raw) -> tuple[int, object]:
    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await client.reply()
    return reply.status, reply.json["missing"]


@pytest.mark.fault("sudden end")
async def test_a_terminated_router_serves_on_for_its_grace_and_then_drains(bench: Bench) -> None:
    """The real process and the real signal."""
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta("a")))
        await release.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", replica.url, "--port", "0", "--admin-port", "-1"),
        *("--grace-seconds", "2", "--drain-seconds", "20"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = b""
    try:
        while b"memory bounds" not in said:
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, said
            said += line
        port = int(re.search(rb"listens on http://127.0.0.1:(\d+)", said)[1])  # type: ignore[index]
        address = ("127.0.0.1", port)
        streaming, idle = await Raw.connect(address), await Raw.connect(address)
        assert await ready(idle) == (200, [])
        streaming.post("/v1/chat/completions", STREAM_BODY)
        assert (await streaming.head()).status == 200
        assert await streaming.chunk() == delta("a")

        process.send_signal(signal.SIGTERM)
        while b"not ready from now on" not in said:
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, said
            said += line
        assert await ready(idle) == (503, ["the router is shutting down"])
        late = await Raw.connect(address)
        late.post("/v1/chat/completions", STREAM_BODY)
        assert (await late.head()).status == 200
        assert await late.chunk() == delta("a")

        # The grace is over: idle connections end, and nobody new comes in.
        assert await idle.closed() == b""
        with pytest.raises(ConnectionError):
            await Raw.connect(address)
        release.set()
        for client in (streaming, late):
            assert await client.chunk() == b"data: [DONE]\n\n"
            assert await client.chunk() is None
            assert await client.closed() == b""
            client.leave()
        assert await within(process.wait()) == 0
        said += await process.stderr.read()
        assert b"Traceback" not in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_ctrl_c_while_it_is_being_loaded_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from router.__main__ import run

    real = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "router.cli":
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert run() == 130


async def test_one_that_is_stopped_by_hand_grants_no_grace(bench: Bench) -> None:
    """Ctrl-C: nobody is behind it who needs a moment."""
    replica = await bench.replica()
    router = Router(settings_for([replica.url], grace_seconds=3600))
    await router.__aenter__()
    client = await bench.client(router)
    assert await ready(client) == (200, [])
    await within(router.__aexit__())
    assert await client.closed() == b""


@pytest.mark.fault("sudden end", "cut without a word")
@pytest.mark.parametrize("begun", [False, True], ids=["no answer yet", "a stream"])
async def test_what_does_not_end_in_time_is_cut(bench: Bench, caplog: pytest.LogCaptureFixture, begun: bool) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun:
            writer.write(STREAM_HEAD + chunk(delta("a")))
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = Router(settings_for([replica.url], drain_seconds=0.05))
    await router.__aenter__()
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    await until(lambda: len(replica.received) == 1, "the replica has the request")
    if begun:
        assert (await client.head()).status == 200
        assert await client.chunk() == delta("a")
    await within(router.__aexit__())
    if begun:
        event = await client.chunk()
        assert event is not None
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert await client.chunk() is None
    else:
        reply = await client.reply()
        assert (reply.status, reply.header(b"retry-after"), reply.header(b"connection")) == (503, b"1", b"close")
        error = reply.json["error"]
    assert error["code"] == 503
    assert "drain_seconds" in error["message"]
    assert await client.closed() == b""
    await within(replica.received[0].aborted.wait())
    assert "cutting 1 answers that did not end in time" in [record.getMessage() for record in caplog.records]
    assert all(replica.load.in_flight == 0 for replica in router.fleet)


@pytest.mark.fault("cut without a word")
async def test_a_whole_answer_that_does_not_end_in_time_is_broken_off(bench: Bench) -> None:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        await until_closed(request, reader)

    replica = await bench.replica(script)
    router = Router(settings_for([replica.url], drain_seconds=0.05))
    await router.__aenter__()
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY)
    assert (await client.head()).status == 200
    await within(router.__aexit__())
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await within(client.reader.readexactly(100))
    await within(replica.received[0].aborted.wait())
