"""Clients that talk through the official openai client without pause, and judge every answer that they get."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai

MODEL = "Qwen3-0.6B"
SYSTEM = "You keep a lighthouse and answer with regard to the weather. " * 20
# A request that takes longer than this hangs.
HANG_SECONDS = 120.0
LEAVING = 0.05


@dataclass(slots=True)
class Findings:
    """How requests ended, and what must not have happened."""

    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def found(self, what: str) -> None:
        self.wrong.append(f"{time.monotonic() - self.begun:6.1f} s  {what}")


class Talker:
    """One client: conversations of a few turns and single completions, streamed or not; some it leaves midway."""

    def __init__(self, client: openai.AsyncOpenAI, seed: str, findings: Findings) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._findings = findings
        self._talk: list[dict[str, str]] = []
        self.stopping = False

    async def run(self) -> None:
        while not self.stopping:
            await self._one()

    async def _one(self) -> None:
        rng = self._rng
        chat, stream = rng.random() < 0.7, rng.random() < 0.6
        tokens = rng.randint(5, 80)
        options: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        if chat:
            if len(self._talk) > 8 or not self._talk or rng.random() < 0.1:
                self._talk = [{"role": "system", "content": SYSTEM}]
            words = " ".join(str(rng.randrange(10_000)) for _ in range(rng.randint(3, 200)))
            self._talk.append({"role": "user", "content": words})
            create, options["messages"] = self._client.chat.completions.with_streaming_response.create, self._talk
        else:
            create = self._client.completions.with_streaming_response.create
            options["prompt"] = [rng.randrange(100, 700) for _ in range(rng.randint(1, 1500))]
        kind = f"{'chat' if chat else 'completion'}{', stream' if stream else ''}"
        begun = False
        try:
            # Of a whole answer, too, the client then knows when it begins.
            async with asyncio.timeout(HANG_SECONDS), create(**options) as response:
                begun = True
                answer = await response.parse()
                text = await self._read(answer, chat, tokens, kind) if stream else self._whole(answer, chat, tokens)
        except TimeoutError:
            self._findings.found(f"{kind}: no end within {HANG_SECONDS:g} s")
        except Exception as error:
            if not isinstance(error, openai.APIError) and not type(error).__module__.startswith("httpx"):
                raise
            said = f"{type(error).__name__}: {error}"
            if begun:
                # An error event or a broken connection: the client knows that this is not the whole.
                self._findings.endings["honest error" if stream else "broken off"] += 1
            else:
                self._findings.found(f"{kind}: failed before its first byte: {said[:300]}")
        else:
            if chat and text:
                self._talk.append({"role": "assistant", "content": text})
                return
        self._talk.clear()

    def _whole(self, answer: Any, chat: bool, tokens: int) -> str:
        choice = answer.choices[0]
        text = (choice.message.content if chat else choice.text) or ""
        if choice.finish_reason != "length" or answer.usage.completion_tokens != tokens:
            self._findings.found(f"whole answer: {choice.finish_reason}, {answer.usage} for {tokens} tokens")
        self._findings.endings["complete"] += 1
        return text

    async def _read(self, answer: Any, chat: bool, tokens: int, kind: str) -> str:
        """The text of a stream; empty where it was left."""
        leave_after = self._rng.randint(0, 20) if self._rng.random() < LEAVING else None
        text, reason, usage, pieces = "", None, None, 0
        async for event in answer:
            if pieces == leave_after:
                await answer.close()
                self._findings.endings["left"] += 1
                return ""
            for choice in event.choices:
                piece = (choice.delta.content if chat else choice.text) or ""
                pieces += bool(piece)
                text += piece
                reason = choice.finish_reason or reason
            usage = event.usage or usage
        if reason is None:
            self._findings.found(f"{kind}: ended in the middle as if it were whole, after {pieces} pieces")
        elif reason != "length" or usage is None or usage.completion_tokens != tokens:
            self._findings.found(f"{kind}: {reason}, {usage} for {tokens} tokens")
        self._findings.endings["complete"] += 1
        return text
