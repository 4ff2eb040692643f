"""Block hashes as vLLM's own functions compute them, for every algorithm, several seeds and every kind of extra key.

Runs in vLLM's own environment and prints one JSON object:

    DIR/venv/bin/python tests/real_vllm/hash_vectors.py

{"vllm": version, "engines": [{"algorithm", "seed" (PYTHONHASHSEED, null for unset), "none_hash", "cases": [...]}]}.
A case names its input in `cases` by position and gives the digests of its blocks. Bytes are written as {"hex": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = ("0", "42", "random", "", "söd", None)


def request(
    tokens: list[int],
    *,
    lora: tuple[str, str] | None = None,
    salt: str | None = None,
    items: tuple[tuple[str, int, int], ...] = (),
    embeds: torch.Tensor | None = None,
) -> SimpleNamespace:
    """As much of an engine's request as the extra keys are made from. `items`: (identifier, offset, length)."""
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
        )
        for name, offset, length in items
    ]
    return SimpleNamespace(
        tokens=tokens,
        lora_request=LoRARequest(lora_name=lora[0], lora_int_id=1, lora_path=lora[1]) if lora else None,
        cache_salt=salt,
        mm_features=features,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={},
    )


def copied(text: str) -> str:
    """Another object with this text: an engine's strings come out of messages, never out of one constant."""
    return text.encode().decode()


CASES: tuple[tuple[str, int, SimpleNamespace], ...] = (
    ("four blocks of 16", 16, request(list(range(64)))),
    ("a partial tail", 16, request(list(range(70)))),
    ("blocks of 32", 32, request(list(range(64)))),
    ("less than a block", 16, request([1, 2, 3])),
    (
        "every width of integer",
        4,
        request([0, 23, 24, 255, 256, 65535, 65536, 199_999, 2**31 - 1, 2**31, 2**32 - 1, 7]),
    ),
    ("blocks of one", 1, request([5, 6, 7])),
    ("blocks of two and three", 3, request([5, 6, 7, 8, 9, 10])),
    ("LoRA", 4, request(list(range(8)), lora=("my-lora", "/adapters/my-lora"))),
    ("LoRA, name and path equal", 4, request(list(range(8)), lora=(copied("same"), copied("same")))),
    ("salt", 4, request(list(range(8)), salt="tenant-A")),
    ("salt, longer than 24 and not ASCII", 4, request(list(range(8)), salt="клиент-номер-двадцать-четыре")),
    ("salt of 300", 4, request(list(range(8)), salt="s" * 300)),
    ("LoRA and salt", 4, request(list(range(12)), lora=("my-lora", "/adapters/my-lora"), salt="tenant-A")),
    ("LoRA and salt, equal", 4, request(list(range(8)), lora=(copied("same"), "/a"), salt=copied("same"))),
    ("salt that is its own tag", 4, request(list(range(8)), salt=copied("cache_salt"))),
    ("an image over two blocks", 4, request(list(range(8)), items=(("image-1", 1, 6),))),
    ("two images in a block", 8, request(list(range(16)), items=(("image-1", 1, 2), ("image-2", 4, 8)))),
    ("one image twice in a block", 8, request(list(range(8)), items=((copied("same"), 0, 2), (copied("same"), 4, 2)))),
    ("embeddings", 4, request([0] * 8, embeds=torch.arange(32, dtype=torch.float32).reshape(8, 4))),
    ("an image and a salt", 4, request(list(range(8)), items=(("image-1", 0, 3),), salt="tenant-A")),
)


def digests(hash_block: Any, block_size: int, subject: SimpleNamespace) -> tuple[list[Any], list[bytes]]:
    """The extra keys and the digest of each full block, by the engine's own two functions."""
    keys, found = [], []
    parent: bytes | None = None
    item = 0
    for start in range(0, len(subject.tokens) - block_size + 1, block_size):
        end = start + block_size
        extra, item = kv_cache_utils.generate_block_hash_extra_keys(subject, start, end, item)
        parent = kv_cache_utils.hash_block_tokens(hash_block, parent, subject.tokens[start:end], extra)
        keys.append(extra)
        found.append(parent)
    return keys, found


def main() -> None:
    cases: list[dict[str, Any]] = []
    engines = []
    for algorithm in ALGORITHMS:
        function = get_hash_fn_by_name(algorithm)
        for seed in SEEDS:
            if seed is None and algorithm.startswith("xxhash"):
                continue  # drawn at random at every start
            os.environ.pop("PYTHONHASHSEED", None)
            if seed is not None:
                os.environ["PYTHONHASHSEED"] = seed
            kv_cache_utils.init_none_hash(function)
            found = [digests(function, block_size, subject) for _, block_size, subject in CASES]
            if not cases:
                cases = [
                    {"name": name, "block_size": block_size, "tokens": subject.tokens, "keys": keys, **_extra(subject)}
                    for (name, block_size, subject), (keys, _) in zip(CASES, found, strict=True)
                ]
            # Seeds differ in the first link alone, so one of them carries all cases.
            kept = found if seed == "0" else found[:2]
            engines.append(
                {
                    "algorithm": algorithm,
                    "seed": seed,
                    "none_hash": kv_cache_utils.NONE_HASH.hex(),
                    "digests": [[d.hex() for d in chain] for _, chain in kept],
                }
            )
    json.dump(
        {"vllm": vllm.__version__, "cases": cases, "engines": engines}, sys.stdout, ensure_ascii=False, default=_hex
    )


def _extra(subject: SimpleNamespace) -> dict[str, Any]:
    lora = subject.lora_request
    return {
        "lora_name": lora.lora_name if lora else None,
        "lora_path": lora.lora_path if lora else None,
        "cache_salt": subject.cache_salt,
    }


def _hex(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError(f"{type(value).__name__} in a vector")


if __name__ == "__main__":
    main()
