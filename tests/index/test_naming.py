"""Names proven by what vLLM published, and translated where they cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.index.events import Stored
from router.index.naming import Mode, Naming
from router.prompt.blocks import Extra, Hasher
from router.prompt.hashing import Hashing

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm"
RECORDED = [json.loads(line) for line in (DATA / "kv_events.jsonl").read_text().splitlines()]


def stored(told: dict[str, Any]) -> Stored:
    return Stored(
        told["block_hashes"], told["parent_block_hash"], told["token_ids"], told["block_size"], told["medium"],
        told["lora_name"], told["extra_keys"], told["group_idx"], told["kv_cache_spec_kind"], lookahead=False,
    )  # fmt: skip


def of(algorithm: str) -> tuple[str | None, list[dict[str, Any]]]:
    batches = [batch for batch in RECORDED if batch["algorithm"] == algorithm]
    return batches[0]["seed"], [event for batch in batches for event in batch["events"]]


def naming(hashing: Hashing, size: int = 32, paths: dict[str, str] | None = None) -> Naming:
    return Naming(hashing, size, (paths or {}).get)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_vllms_own_blocks_prove_algorithm_and_seed(algorithm: str) -> None:
    seed, events = of(algorithm)
    # Assumed wrongly on purpose, except where the seed is one that nobody would try.
    wrong = Hashing("xxhash" if algorithm != "xxhash" else "sha256", "42" if seed == "42" else "wrong")
    names = naming(wrong)
    first = next(event for event in events if event["type"] == "BlockStored")
    assert names.mode.name == "UNPROVEN"
    assert names.stored(stored(first)) == (first["block_hashes"], first["parent_block_hash"])
    assert names.mode is Mode.PROVEN
    assert names.hashing == Hashing(algorithm, seed, tagged=True)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_an_unknown_seed_is_translated_block_by_block(algorithm: str) -> None:
    """The recorded engine's seed is hidden by altering every hash: names that nothing yields."""
    _, events = of(algorithm)
    own = Hashing("sha256_cbor", None)
    names, hasher = naming(own), Hasher("sha256_cbor")
    digests: dict[int, bytes] = {}
    seen = 0
    for event in events:
        if event["type"] != "BlockStored":
            continue
        seen += 1
        hidden = {**event, "block_hashes": [h ^ 1 for h in event["block_hashes"]]}
        if event["parent_block_hash"] is not None:
            hidden["parent_block_hash"] = event["parent_block_hash"] ^ 1
        parent = hasher.none_hash if event["parent_block_hash"] is None else digests[event["parent_block_hash"]]
        expected = []
        for place, name in enumerate(event["block_hashes"]):
            salt = (event["extra_keys"][place] or [None])[0]
            keys = Extra(cache_salt=salt).keys(first=True) if salt else None
            parent = digests[name] = hasher.block(parent, event["token_ids"][place * 32 : (place + 1) * 32], keys)
            expected.append(int.from_bytes(parent[-8:], "big"))
        found = names.stored(stored(hidden))
        assert found is not None
        assert found[0] == expected
    assert seen > 10
    assert names.mode is Mode.TRANSLATED
    assert names.hashing == own
    assert names.translated == len(digests)
    some = next(iter(digests))
    assert names.removed([some ^ 1, 12345]) == [int.from_bytes(digests[some][-8:], "big")]
    names.drop([some ^ 1], names.removed([some ^ 1]))
    assert names.removed([some ^ 1]) == []
    names.clear()
    assert names.translated == 0


def root(hashing: Hashing, keys: tuple[Any, ...] | None, extra: list[Any] | None, lora: str | None = None) -> Stored:
    hasher = Hasher(hashing.algorithm, hashing.seed)
    digest = hasher.block(hasher.none_hash, [1, 2, 3, 4], keys)
    return Stored(
        [int.from_bytes(digest[-8:], "big")], None, [1, 2, 3, 4], 4, "GPU", lora, [extra], 0, None, lookahead=False
    )


def test_untagged_extra_keys_are_told_by_the_event() -> None:
    hashing = Hashing("sha256", None)
    names = naming(hashing, 4, {"adapter": "/adapters/a"})
    names.stored(root(hashing, ("adapter", "salt"), ["adapter", "salt"], "adapter"))
    assert (names.mode, names.hashing) == (Mode.PROVEN, replace(hashing, tagged=False))


def test_tagged_ones_with_the_adapters_path() -> None:
    hashing = Hashing("sha256", None)
    names = naming(hashing, 4, {"adapter": "/adapters/a"})
    names.stored(
        root(hashing, Extra("adapter", "/adapters/a", "salt").keys(first=True), ["adapter", "salt"], "adapter")
    )
    assert (names.mode, names.hashing) == (Mode.PROVEN, hashing)


def test_tags_are_found_out_after_the_seed() -> None:
    hashing = Hashing("sha256", None)
    names = naming(hashing, 4)
    names.stored(root(hashing, None, None))
    assert names.hashing.tagged
    names.stored(root(hashing, ("salt",), ["salt"]))
    assert not names.hashing.tagged


def test_a_block_with_unknown_extras_proves_nothing_either_way() -> None:
    hashing = Hashing("sha256", None)
    names = naming(hashing, 4)
    names.stored(root(hashing, (("prompt_embeds", b"x"), ("of_tomorrow", "y")), [b"x", "y"]))
    assert names.mode.name == "UNPROVEN"
    names.stored(root(hashing, None, None))
    assert names.mode is Mode.PROVEN


def test_an_unknown_seed_is_told_by_salted_blocks_too() -> None:
    names = naming(Hashing("sha256", None), 4)
    hidden = Hashing("sha256", "hidden")
    names.stored(root(hidden, ("x", "salt"), ["x", "salt"], "x"))
    assert names.mode.name == "UNPROVEN"  # the adapter's path is not known
    assert names.stored(root(hidden, Extra(cache_salt="salt").keys(first=True), ["salt"])) == (
        root(Hashing("sha256", None), Extra(cache_salt="salt").keys(first=True), ["salt"]).keys,
        None,
    )
    assert names.mode is Mode.TRANSLATED


@pytest.mark.parametrize("extra", [[{}], [[]], [[1, 2]], [1.5], [None], [["mm", {"a": 1}]]])
def test_extra_keys_of_tomorrow_do_no_harm(extra: list[Any]) -> None:
    for algorithm in ("sha256", "sha256_cbor"):
        names = naming(Hashing(algorithm, None), 4)
        names.stored(root(Hashing(algorithm, "hidden"), ("unknown",), extra))
        names.stored(root(Hashing(algorithm, "hidden"), None, None))
        assert names.mode is Mode.TRANSLATED
        names.stored(root(Hashing(algorithm, "hidden"), ("unknown",), extra))


def test_a_block_whose_parent_was_missed_has_no_name() -> None:
    names = naming(Hashing("sha256", None), 4)
    names.stored(replace(root(Hashing("sha256", "hidden"), None, None)))
    assert names.mode is Mode.TRANSLATED
    assert names.stored(Stored([9], 8, [1, 2, 3, 4], 4, "GPU", None, None, 0, None, lookahead=False)) is None
    # Offloaded blocks are told by their names alone.
    known = names.stored(root(Hashing("sha256", "hidden"), None, None))
    engine = root(Hashing("sha256", "hidden"), None, None).keys
    assert names.stored(Stored([*engine, 9], None, [], 0, "CPU", None, None, 0, None, lookahead=False)) == known


def test_another_process_is_proven_anew() -> None:
    hashing = Hashing("sha256", None)
    names = naming(hashing, 4)
    names.stored(root(Hashing("sha256_cbor", "0"), None, None))
    assert names.hashing == Hashing("sha256_cbor", "0")
    names.forget()
    assert (names.mode, names.hashing) == (Mode.UNPROVEN, hashing)
