import asyncio
import os
import socket
import subprocess
import sys

from bench.forward_load import Run, Streams, bodies
from bench.forward_peers import NAMES, peers
from bench.overhead_forward import ROWS, Result, cpu_us, missed, resident_mb, tree
from bench.processes import Processes, free_ports


def _result(row: str, **values: float) -> Result:
    result = Result()
    for name, value in values.items():
        result.add(row, name, value)
    return result


def test_a_row_within_its_bar_and_below_the_others_is_not_missed() -> None:
    assert missed(_result("plain", nginx=20.0, smg=200.0, warmroute=36.0), ["smg"]) == []


def test_a_row_beyond_its_bar_is_missed() -> None:
    assert missed(_result("plain", nginx=20.0, warmroute=50.0), []) == [
        "1 KB POST: 50.0 us, 2.50 times nginx's, at the most 1.8 times"
    ]


def test_a_better_router_is_named_but_no_yardstick() -> None:
    found = _result("embed", nginx=20.0, smg=40.0, bare=15.0, warmroute=50.0)
    assert missed(found, ["smg"]) == ["1 KB embeddings: 50.0 us, but smg takes 40.0"]


def test_bounds_by_themselves() -> None:
    assert missed(_result("idle", nginx=14.0, warmroute=13.0), []) == ["1,000 idle streams: 13.0 MB, at the most 12"]
    assert missed(_result("open", warmroute=10.0), []) == ["open streams: 10.0, at least 10000"]


def test_errors_are_no_cheap_answers() -> None:
    found = _result("plain", nginx=20.0, smg=5.0, warmroute=30.0)
    found.count("plain", "smg", Run(requests=100, failed=50, p50_us=1.0))
    assert missed(found, ["smg"]) == []
    found.count("plain", "warmroute", Run(requests=1000, failed=1, p50_us=1.0))
    assert missed(found, ["smg"]) == ["1 KB POST: 1 requests failed"]


def test_medians_are_of_the_repeats() -> None:
    result = Result()
    for value in (9.0, 1.0, 5.0):
        result.add("sse", "nginx", value)
    assert result.median("sse", "nginx") == 5.0
    assert result.median("sse", "smg") is None


def test_the_rows_have_workloads_of_their_sizes() -> None:
    found = bodies(0)
    assert {row.key for row in ROWS} >= found.keys()
    sizes = {name: sum(map(len, body.parts)) + 8 * (len(body.parts) - 1) for name, body in found.items()}
    assert {name: round(size / 1000) for name, size in sizes.items()} == {
        "plain": 1,
        "embed": 1,
        "short": 3,
        "chat": 100,
        "long": 394,
    }
    for name in ("chat", "long"):
        body = found[name]
        before = body.earlier[3]
        follows = body.parts[0] + b"%08d" % 3 + body.parts[1]
        assert follows.startswith(before[: before.rindex(b"]")])


def test_a_process_tree_is_measured_whole() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"],
        stdin=subprocess.PIPE,
    )
    try:
        while len(tree(child.pid)) < 2:
            assert child.poll() is None
        assert tree(child.pid)[0] == child.pid
        assert resident_mb(child.pid) > resident_mb(os.getpid()) / 100
        assert cpu_us(child.pid) > 0
    finally:
        child.communicate(b"\n")


def test_every_router_has_a_command() -> None:
    found = peers(NAMES)
    assert [peer.name for peer in found] == [*NAMES, "bare", "warmroute"]
    assert all(peer.missing for peer in found if peer.name not in ("aiohttp", "bare", "warmroute") and peer.missing)


async def test_the_own_proxies_pass_requests_and_streams_on() -> None:
    backend, bare, plain = free_ports(3)
    async with Processes() as processes:
        await processes.module("replica", ["bench.forward_backend", str(backend)])
        url = f"http://127.0.0.1:{backend}"
        await processes.module("bare", ["bench.forward_proxies", "bare", str(bare), url])
        await processes.module("aiohttp", ["bench.forward_proxies", "aiohttp", str(plain), url])
        answers = [await _post(port) for port in (backend, bare, plain)]
        assert len(set(answers)) == 1
        assert answers[0].startswith(b'{"id":"score-')
        for port in (bare, plain):
            streams = Streams(f"http://127.0.0.1:{port}")
            assert await streams.open(3, "bench-paced") == 3
            while streams.events < 12:
                await asyncio.sleep(0.01)
            await streams.close()


async def _post(port: int) -> bytes:
    """The body of the answer to a POST, once someone listens."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except (ConnectionRefusedError, socket.gaierror):
            await asyncio.sleep(0.02)
            continue
        writer.write(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        head = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head.lower():
            size = int((await reader.readline()).strip(), 16)
            body = await reader.readexactly(size)
        else:
            length = head.lower().partition(b"content-length:")[2].split()[0]
            body = await reader.readexactly(int(length))
        writer.close()
        return body
