"""The router's reading of prompts and answers against a live engine, without the router between."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY
from exchange import exchange
from install import vllm_python
from prompts import CHAT, COMPLETION
from replicas import BLOCK_SIZE

from router.prompt.blocks import Extra, Hasher
from router.prompt.reader import Reader
from router.prompt.request import read
from router.prompt.tokens import Tokenizer


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(Tokenizer.load(TINY))


def stored(url: str) -> set[int]:
    """Keys of all blocks that the engine ever reported as stored."""
    sources = exchange(url, "GET", "/kv_event_sources").json()
    port = sources["0"]["replay_endpoint"].rpartition(":")[2]
    python = vllm_python(Path(os.environ["REAL_VLLM_DIR"]))
    script = str(Path(__file__).with_name("replay_events.py"))
    output = subprocess.run([str(python), script, port], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    batches = [json.loads(line) for line in output.splitlines()]
    return {
        key for b in batches for event in b["events"] if event["type"] == "BlockStored" for key in event["block_hashes"]
    }


def some_text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("aeiou stnr\n.é漢🙂{}<|>0123456789", k=length))


@pytest.mark.parametrize("seed", range(12))
def test_the_engine_stores_the_blocks_that_the_router_expects(replicas: list[str], reader: Reader, seed: int) -> None:
    """All blocks of the prompt and, known by its token ids, of the answer, and none beyond."""
    draw = random.Random(seed)
    salt = f"salt {seed}" if seed % 2 else None
    request: dict[str, Any] = {
        "max_tokens": draw.randint(1, 70),
        "temperature": 1,
        "seed": seed,
        "return_token_ids": True,
    }
    request["logit_bias"] = {"2": 3.0}
    if salt:
        request["cache_salt"] = salt
    if seed % 3:
        path = CHAT
        turns = [{"role": draw.choice(["user", "assistant"]), "content": some_text(draw, 200)} for _ in range(3)]
        request["messages"] = turns
    else:
        path = COMPLETION
        request["prompt"] = some_text(draw, draw.randint(100, 800))
    url = replicas[seed % 2]
    answer = exchange(url, "POST", path, request)
    assert answer.status == 200
    choice = answer.json()["choices"][0]
    ask = read(path, json.dumps(request).encode())
    (prompt,) = reader.tokenize(ask)
    assert isinstance(prompt, list)
    assert len(prompt) == answer.json()["usage"]["prompt_tokens"]
    generated = reader.answer(ask, None, choice["token_ids"])
    assert isinstance(generated, list)
    before = Hasher("sha256_cbor", "0").chain(prompt, BLOCK_SIZE, Extra(cache_salt=salt))
    chain = before.extend(generated)
    # One token more than was computed: if it fills a block, then one that the engine must not have.
    beyond = before.extend(choice["token_ids"])
    keys = stored(url)
    assert set(chain.keys) <= keys
    assert not set(beyond.keys[len(chain.keys) :]) & keys


def test_an_answer_that_fills_its_last_block_is_not_stored_whole(replicas: list[str], reader: Reader) -> None:
    """The last token is never an input, so the block that it fills does not exist."""
    request = {
        "prompt": list(range(100, 100 + BLOCK_SIZE - 4)),
        "max_tokens": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choice = exchange(replicas[0], "POST", COMPLETION, request).json()["choices"][0]
    chain = Hasher("sha256_cbor", "0").chain(request["prompt"] + choice["token_ids"], BLOCK_SIZE)  # type: ignore[operator]
    assert len(chain.keys) == 1
    assert not set(chain.keys) & stored(replicas[0])
    request["max_tokens"] = 5
    choice = exchange(replicas[0], "POST", COMPLETION, request | {"temperature": 0}).json()["choices"][0]
    chain = Hasher("sha256_cbor", "0").chain(request["prompt"] + choice["token_ids"], BLOCK_SIZE)  # type: ignore[operator]
    assert set(chain.keys) <= stored(replicas[0])
