"""Eight interleaved conversations through the router: each stays where its cache is, and every hit is foretold.

The official client, chat and completions, streamed and not. For every request the router says which replica it chose
and how many tokens it expects to be cached there; the engine says how many were (`usage.prompt_tokens_details`).

An answer is cached as the tokens that were generated, but comes back in the next turn as text, and text may be
tokenized in another way: such an answer "did not survive". Where the client asks for token ids the router sees them too
and must predict every hit exactly. Where it has the text alone it can't know, so the turn after an answer that did not
survive is counted and shown; every other turn must be predicted exactly.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import TINY, summary
from exchange import exchange
from openai import AsyncOpenAI
from replicas import BLOCK_SIZE, SERVED_NAME
from tokenizers import Tokenizer

TURNS = 6
END = 2  # <|im_end|>
MAX_TOKENS = 48
RULES = "You are the keeper of a small lighthouse. " * 25  # shared by all: about 8 blocks


@dataclass
class Turn:
    replica: str
    predicted: int
    cached: int
    prompt: list[int]
    output: list[int]
    finish: str

    def computed(self) -> list[int]:
        """What the engine's cache was given: the last token was sampled, but never an input."""
        return self.prompt + self.output[:-1]


@dataclass
class Conversation:
    """`kind`: chat or completion. `ids`: the client asks for token ids. `free`: any token may be generated; else only
    whole words, of which every sequence is tokenized again as it was generated."""

    kind: str
    stream: bool
    ids: bool
    free: bool
    seed: int
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": RULES}])
    text: str = RULES
    turns: list[Turn] = field(default_factory=list)

    def __str__(self) -> str:
        traits = {"streamed": self.stream, "ids": self.ids, "free": self.free}
        return ", ".join([self.kind, *(name for name, has in traits.items() if has)])

    async def turn(self, client: AsyncOpenAI, url: str, said: str) -> None:
        """One question and its answer."""
        extra: dict[str, Any] = {"return_tokens_as_token_ids": True}
        if self.ids:
            extra["return_token_ids"] = True
        if not self.free:
            extra["allowed_token_ids"] = [*WORDS, END]
        options: dict[str, Any] = {
            "model": SERVED_NAME,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": self.seed * 100 + len(self.turns),
            "logit_bias": {str(END): 3.0},
            "stream": self.stream,
            "extra_body": extra,
        }
        if self.stream:
            options["stream_options"] = {"include_usage": True}
        if self.kind == "chat":
            self.messages.append({"role": "user", "content": said})
            tokenized = {"messages": self.messages}
            sent = client.chat.completions.with_raw_response.create(messages=self.messages, logprobs=True, **options)
        else:
            self.text += f"\nQuestion: {said}\nAnswer:"
            tokenized = {"prompt": self.text}
            sent = client.completions.with_raw_response.create(prompt=self.text, logprobs=0, **options)
        raw = await sent
        parsed = raw.parse()
        chunks = [chunk async for chunk in parsed] if self.stream else [parsed]
        text, output, finish, usage = "", [], "", None
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if self.kind == "chat":
                    text += (choice.delta if self.stream else choice.message).content or ""
                    tokens = [t.token for t in choice.logprobs.content] if choice.logprobs else []
                else:
                    text += choice.text
                    tokens = choice.logprobs.tokens if choice.logprobs else []
                output += [int(token.removeprefix("token_id:")) for token in tokens]
        assert usage is not None
        assert len(output) == usage.completion_tokens
        # In a thread: the replica is asked itself, behind the router's back.
        answer = await asyncio.to_thread(exchange, url, "POST", "/tokenize", tokenized)
        prompt = answer.json()["tokens"]
        assert len(prompt) == usage.prompt_tokens
        details = usage.prompt_tokens_details
        self.turns.append(
            Turn(
                replica=raw.headers["x-warmroute-replica"],
                predicted=int(raw.headers["x-warmroute-predicted-tokens"]),
                cached=(details.cached_tokens or 0) if details else 0,
                prompt=prompt,
                output=output,
                finish=finish,
            )
        )
        self.messages.append({"role": "assistant", "content": text})
        self.text += text


def words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a space and a word of letters: the tokenizer splits text before each, so they never merge."""
    found = []
    for token, number in tokenizer.get_vocab().items():
        text = tokenizer.decode([number])
        word = token.startswith("Ġ") and text[1:].isascii() and text[1:].isalpha()
        if word and tokenizer.encode(text, add_special_tokens=False).ids == [number]:
            found.append(number)
    return sorted(found)


TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
WORDS = words(TOKENIZER)


def conversations() -> list[Conversation]:
    return [
        Conversation("chat", stream=False, ids=False, free=False, seed=1),
        Conversation("chat", stream=True, ids=False, free=False, seed=2),
        Conversation("chat", stream=False, ids=False, free=True, seed=3),
        Conversation("chat", stream=True, ids=True, free=True, seed=4),
        Conversation("completion", stream=False, ids=False, free=False, seed=5),
        Conversation("completion", stream=True, ids=False, free=False, seed=6),
        Conversation("completion", stream=False, ids=True, free=False, seed=7),
        Conversation("completion", stream=True, ids=True, free=True, seed=8),
    ]


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "all at once"])
async def test_eight_conversations(router: str, replicas: list[str], together: bool) -> None:
    draw = random.Random(7)
    talks = conversations()
    async with AsyncOpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0) as client:
        for _ in range(TURNS):
            draw.shuffle(talks)
            steps = [talk.turn(client, replicas[0], _said(draw)) for talk in talks]
            if together:
                await asyncio.gather(*steps)
            else:
                for step in steps:
                    await step

    firsts = [talk.turns[0] for talk in talks]
    later = [Later(talk, *pair) for talk in talks for pair in itertools.pairwise(talk.turns)]
    moved = [str(it) for it in later if it.turn.replica != it.before.replica]
    altered = [it for it in later if not it.survived]
    unknown = [it for it in altered if not it.talk.ids]
    foretold = [it for it in later if it.survived or it.talk.ids]
    wrong = [str(it) for it in foretold if it.turn.predicted != it.turn.cached]
    # First turns share their beginning. Sent at one moment, two of them may reach the engine in another order than
    # they reached the router: what one was to find, the other finds.
    for replica in {turn.replica for turn in firsts}:
        here = [turn for turn in firsts if turn.replica == replica]
        found = [(sorted(t.predicted for t in here), sorted(t.cached for t in here))]
        if not together:
            found = [(t.predicted, t.cached) for t in here]
        wrong += [f"first turns at {replica}: predicted {p}, had {c}" for p, c in found if p != c]
    turns = [turn for talk in talks for turn in talk.turns]
    known = len(firsts) + len(foretold)
    placed = collections.Counter(turn.replica for turn in firsts)
    summary.extend(
        [
            f"{len(talks)} conversations of {TURNS} turns, {'all at once' if together else 'one after the other'}:",
            f"  {len(later) - len(moved)} of {len(later)} later turns went to the replica that had them",
            f"  {known - len(wrong)} of {known} predicted hits equal the engine's cached tokens",
            f"  {len(altered)} of {len(later)} answers did not survive being tokenized again as text:",
            f"    {len(altered) - len(unknown)} whose ids the client asked for, so that the router knew and was right",
            f"    {len(unknown)} that only the engine could know of; the turns after them are left out above",
            f"  {sum(t.cached for t in turns)} of {sum(len(t.prompt) for t in turns)} prompt tokens were cached, in "
            f"blocks of {BLOCK_SIZE}; conversations per replica: {', '.join(str(n) for n in placed.values())}",
        ]
    )
    assert wrong == []
    if together:
        # A busy replica's queue may outweigh a short past.
        assert len(moved) <= len(later) // 4, moved
    else:
        assert moved == []
    # The test has seen what it is about: both replicas, both ways to end, answers of both kinds, hits that grow.
    assert len(placed) == 2
    assert {turn.finish for turn in turns} == {"stop", "length"}
    assert 0 < len(unknown) < len(altered) < len(later) // 2
    assert all(it.turn.cached > 0 for it in later if it.turn.replica == it.before.replica)


@dataclass
class Later:
    """A turn that isn't its conversation's first, with the one before it."""

    talk: Conversation
    before: Turn
    turn: Turn

    def __str__(self) -> str:
        at = f"{self.before.replica} then {self.turn.replica}"
        return f"{self.talk}: {at}: predicted {self.turn.predicted}, had {self.turn.cached} of {len(self.turn.prompt)}"

    @property
    def survived(self) -> bool:
        """Whether this prompt begins with all that the turn before left in the cache."""
        computed = self.before.computed()
        return self.turn.prompt[: len(computed)] == computed


def _said(draw: random.Random) -> str:
    return TOKENIZER.decode(draw.choices(WORDS, k=draw.randint(20, 90))).strip().capitalize() + "?"
