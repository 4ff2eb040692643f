"""Children end with whoever started them, and a port in use is one clear line."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.processes import HOST, free_ports, port_is_free

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 60.0


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is the Linux kernel's")
def test_a_child_on_the_leash_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(100)"
    parent = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-m', 'bench.leash', str(os.getpid()), sys.executable, '-c', {child!r}]\n"
        "subprocess.run(command, start_new_session=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    try:
        assert until(lambda: pid_file.exists() and bool(pid_file.read_text()))
        pid = int(pid_file.read_text())
        assert running(pid)
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not running(pid))


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has reaped yet has ended too.
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(port_is_free(port) for port in ports)


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        assert not port_is_free(listener.getsockname()[1])


def test_the_demo_on_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        ended = bench("demo", "--port", str(port), "--seconds", "1")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == f"bench: port {port} is taken; name another: make demo DEMO_PORT={port + 1}\n"


@pytest.mark.parametrize(
    "wrong",
    [["--sessions", "0"], ["--sessions", "8,x"], ["--turns", "0"], ["--system-chars", "-1"], ["--replicas", "0"]],
)
def test_settings_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    ended = bench("hit-rate", *wrong)
    assert ended.returncode == 2
    assert wrong[0] in ended.stderr
    assert "Traceback" not in ended.stderr
