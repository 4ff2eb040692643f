"""Several workers on one port, as the processes that they are."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config import ConfigError, load
from router.supervisor import Supervisor
from tests.wire.conftest import Bench, bench  # noqa: F401
from tests.wire.running import Running
from tests.wire.scripted import CHAT, STREAM_HEAD, Raw, Received, chunk, delta, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def workers_of(process: int) -> dict[int, int]:
    """Process ids of the workers, by their numbers."""
    found = {}
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"worker" in words:
            found[int(words[words.index(b"worker") + 1])] = int(child)
    return found


async def get(address: tuple[str, int], path: str, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address[0]}:{address[1]}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def requests_total(address: tuple[str, int]) -> float:
    _, page = await get(address, "/metrics")
    return sum(float(value) for value in re.findall(r'requests_total\{code="2xx",ending="complete"\} (\S+)', page))


def admin_of(running: Running) -> tuple[str, int]:
    found = re.search(rb"admin side on http://127.0.0.1:(\d+)", running.said)
    assert found is not None
    return "127.0.0.1", int(found[1])


@pytest.mark.fault("sums that fall")
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
async def test_workers_serve_as_one_and_one_that_dies_is_replaced(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    release = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' in request.body:
            writer.write(STREAM_HEAD + chunk(delta("a")))
            await release.wait()
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            await replica._plain(request, reader, writer)

    replica, late = await bench.replica(script), await bench.replica()
    file, token = tmp_path / "warmroute.yaml", tmp_path / "token"
    token.write_text("t")

    def write(*urls: str, more: str = "") -> None:
        file.write_text(f"replicas: [{', '.join(urls)}]\n{more}")

    write(replica.url)
    running = await Running.start(
        *("--config", str(file), "--port", "0", "--admin-port", "0", "--admin-token-file", str(token)),
        *("--workers", "2", "--grace-seconds", "0.1", "--drain-seconds", "20"),
    )
    try:
        await running.until_said(b"memory bounds")
        assert b"2 workers, each with the bounds below; they tell each other what they know" in running.said
        first = workers_of(running.process.pid)
        assert sorted(first) == [1, 2]

        # Each connection is one worker's; with so many both have some.
        streams = [await Raw.connect(running.address) for _ in range(16)]
        for stream in streams:
            stream.post("/v1/chat/completions", STREAM_BODY)
            assert (await stream.head()).status == 200
            assert await stream.chunk() == delta("a")
        for _ in range(16):
            client = await Raw.connect(running.address)
            client.post("/v1/chat/completions", BODY)
            assert (await client.reply()).body == CHAT
            client.leave()
        for _ in range(4):
            assert await requests_total(running.address) == 16
        status, page = await get(admin_of(running), "/metrics", "t")
        assert (status, page.count("warmroute_workers 2.0")) == (200, 1)
        assert f'warmroute_in_flight{{replica="{replica.name}"}} 16.0' in page
        assert (await get(admin_of(running), "/router/replicas"))[0] == 401
        replicas: list[dict[str, Any]] = json.loads((await get(admin_of(running), "/router/replicas", "t"))[1])[
            "replicas"
        ]
        assert [(each["replica"], each["in_flight"]) for each in replicas] == [(replica.name, 16)]

        # One dies with its streams; the other's go on, the counts do not fall, and another takes its place.
        os.kill(first[1], signal.SIGKILL)
        await running.until_said(b"another is started in 0.1 s")
        assert b"worker 1 (process %d) was killed by SIGKILL" % first[1] in running.said
        assert await requests_total(running.address) == 16
        release.set()
        ends = await asyncio.gather(
            *(stream.reader.readuntil(b"\r\n0\r\n\r\n") for stream in streams), return_exceptions=True
        )
        whole = [end for end in ends if isinstance(end, bytes)]
        assert 0 < len(whole) < 16

        # A wrong file is refused by all; the one that was started meanwhile goes by the settings that hold.
        write(replica.url, late.url, more="lisen: {}\n")
        running.process.send_signal(signal.SIGHUP)
        await running.until_said(b"settings not reloaded, the old ones stay")
        async with asyncio.timeout(60):
            while "warmroute_workers 2.0" not in (await get(running.address, "/metrics"))[1]:
                await asyncio.sleep(0.05)
        assert sorted(workers_of(running.process.pid)) == [1, 2]
        assert await requests_total(running.address) >= 16
        write(late.url)
        running.process.send_signal(signal.SIGHUP)
        for _ in range(2):
            await running.until_said(f"settings reloaded: +{late.name}, -{replica.name}".encode())
        client = await Raw.connect(running.address)
        client.post("/v1/chat/completions", BODY)
        assert (await client.reply()).header(b"x-warmroute-replica") == late.name.encode()
        client.leave()

        left = workers_of(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
        assert b"for 2 workers to end" in running.said
        assert b"Traceback" not in running.said
        await until(lambda: not any(Path(f"/proc/{each}").exists() for each in left.values()), "all workers are gone")
    finally:
        await running.kill()


async def test_a_port_that_is_taken_is_told_once(bench: Bench) -> None:  # noqa: F811
    replica = await bench.replica()
    running = await Running.start(replica.url, "--port", str(replica.port), "--admin-port", "-1", "--workers", "2")
    assert await running.ended() == 2
    where = f"127.0.0.1:{replica.port}"
    assert running.said.decode() == (
        f"warmroute: cannot listen on {where}: address already in use; choose another --port\n"
    )


async def test_an_admin_port_that_is_taken_starts_no_worker(bench: Bench) -> None:  # noqa: F811
    replica = await bench.replica()
    running = await Running.start(replica.url, "--port", "0", "--admin-port", str(replica.port), "--workers", "2")
    assert await running.ended() == 2
    where = f"127.0.0.1:{replica.port}"
    assert running.said.decode() == (
        f"warmroute: cannot listen on {where}: address already in use; choose another --admin-port, or -1 for none\n"
    )
    assert replica.probes == []


def test_a_source_that_only_one_worker_could_hear_is_refused() -> None:
    flags = {"workers": "2", "event_sources": "gpu1:8000=tcp://*:5557"}
    with pytest.raises(ConfigError, match="of 2 workers only one could listen there"):
        Supervisor(load(replicas=["http://gpu1:8000"], flags=flags, environ={}))
