"""How many blocks a replica is taken to hold, whatever is sent there."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.wire.conftest import Bench, probed
from tests.wire.scripted import Raw, Received, Script, answer, until

STARTED = b"process_start_time_seconds 1.0\n"


def cache(**labels: object) -> bytes:
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return b"vllm:cache_config_info{%s} 1.0\n" % text.encode() + STARTED


EMPTY = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
USAGE = {"usage": {"prompt_tokens": 320, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}


def says(**members: object) -> Script:
    """Answers without a text."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(json.dumps({**EMPTY, **members}).encode()))

    return script


async def send(client: Raw, seed: int, blocks: int) -> int:
    """A prompt of just so many blocks of 16 tokens, and no answer that takes another; what was predicted of it."""
    prompt = f"{seed:08d}" + "x" * (64 * blocks - 8)
    client.post("/v1/completions", json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode())
    reply = await client.reply()
    assert reply.status == 200
    return int(reply.header(b"x-warmroute-predicted-tokens") or b"")


POOLS = {
    "one block is the engine's null block": (cache(block_size=16, num_gpu_blocks=100), {}, 99),
    "a hybrid model counts in larger blocks": (
        cache(block_size=528, hash_block_size=16, num_gpu_blocks=4, cache_hit_alignment_tokens=528),
        {},
        3 * 33,
    ),
    "no more than we mean to remember": (
        cache(block_size=16, num_gpu_blocks=100_000),
        {"max_pool_blocks": 50},
        50,
    ),
    "untold": (STARTED, {"default_pool_blocks": 40}, 40),
    "no pool at all": (cache(block_size=16, num_gpu_blocks=1), {}, 1),
}


@pytest.mark.parametrize(("metrics", "changes", "blocks"), POOLS.values(), ids=POOLS.keys())
async def test_the_pool_is_the_engines(bench: Bench, metrics: bytes, changes: dict[str, int], blocks: int) -> None:
    replica = await bench.replica(says())
    replica.metrics = metrics
    router = await bench.router(replica, probe_seconds=60, **changes)
    client = await bench.client(router)
    for seed in range(blocks // 10 + 3):
        await send(client, seed, 10)
    assert router.index.blocks(replica.name) == blocks
    await send(client, 99, 300)
    assert router.index.blocks(replica.name) == blocks
    router._sized(router.fleet[replica.name])  # as each sweep does
    assert router.index.capacity(replica.name) == blocks


@pytest.mark.fault("unbounded index")
async def test_thousands_of_prompts_are_no_more_than_a_pool(bench: Bench) -> None:
    replica = await bench.replica(says())
    replica.metrics = cache(block_size=16, num_gpu_blocks=1001)
    router = await bench.router(replica, probe_seconds=60)
    client = await bench.client(router)
    for seed in range(5000):
        await send(client, seed, 2)
    assert router.index.blocks(replica.name) == 1000
    # The latest are the ones that are kept; of each, the last block may not be a hit.
    assert [await send(client, seed, 2) for seed in (4999, 4501, 0)] == [16, 16, 0]


async def test_predictions_that_were_too_high_shrink_the_pool(bench: Bench) -> None:
    """The engine says that it had nothing where 19 blocks were predicted: others must be using it too."""
    replica = await bench.replica(says(**USAGE))
    replica.metrics = cache(block_size=16, num_gpu_blocks=101)
    router = await bench.router(replica, probe_seconds=60)
    client = await bench.client(router)
    for seed in range(6):
        await send(client, seed, 20)
    assert router.index.blocks(replica.name) == 100
    assert await send(client, 5, 20) == 19 * 16
    await until(lambda: router.index.blocks(replica.name) == 98, "2 % smaller")


async def test_a_pool_that_changes_is_noticed(bench: Bench) -> None:
    replica = await bench.replica(says())
    replica.metrics = cache(block_size=16, num_gpu_blocks=101)
    router = await bench.router(replica, probe_seconds=60)
    client = await bench.client(router)
    for seed in range(6):
        await send(client, seed, 20)
    replica.metrics = cache(block_size=16, num_gpu_blocks=31)
    await probed(router, replica)
    assert router.index.blocks(replica.name) == 30
