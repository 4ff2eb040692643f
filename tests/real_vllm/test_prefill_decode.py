"""Prompts computed by one real engine and answered by another, joined by NIXL over TCP.

Every request is split, which over such a link none would be. The answers have to be those of an engine that has no
part in it, at temperature 0; then the one that computes is killed in the middle of the next requests, and no client may
notice. Both ways in which vLLM deals with a KV that does not come are tried: to fail the request, and to compute it.
"""

from __future__ import annotations

import asyncio
import os
import random
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import _router, summary
from exchange import exchange
from openai import AsyncOpenAI
from replicas import SERVED_NAME, Replica, running
from test_conversations import TOKENIZER, WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 100
AFTER = 60
KILLED_AFTER = 20  # of these
AT_ONCE = 4
FLAGS = ("--hash-seed", "0", "--split", "always")

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Ask:
    kind: str
    stream: bool
    text: str
    tokens: int

    async def of(self, client: AsyncOpenAI) -> tuple[str, str | None, Any]:
        """The answer's words, who computed the prompt, and the usage."""
        options: dict[str, Any] = {"model": SERVED_NAME, "max_tokens": self.tokens, "temperature": 0}
        options |= {"stream": self.stream, "extra_body": {"allowed_token_ids": WORDS}}
        if self.stream:
            options["stream_options"] = {"include_usage": True}
        if self.kind == "chat":
            messages = [{"role": "user", "content": self.text}]
            raw = await client.chat.completions.with_raw_response.create(messages=messages, **options)
        else:
            raw = await client.completions.with_raw_response.create(prompt=self.text, **options)
        parsed = raw.parse()
        chunks = [chunk async for chunk in parsed] if self.stream else [parsed]
        words, usage = "", None
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if self.kind == "chat":
                    words += (choice.delta if self.stream else choice.message).content or ""
                else:
                    words += choice.text
        return words, raw.headers.get("x-warmroute-prefill"), usage


def asks(count: int, seed: int) -> list[Ask]:
    draw = random.Random(seed)
    rules = TOKENIZER.decode(draw.choices(WORDS, k=200))  # shared by some, so that a part of them is cached
    made = []
    for i in range(count):
        text = TOKENIZER.decode(draw.choices(WORDS, k=draw.randint(20, 400)))
        made.append(Ask("chat" if i % 2 else "completion", i % 3 == 0, (rules if i % 4 == 0 else "") + text, 8 + i % 9))
    return made


@dataclass(frozen=True)
class Pair:
    prefill: Replica
    decode: Replica
    url: str


@pytest.fixture(scope="module", params=["fail", "recompute"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = Path(os.environ["REAL_VLLM_DIR"])
    prefill = Replica(directory, directory / "logs", role="kv_producer")
    decode = Replica(directory, directory / "logs", role="kv_consumer", load_failure=request.param)
    with running(prefill, decode):
        for replica in (prefill, decode):
            # This build's first step must not be one of a single token, which is what a fetched prompt leaves to do.
            body = {"model": SERVED_NAME, "prompt": [7] * 300, "max_tokens": 4}
            assert exchange(replica.url, "POST", "/v1/completions", body).status == 200
        with _router([prefill.url, decode.url], tmp_path_factory.mktemp("router"), FLAGS) as url:
            yield Pair(prefill, decode, url)


async def alike(pair: Pair, alone: str, requests: list[Ask], after: int = 0) -> tuple[int, list[str]]:
    """Ask all through the router and, before it, an engine that serves alone. Returns how many were split, and what
    differs or failed. With `after`, the replica that computes prompts is killed when so many have been answered."""
    wrong: list[str] = []
    split = done = 0
    gate = asyncio.Semaphore(AT_ONCE)
    async with (
        AsyncOpenAI(base_url=f"{alone}/v1", api_key="none", max_retries=0) as engine,
        AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120) as router,
    ):
        wanted = [await ask.of(engine) for ask in requests]

        async def one(ask: Ask, whole: tuple[str, str | None, Any]) -> None:
            nonlocal split, done
            async with gate:
                try:
                    words, prefill, usage = await ask.of(router)
                except Exception as error:
                    wrong.append(f"{ask.kind}, stream {ask.stream}: {error!r}")
                    return
            done += 1
            split += prefill is not None
            if words != whole[0]:
                wrong.append(f"{ask.kind}, stream {ask.stream}: {words!r} instead of {whole[0]!r}")
            if usage.prompt_tokens != whole[2].prompt_tokens or usage.completion_tokens != whole[2].completion_tokens:
                wrong.append(f"{ask.kind}, stream {ask.stream}: usage {usage} instead of {whole[2]}")
            if after and done == after:
                pair.prefill.kill()

        await asyncio.gather(*(one(*each) for each in zip(requests, wanted, strict=True)))
    return split, wrong


def counted(url: str, name: str) -> float:
    page = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


async def test_split_answers_are_those_of_one_engine(pair: Pair, replicas: list[str]) -> None:
    split, wrong = await alike(pair, replicas[0], asks(REQUESTS, seed=1))
    fetched = counted(pair.decode.url, "vllm:nixl_bytes_transferred_sum")
    summary.append(
        f"prefill and decode apart ({pair.decode.load_failure}): {REQUESTS} requests, {split} split, "
        f"{len(wrong)} unlike one engine's; {fetched:.0f} bytes of KV fetched"
    )
    assert wrong == []
    assert split == REQUESTS
    assert fetched > 0
    assert counted(pair.decode.url, "vllm:nixl_num_failed_transfers_total") == 0
    assert counted(pair.prefill.url, "vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_no_request_fails_when_the_prefill_replica_dies(pair: Pair, replicas: list[str]) -> None:
    split, wrong = await alike(pair, replicas[0], asks(AFTER, seed=2), after=KILLED_AFTER)
    fallbacks = counted(pair.url, "warmroute_split_fallbacks_total")
    summary.append(
        f"prefill replica killed ({pair.decode.load_failure}): {AFTER} requests, {split} split before it, "
        f"{fallbacks:.0f} answered otherwise, {len(wrong)} failed or unlike one engine's"
    )
    assert wrong == []
    assert KILLED_AFTER <= split < AFTER
    assert exchange(pair.decode.url, "GET", "/health").status == 200
