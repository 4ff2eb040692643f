"""The measure of the shared index: whole, on real servers, with few questions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.overhead_decision import Figure
from tests.index.servers import Server, binaries


def figures(*flags: str) -> dict[str, Figure]:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "overhead", "redis", "--runs", "5", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["command"] == "overhead redis"
    return {each["name"]: Figure(**each) for each in document["figures"]}


def test_what_does_not_depend_on_the_machine_is_within_its_bars(tmp_path: Path) -> None:
    found = figures("--out", str(tmp_path))
    assert found["round trips a decision"].value == 1.0
    for name in ("long prompts", "short chats", "a prompt that all replicas hold"):
        assert 0 < found[name].value <= 130
    assert {name for name, figure in found.items() if figure.bar is not None} == {
        "round trips a decision",
        "decision, median",
        "decision, server's CPU",
        "longest call of all, writes included",
        "long prompts",
        "short chats",
        "a prompt that all replicas hold",
    }
    assert json.loads((tmp_path / "overhead-redis.json").read_text())["figures"]


@pytest.mark.parametrize("kind", sorted(binaries()))
async def test_a_given_server_is_left_as_it_was(kind: str) -> None:
    async with Server(binaries()[kind]) as server:
        await asyncio.to_thread(figures, "--server", server.url)
        link = await server.link()
        assert await link.call(b"KEYS", b"*") == []
        link.close()
