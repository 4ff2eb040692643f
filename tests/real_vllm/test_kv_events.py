"""What the router knows of caches far too small for their traffic, beside what the engines then have.

Two replicas with pools of 40 blocks and a hash seed of their own; conversations that are never there all at once. Every
request says what the router expects to be cached, every answer what was.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import _router, summary
from openai import AsyncOpenAI
from replicas import BLOCK_SIZE, Replica, running
from test_conversations import Conversation, Later, Turn, _said

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 300
ALIVE = 6
TURNS = 5
POOL = 40
SEED = "4242"
KNOWN = ("--hash-seed", SEED)
ROOM = 1216  # tokens of the longest request; the pool holds 39 blocks

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def small() -> Iterator[list[Replica]]:
    directory = Path(os.environ["REAL_VLLM_DIR"])
    flags = ("--num-gpu-blocks-override", str(POOL), "--max-model-len", str(ROOM))
    replicas = [Replica(directory, directory / "logs", seed=SEED, flags=flags) for _ in range(2)]
    with running(*replicas):
        yield replicas


async def converse(url: str, engine: str, count: int, seed: int) -> list[Later]:
    """So many turns of conversations, one after the other; of each what came before it, None at first."""
    draw = random.Random(seed)
    talks: list[Conversation] = []
    found: list[Later] = []
    begun = 0
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while len(found) < count:
            talks = [talk for talk in talks if len(talk.turns) < TURNS and room(talk)]
            while len(talks) < ALIVE:
                begun += 1
                kind = "chat" if begun % 2 else "completion"
                talks.append(Conversation(kind, stream=begun % 3 == 0, ids=False, free=begun % 4 == 0, seed=begun))
            talk = draw.choice(talks)
            await talk.turn(client, engine, _said(draw))
            found.append(Later(talk, talk.turns[-2] if len(talk.turns) > 1 else NOTHING, talk.turns[-1]))
    return found


NOTHING = Turn("", 0, 0, [], [], "")


def room(talk: Conversation) -> bool:
    return not talk.turns or len(talk.turns[-1].prompt) + 48 + 260 < ROOM


def exact(turns: list[Later]) -> str:
    right = sum(it.turn.predicted == it.turn.cached for it in turns)
    return f"{right} of {len(turns)} ({right / len(turns):.1%})"


def share(turns: list[Later]) -> float:
    return sum(it.turn.predicted == it.turn.cached for it in turns) / len(turns)


def varied(turns: list[Later]) -> None:
    """The test has seen what it is about: hits of many depths, and pasts that were evicted."""
    assert len({it.turn.cached for it in turns}) > 8
    assert any(it.turn.cached < len(it.before.prompt) - 2 * BLOCK_SIZE for it in turns if it.before is not NOTHING)
    assert len({it.turn.replica for it in turns}) == 2


async def test_with_events(small: list[Replica], tmp_path: Path) -> None:
    with _router([replica.url for replica in small], tmp_path, KNOWN) as url:
        turns = await converse(url, small[0].url, REQUESTS, 1)
    varied(turns)
    assert "block hashes proven: sha256_cbor, PYTHONHASHSEED=4242" in (tmp_path / "router.log").read_text()
    summary.append(f"pool of {POOL} blocks, {REQUESTS} requests over 2 replicas: predicted = delivered on")
    summary.append(f"  {exact(turns)} with KV events")
    assert share(turns) >= 0.99


async def test_without_events(small: list[Replica], tmp_path: Path) -> None:
    with _router([replica.url for replica in small], tmp_path, (*KNOWN, "--kv-events", "false")) as url:
        turns = await converse(url, small[0].url, REQUESTS, 2)
    varied(turns)
    whole = [it for it in turns if it.survived]
    summary.append(f"  {exact(whole)} without, where history survives being tokenized again")
    summary.append(f"  {exact(turns)} without, all")
    assert len(whole) > 0.8 * REQUESTS
    assert share(whole) >= 0.95


async def test_with_a_seed_that_the_router_does_not_know(small: list[Replica], tmp_path: Path) -> None:
    with _router([replica.url for replica in small], tmp_path, ()) as url:
        turns = await converse(url, small[0].url, REQUESTS, 3)
    varied(turns)
    assert "translated through token ids" in (tmp_path / "router.log").read_text()
    summary.append(f"  {exact(turns)} with KV events and a seed unknown to the router")
    assert share(turns) >= 0.99


async def test_a_replica_is_killed_and_comes_back(small: list[Replica], tmp_path: Path) -> None:
    killed = small[1]
    name = killed.url.removeprefix("http://")
    with _router([replica.url for replica in small], tmp_path, KNOWN) as url:
        before = await converse(url, small[0].url, 60, 4)
        killed.kill()
        killed.start()
        killed.wait()
        # The same conversations from the start: what the dead process held would be foretold for it.
        after = await converse(url, small[0].url, 120, 4)
    here = [it for it in after if it.turn.replica == name]
    assert len([it for it in before if it.turn.replica == name]) > 10
    assert len(here) > 10
    over = [str(it) for it in here if it.turn.predicted > it.turn.cached]
    summary.append(
        f"  killed and restarted: {len(over)} of {len(here)} requests to the new process were foretold more than it "
        f"had, the first {here[0].turn.predicted} tokens; exact on {exact(here)}"
    )
    assert here[0].turn.predicted == 0
    assert over == []
