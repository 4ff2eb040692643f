"""Plays chat scripts against one address as a user's client would, streaming, and records what came back."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any

import aiohttp

from bench.ceilings import Exchange
from bench.workloads import Script, Turn

REPLICA_HEADER = "x-warmroute-replica"
PREDICTED_HEADER = "x-warmroute-predicted-tokens"
_TIMEOUT = aiohttp.ClientTimeout(total=300, sock_connect=10)


@dataclass(frozen=True, slots=True)
class Record:
    """One request: times in seconds on one monotonic clock, counts in tokens as the replica's `usage` gives them.

    `error` is None where the whole answer came. `exchange` holds the token ids, where the replica returned them, and
    `predicted_tokens` what the router expected to be cached, where it said so.
    """

    session: int
    turn: int
    sent_s: float
    ttft_s: float
    ended_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    answer_tokens: int = 0
    replica: str = ""
    exchange: Exchange | None = None
    error: str | None = None


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    answer_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    done: bool = False
    error: str | None = None


class Client:
    """Plays scripts against `base_urls`, each request to the next of them in turn. `on_record` sees each record as its
    request ends.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_urls: str | Sequence[str],
        model: str,
        on_record: Callable[[Record], None],
    ) -> None:
        self._session = session
        self._base_urls = cycle([base_urls] if isinstance(base_urls, str) else base_urls)
        self._model = model
        self._on_record = on_record

    async def play(self, script: Script) -> None:
        """Play one conversation to its end; a failed turn ends it, since the next ones would build on nothing."""
        messages = [{"role": "system", "content": script.system}] if script.system else []
        for number, turn in enumerate(script.turns):
            await asyncio.sleep(turn.think_s)
            messages.append({"role": "user", "content": turn.user})
            record, text = await self._ask(script.session, number, turn, messages)
            self._on_record(record)
            if record.error is not None:
                return
            messages.append({"role": "assistant", "content": text})

    async def _ask(self, session: int, number: int, turn: Turn, messages: list[dict[str, str]]) -> tuple[Record, str]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        answer, replica, predicted, sent = _Answer(), "", None, perf_counter()
        try:
            async with self._session.post(f"{next(self._base_urls)}/v1/chat/completions", json=body) as response:
                replica = response.headers.get(REPLICA_HEADER, "")
                predicted = response.headers.get(PREDICTED_HEADER)
                if response.status == 200:
                    await _read(response.content, answer)
                else:
                    answer.error = f"status {response.status}: {(await response.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        ended = perf_counter()
        if answer.error is None and not answer.done:
            answer.error = "the stream ended early"
        known = answer.prompt_ids is not None
        record = Record(
            session=session,
            turn=number,
            sent_s=sent,
            ttft_s=(answer.first_s or ended) - sent,
            ended_s=ended,
            prompt_tokens=answer.usage.get("prompt_tokens", 0),
            cached_tokens=(answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            predicted_tokens=int(predicted) if predicted else None,
            answer_tokens=answer.usage.get("completion_tokens", 0),
            replica=replica,
            exchange=Exchange(tuple(answer.prompt_ids or ()), tuple(answer.answer_ids)) if known else None,
            error=answer.error,
        )
        return record, "".join(answer.text)


async def _read(lines: aiohttp.StreamReader, answer: _Answer) -> None:
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            answer.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = f"in the stream: {event['error'].get('message', event['error'])}"
            continue
        if answer.first_s is None:
            answer.first_s = perf_counter()
        answer.usage = event.get("usage") or answer.usage
        answer.prompt_ids = event.get("prompt_token_ids") or answer.prompt_ids
        for choice in event.get("choices", ()):
            answer.text.append(choice.get("delta", {}).get("content") or "")
            answer.answer_ids += choice.get("token_ids") or ()


async def play_all(base_url: str, model: str, scripts: Iterable[Script]) -> list[Record]:
    """Play all scripts at their start times, side by side; return the records in the order in which they were sent."""
    records: list[Record] = []

    async def later(client: Client, script: Script) -> None:
        await asyncio.sleep(script.start_s)
        await client.play(script)

    async with open_session() as session, asyncio.TaskGroup() as group:
        client = Client(session, base_url, model, records.append)
        for script in scripts:
            group.create_task(later(client, script))
    return sorted(records, key=lambda record: record.sent_s)


def open_session() -> aiohttp.ClientSession:
    """Return a client session without a bound on connections and with lines long enough for token ids."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=_TIMEOUT, read_bufsize=1 << 22, trust_env=False
    )
