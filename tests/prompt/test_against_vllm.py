"""The engine's view of a prompt, against what real vLLM computed (tests/real_vllm writes the data)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.prompt.blocks import Extra, Hasher
from router.prompt.reader import Reader
from router.prompt.request import read
from router.prompt.tokens import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "vllm"
TINY = Path(__file__).parents[2] / "fake_backend" / "tiny"

VECTORS = json.loads((DATA / "hash_vectors.json").read_bytes())
PROMPTS = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text("utf-8").splitlines()]
BATCHES = [json.loads(line) for line in (DATA / "kv_events.jsonl").read_text("utf-8").splitlines()]
ENGINES = sorted({(b["algorithm"], b["seed"]) for b in BATCHES}, key=str)


def as_keys(value: Any) -> Any:
    """Extra keys from JSON: lists are tuples, {"hex": ...} is bytes."""
    if isinstance(value, list):
        return tuple(as_keys(v) for v in value)
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


@pytest.mark.parametrize("engine", VECTORS["engines"], ids=lambda e: f"{e['algorithm']}-{e['seed']}")
def test_digests(engine: dict[str, Any]) -> None:
    hasher = Hasher(engine["algorithm"], engine["seed"])
    assert hasher.none_hash.hex() == engine["none_hash"]
    for case, expected in zip(VECTORS["cases"], engine["digests"], strict=False):
        size, parent = case["block_size"], hasher.none_hash
        digests = []
        for i, keys in enumerate(case["keys"]):
            parent = hasher.block(parent, case["tokens"][i * size : (i + 1) * size], as_keys(keys))
            digests.append(parent.hex())
        assert digests == expected, case["name"]
        if {tag for keys in case["keys"] for tag, *_ in keys or ()} <= {"lora", "cache_salt"}:
            extra = Extra(case["lora_name"], case["lora_path"], case["cache_salt"])
            keys = hasher.chain(case["tokens"], size, extra).keys
            assert keys.tolist() == [int(d[-16:], 16) for d in expected], case["name"]


def test_the_vectors_cover_every_algorithm_seed_and_key() -> None:
    engines = {(e["algorithm"], e["seed"]) for e in VECTORS["engines"]}
    cbor_and_pickle = {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}
    assert engines == {(a, s) for a in cbor_and_pickle for s in ("0", "42", "random", "", "söd")} | {
        ("sha256", None),
        ("sha256_cbor", None),
    }
    full = [e for e in VECTORS["engines"] if len(e["digests"]) == len(VECTORS["cases"])]
    assert {e["algorithm"] for e in full} == cbor_and_pickle
    tags = {tag for case in VECTORS["cases"] for keys in case["keys"] for tag, *_ in keys or ()}
    assert tags == {"lora", "cache_salt", "mm", "prompt_embeds"}


@pytest.mark.parametrize(("algorithm", "seed"), ENGINES, ids=str)
def test_hashes_in_events(algorithm: str, seed: str | None) -> None:
    hasher = Hasher(algorithm, seed)
    digests = {None: hasher.none_hash}
    stored = 0
    for batch in BATCHES:
        if (batch["algorithm"], batch["seed"]) != (algorithm, seed):
            continue
        for event in batch["events"]:
            if event["type"] != "BlockStored":
                continue
            parent, size = digests[event["parent_block_hash"]], event["block_size"]
            for i, key in enumerate(event["block_hashes"]):
                # Events name extra keys without their tags; salts are the only ones here.
                extra = (event.get("extra_keys") or {i: None})[i]
                keys = tuple(("cache_salt", salt) for salt in extra) if extra else None
                parent = hasher.block(parent, event["token_ids"][i * size : (i + 1) * size], keys)
                assert int.from_bytes(parent[-8:], "big") == key
                digests[key] = parent
                stored += 1
    assert stored > 20


def test_events_cover_every_algorithm() -> None:
    assert {algorithm for algorithm, _ in ENGINES} == {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(Tokenizer.load(TINY), trust_request_chat_template=True)


@pytest.mark.parametrize("case", PROMPTS, ids=lambda c: c["name"])
def test_token_ids(case: dict[str, Any], reader: Reader) -> None:
    ask = read(case["path"], case["body"].encode("utf-8"))
    assert ask.kind != "other"
    assert reader.tokenize(ask) == case["prompt_token_ids"]


def test_an_answer_is_what_the_cache_holds_of_it(reader: Reader) -> None:
    """The text's tokens less the last one after "length"; all but the end token's after "stop"."""
    requests = json.loads((DATA / "http" / "requests.json").read_bytes())

    def answered(name: str) -> tuple[Any, Any]:
        request = requests[name]
        ask = read(request["path"], request["body"].encode("latin-1"))
        body = (DATA / "http" / f"{name}.txt").read_bytes().partition(b"\r\n\r\n")[2]
        assert reader.tokenize(ask)
        return ask, json.loads(body)["choices"][0]

    ask, choice = answered("chat_ids")
    assert choice["finish_reason"] == "length"
    assert reader.answer(ask, None, choice["token_ids"]) == choice["token_ids"][:-1]
    ask, choice = answered("completion_ids")
    ids = reader.tokenizer.encode(choice["text"], False)  # type: ignore[union-attr]
    assert reader.answer(ask, choice["text"], finish_reason="length") == ids[:-1]
    ask, choice = answered("chat_stop_token")
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [2])
    assert reader.answer(ask, choice["message"]["content"], finish_reason="stop") == []
    assert reader.answer(ask, None, choice["token_ids"]) == []
