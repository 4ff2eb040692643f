"""Names of blocks: vLLM's own hashes of tokens, salt and adapter, by the code the router uses too."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from router.prompt.blocks import NO_EXTRA, Extra, Hasher


@dataclass(frozen=True, slots=True)
class Names:
    """One name per full block: the 64-bit key, and the whole digest behind it."""

    keys: list[int]
    digests: list[bytes]


class Namer:
    """Hashes as one engine does it. ``seed`` None: PYTHONHASHSEED, or what vLLM takes when that is not set."""

    def __init__(self, algorithm: str, block_size: int, seed: str | None = None) -> None:
        if seed is None:
            seed = os.environ.get("PYTHONHASHSEED")
        if seed is None and algorithm.startswith("xxhash"):
            seed = secrets.token_hex(32)
        self._hasher = Hasher(algorithm, seed)
        self.block_size = block_size

    def names(self, tokens: Sequence[int], extra: Extra = NO_EXTRA) -> Names:
        """Names of all full blocks of a prompt and its answer."""
        size = self.block_size
        if len(tokens) < size:
            return Names([], [])
        digests_of = self._hasher.digests
        digests = digests_of(self._hasher.none_hash, tokens[:size], size, extra.keys(first=True))
        digests += digests_of(digests[0], tokens[size:], size, extra.keys(first=False))
        return Names([int.from_bytes(digest[-8:], "big") for digest in digests], digests)
