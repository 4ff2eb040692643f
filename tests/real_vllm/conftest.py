"""Replicas are running already (run.py starts them and says where); the router is started here, as a user would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from exchange import exchange
from replicas import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "fake_backend" / "tiny"
READY_SECONDS = 30.0

summary: list[str] = []
"""Lines that the run ends with."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if summary:
        terminalreporter.section("real vLLM")
        for line in summary:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def replicas() -> list[str]:
    """The replicas' addresses."""
    urls = os.environ.get("REAL_VLLM_URLS", "").split()
    if len(urls) != 2:
        pytest.fail("REAL_VLLM_URLS must name two replicas; tests/real_vllm/run.py starts them and sets it")
    return urls


@pytest.fixture
def router(replicas: list[str], tmp_path: Path) -> Iterator[str]:
    """A router of the test's own before replicas with empty caches; its address."""
    with _router(replicas, tmp_path) as url:
        yield url


@pytest.fixture(scope="module")
def lasting_router(replicas: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router for all tests of a file."""
    with _router(replicas, tmp_path_factory.mktemp("router")) as url:
        yield url


@contextlib.contextmanager
def _router(replicas: list[str], directory: Path, flags: tuple[str, ...] = ("--hash-seed", "0")) -> Iterator[str]:
    for url in replicas:
        # On some CPUs the engine dies of a first step that is tiny.
        assert exchange(url, "POST", "/v1/completions", {"prompt": [5] * 300, "max_tokens": 2}).status == 200
        assert exchange(url, "POST", "/reset_prefix_cache").status == 200
        # An engine tells of it with its next step, and not before. This one is too short to be cached.
        assert exchange(url, "POST", "/v1/completions", {"prompt": [5], "max_tokens": 1}).status == 200
    port = free_port()
    command = [sys.executable, "-m", "router", "serve", *replicas, "--port", str(port), "--admin-port", "-1"]
    command += ["--tokenizer", str(TINY), *flags]
    # WARMROUTE_* are the router's settings; those of this run aren't among them.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
    log = directory / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the router knows both replicas. /ready alone would be true with one of them."""
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError):
            if exchange(url, "GET", "/ready", timeout=5).status == 200 and log.read_text().count(" is ready") == 2:
                return
        time.sleep(0.1)
    pytest.fail(f"the router isn't ready:\n{log.read_text()}")
