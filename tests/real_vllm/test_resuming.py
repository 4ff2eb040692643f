"""One of two real replicas is killed while it streams: the other one finishes its answers, word for word and token for
token as an engine that nobody disturbs gives them, or the client is told that it can't be."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import TINY, _router, summary
from exchange import exchange
from openai import APIError, AsyncOpenAI
from replicas import SERVED_NAME, Replica, running

from router.prompt.tokens import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZER = Tokenizer.load(TINY)
STREAMS = 24
TOKENS = 160
BEGUN = 12  # chunks of each stream, when the replica is killed
FLAGS = ("--hash-seed", "0", "--probe-seconds", "0.2")


@dataclass(frozen=True)
class Pair:
    doomed: Replica
    other: Replica
    url: str


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    directory = Path(os.environ["REAL_VLLM_DIR"])
    # What is computed as a prompt differs from what was computed token by token in its last bits. In float32 that
    # decides no token.
    doomed, other = (Replica(directory, directory / "logs", flags=("--dtype", "float32")) for _ in range(2))
    with running(doomed, other):
        for replica in (doomed, other):
            # This build's first step must not be one of a single token.
            body = {"model": SERVED_NAME, "prompt": [7] * 300, "max_tokens": 4}
            assert exchange(replica.url, "POST", "/v1/completions", body).status == 200
        with _router([doomed.url, other.url], tmp_path, FLAGS) as url:
            yield Pair(doomed, other, url)


@dataclass
class Told:
    """What a client was given."""

    replica: str | None = None
    text: str = ""
    chunks: int = 0
    roles: int = 0
    ids: frozenset[str] = frozenset()
    finish: str | None = None
    usage: tuple[int, int, int] | None = None
    error: str | None = None


def question(number: int) -> dict[str, Any]:
    """Chats, texts and token ids, with and without usage; some end by their bound, some by themselves."""
    asked: dict[str, Any] = {"model": SERVED_NAME, "temperature": 0, "stream": True, "max_tokens": TOKENS - number}
    if number % 2:
        asked["extra_body"] = {"ignore_eos": True}
    if number % 4 < 2:
        asked["stream_options"] = {"include_usage": True}
    if number % 8 == 1:
        asked["stream_options"]["continuous_usage_stats"] = True
    text = f"Question {number}: " + " ".join(["why", "does", "the", "sea", "rise", "at", "night"][: 1 + number % 7])
    if number % 3 == 0:
        return asked | {"messages": [{"role": "user", "content": text}]}
    return asked | {"prompt": text if number % 3 == 1 else TOKENIZER.encode(text, False)}


async def ask(client: AsyncOpenAI, number: int, begun: asyncio.Event | None = None) -> Told:
    told, asked = Told(), question(number)
    create = client.chat.completions if "messages" in asked else client.completions
    raw = await create.with_raw_response.create(**asked)
    told.replica = raw.headers.get("x-warmroute-replica")
    try:
        async for chunk in raw.parse():
            told.chunks += 1
            told.ids |= {chunk.id}
            if chunk.usage is not None:
                told.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens)
            for choice in chunk.choices:
                if "messages" in asked:
                    told.roles += choice.delta.role is not None
                    told.text += choice.delta.content or ""
                else:
                    told.text += choice.text
                told.finish = choice.finish_reason or told.finish
            if begun is not None and told.chunks == BEGUN:
                begun.set()
    except APIError as error:
        told.error = str(error)
    if begun is not None:
        begun.set()
    return told


async def killed(pair: Pair) -> tuple[list[Told], list[Told]]:
    """All answers, undisturbed and disturbed."""
    async with (
        AsyncOpenAI(base_url=f"{pair.other.url}/v1", api_key="none", max_retries=0) as engine,
        AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=120) as router,
    ):
        undisturbed = [await ask(engine, number) for number in range(STREAMS)]
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(ask(router, *each)) for each in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        pair.doomed.kill()
        return undisturbed, await asyncio.gather(*streams)


def test_what_a_dead_replica_had_begun_is_finished(pair: Pair) -> None:
    undisturbed, told = asyncio.run(killed(pair))
    page = urllib.request.urlopen(f"{pair.url}/metrics", timeout=10).read().decode()
    resumed = sum(
        float(x.rpartition(" ")[2]) for x in page.splitlines() if x.startswith("warmroute_resumed_answers_total")
    )
    errors, wrong = 0, []
    for number, (whole, got) in enumerate(zip(undisturbed, told, strict=True)):
        if got.error is not None:
            errors += 1
            if "broke off" not in got.error or not whole.text.startswith(got.text):
                wrong.append(f"{number}: {got.error}, after {got.text!r} instead of {whole.text!r}")
        elif (got.text, got.finish, got.usage) != (whole.text, whole.finish, whole.usage):
            wrong.append(f"{number}: {got} instead of {whole}")
        elif (len(got.ids), got.roles) != (1, whole.roles):
            wrong.append(f"{number}: ids {got.ids}, {got.roles} roles")
    why = [line for line in page.splitlines() if line.startswith("warmroute_unresumed_answers_total")]
    doomed = sum(got.replica is not None and pair.doomed.url.endswith(got.replica) for got in told)
    summary.append(
        f"killed while streaming: {doomed} of {STREAMS} streams; {resumed:.0f} resumed, {errors} told; {why}"
    )
    assert not wrong, "\n".join(wrong)
    assert resumed >= 4
    assert resumed + errors <= doomed
