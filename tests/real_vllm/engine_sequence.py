"""One seeded sequence of requests, played to an engine, and what came of it: cached tokens, counters, KV events.

Conversations over shared prefixes, some of them salted, many of an exact number of blocks, in a pool that is too small
for them. tests/real_vllm/test_fake_engine.py plays it to real vLLM and to the fake; what real vLLM made of it is kept
in tests/data/vllm/sequence.json, where tests/fake_backend/test_sequence.py holds the fake to it without an engine.

    python tests/real_vllm/engine_sequence.py DIR      # DIR as install.py has it; rewrites the record
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

if __name__ == "__main__":
    from install import install
    from replicas import Replica, running

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "data" / "vllm" / "sequence.json"
FLAGS = ("--num-gpu-blocks-override", "40", "--max-model-len", "512", "--block-size", "32", "--max-num-seqs", "16")
BLOCK = 32
LIMIT = 512
VOCABULARY = range(300, 4000)


@dataclass
class Turn:
    """One request. ``answer``, ``cached`` are what the engine made of it."""

    talk: int
    prompt: list[int]
    max_tokens: int
    salt: str | None = None
    answer: list[int] = field(default_factory=list)
    cached: int = -1

    def body(self, answer: list[int] | None = None) -> dict[str, Any]:
        """With ``answer`` for a fake that is to give it."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self.salt is not None:
            body["cache_salt"] = self.salt
        if answer is not None:
            body["vllm_xargs"] = {"fake_answer_token_ids": answer}
        return body


class Script:
    """Makes turn after turn; each goes on from what its conversation has said so far."""

    def __init__(self, seed: int, talks: int = 8) -> None:
        self._draw = random.Random(seed)
        self._prefixes = [self._tokens(length) for length in (96, 70, 160)]
        self._talks = [self._fresh() for _ in range(talks)]

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(VOCABULARY, k=count)

    def _fresh(self) -> tuple[list[int], str | None]:
        salt = self._draw.choice((None, None, None, "tenant-A"))
        return list(self._draw.choice(self._prefixes)), salt

    def turn(self, lengths: tuple[int, ...] = (1, 3, 17, 32, 40)) -> Turn:
        talk = self._draw.randrange(len(self._talks))
        history, salt = self._talks[talk]
        added = self._draw.randint(1, 60)
        if self._draw.random() < 0.3:
            added += -(len(history) + added) % BLOCK
        most = self._draw.choice(lengths)
        prompt = history + self._tokens(added)
        if len(prompt) + most > LIMIT:
            self._talks[talk] = self._fresh()
            return self.turn(lengths)
        return Turn(talk, prompt, most, salt)

    def supposed(self, turn: Turn) -> None:
        """Go on as if the answer had been other words: all requests are known before any is made."""
        self._talks[turn.talk] = (turn.prompt + self._tokens(turn.max_tokens), turn.salt)

    def heard(self, turn: Turn) -> None:
        self._talks[turn.talk] = (turn.prompt + turn.answer, turn.salt)


def post(url: str, turn: Turn, answer: list[int] | None = None) -> None:
    from exchange import exchange

    got = exchange(url, "POST", "/v1/completions", turn.body(answer)).json()
    turn.answer = got["choices"][0]["token_ids"]
    turn.cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]


def play(url: str, seed: int, count: int) -> list[Turn]:
    """One after another."""
    script, turns = Script(seed), []
    for _ in range(count):
        turn = script.turn()
        post(url, turn)
        script.heard(turn)
        turns.append(turn)
    return turns


def waves(script: Script, count: int) -> list[list[Turn]]:
    """Requests of four different conversations at a time, with answers long enough for the pool to run out."""
    made = []
    for _ in range(count):
        wave: dict[int, Turn] = {}
        while len(wave) < 4:
            turn = script.turn((60, 90, 120))
            wave.setdefault(turn.talk, turn)
        made.append(list(wave.values()))
        for turn in wave.values():
            script.supposed(turn)
    return made


def play_four_at_a_time(url: str, made: list[list[Turn]], answers: list[list[Turn]] | None = None) -> list[list[Turn]]:
    """Four at once, the next four when all of them are done; ``answers`` are those that a fake is to give."""
    played = [[dataclasses.replace(turn) for turn in wave] for wave in made]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for place, wave in enumerate(played):
            given = [turn.answer for turn in answers[place]] if answers else [None] * len(wave)
            list(pool.map(post, [url] * len(wave), wave, given))
    return played


def counters(url: str) -> dict[str, int]:
    from exchange import exchange

    text = exchange(url, "GET", "/metrics").body.decode()
    wanted = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    return {
        name: int(float(match[1]))
        for name in wanted
        if (match := re.search(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))
    }


def events(replay_port: int) -> list[list[str]]:
    """Every batch since the engine began, each event in a line: S parent hashes, R hash, C."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.connect(f"tcp://127.0.0.1:{replay_port}")
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    while True:
        *_, number, payload = socket.recv_multipart()
        if int.from_bytes(number, "big", signed=True) < 0:
            break
        batches.append([line(event) for event in msgspec.msgpack.decode(payload)[1]])
    context.destroy(linger=0)
    return batches


def line(event: dict[str, Any]) -> str:
    match event["type"]:
        case "BlockStored":
            parent = event["parent_block_hash"]
            assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
            return f"S {short(parent) if parent else '-'} " + " ".join(map(short, event["block_hashes"]))
        case "BlockRemoved":
            return "R " + " ".join(map(short, event["block_hashes"]))
    return "C"


def short(key: int) -> str:
    return f"{key & 0xFFFFFF:06x}"


def record(directory: Path) -> None:
    replica = Replica(directory, directory / "logs", flags=FLAGS)
    install(directory)
    with running(replica):
        turns = play(replica.url, seed=7, count=300)
        value = {
            "turns": [
                {"talk": t.talk, "prompt": t.prompt, "max_tokens": t.max_tokens, "salt": t.salt, "answer": t.answer,
                 "cached": t.cached}
                for t in turns
            ],
            "counters": counters(replica.url),
            "events": events(replica.replay_port),
        }  # fmt: skip
    RECORD.write_text(json.dumps(pack(value), separators=(",", ":")) + "\n")


def pack(value: dict[str, Any]) -> dict[str, Any]:
    """A prompt that goes on from its conversation is kept as what is new in it."""
    said: dict[int, list[int]] = {}
    for turn in value["turns"]:
        prompt, before = turn["prompt"], said.get(turn["talk"], [])
        said[turn["talk"]] = prompt + turn["answer"]
        if before and prompt[: len(before)] == before:
            turn["prompt"], turn["goes_on"] = prompt[len(before) :], True
    return value


def unpack(value: dict[str, Any]) -> list[Turn]:
    said: dict[int, list[int]] = {}
    turns = []
    for item in value["turns"]:
        if item.pop("goes_on", False):
            item["prompt"] = said[item["talk"]] + item["prompt"]
        turns.append(Turn(**item))
        said[item["talk"]] = item["prompt"] + item["answer"]
    return turns


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
