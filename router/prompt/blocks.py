"""Tokens to block hashes: the chain by which vLLM names the blocks of its prefix cache.

A block's digest is H((parent digest, token ids, extra keys)), chained from NONE_HASH over every full block
(vLLM v1/core/kv_cache_utils.py `hash_block_tokens`). KV events and the index know a block by its key: the low
64 bits of the digest (vLLM `maybe_convert_block_hash`).
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""The choices of `--prefix-caching-hash-algo`, as `vllm:cache_config_info` spells them."""

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM >= 0.29 seeds sha256 and sha256_cbor with where PYTHONHASHSEED is unset. An xxhash engine then draws a
random seed: its hashes can't be reproduced unless PYTHONHASHSEED is set there."""

_AT_ONCE = 16 * 1024  # token ids

_PICKLE_PROTOCOL = 5  # pickle.HIGHEST_PROTOCOL of CPython 3.8 to 3.14, which is what vLLM asks for


@dataclass(frozen=True, slots=True)
class Extra:
    """What separates equal tokens in the cache: the LoRA adapter in every block, the salt in the first one.

    `lora_path` is the `root` of the adapter's card in /v1/models. Salts and adapters never share a block. `tagged`: the
    engine is vLLM 0.31 or later, which hashes each key with a tag and adapters by their path too.
    """

    lora_name: str | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    tagged: bool = True

    def keys(self, *, first: bool) -> tuple[Any, ...] | None:
        """The extra keys of a block, as the engine hashes them; None where there are none."""
        salt = self.cache_salt if first else None
        if not self.tagged:
            return tuple(_fresh(key) for key in (self.lora_name, salt) if key) or None
        keys: list[tuple[str, ...]] = []
        if self.lora_name is not None:
            keys.append(("lora", _fresh(self.lora_name), _fresh(self.lora_path or "")))
        if salt:
            keys.append(("cache_salt", _fresh(salt)))
        return tuple(keys) or None


NO_EXTRA = Extra()


@dataclass(slots=True)  # not frozen: one is made for each request
class Chain:
    """The keys of a prompt's full blocks, and what it takes to go on from there. Nothing changes it.

    `keys`: one unsigned 64-bit integer per full block, in order. `block_size` and `length` are counted in tokens
    (bytes where a `ByteHasher` made it); the last `length % block_size` of them belong to no block yet.
    """

    keys: list[int]
    block_size: int
    length: int
    _hasher: Links = field(repr=False, compare=False)
    _extra: Extra = field(repr=False)
    _digest: bytes = field(repr=False)
    _tail: Sequence[int] = field(repr=False)

    @property
    def usable_blocks(self) -> int:
        """The most blocks that this prompt can hit: vLLM always computes the last token itself."""
        return max(self.length - 1, 0) // self.block_size

    def extend(self, tokens: Sequence[int]) -> Chain:
        """The chain of this prompt followed by `tokens` (same kind as the prompt's: ids, or bytes)."""
        run = grow(self._hasher, self._digest, self._tail, tokens, self.block_size, self._extra, first=not self.keys)
        return chain_of(
            self.keys + run.keys, run, self.block_size, self.length + len(tokens), self._hasher, self._extra
        )


class Run(NamedTuple):
    """What more tokens add to a chain: keys of the blocks that they fill, the last digest, and what is left over."""

    keys: list[int]
    digest: bytes
    tail: Sequence[int]


class Links(Protocol):
    """A `Hasher` or a `ByteHasher`."""

    none_hash: bytes

    def __hash__(self) -> int: ...

    def blocks(self, tail: Sequence[int], tokens: Sequence[int], block_size: int) -> Iterator[Any]:
        """The full blocks of `tail` and `tokens`, in the form that `digests` reads fastest."""
        ...

    def digests(
        self, parent: bytes, blocks: Iterable[Any], block_size: int, keys: tuple[Any, ...] | None
    ) -> list[bytes]: ...


class Hasher:
    """vLLM's block hashes for one engine's algorithm and PYTHONHASHSEED.

    Raises ValueError for an algorithm that vLLM doesn't know.
    """

    __slots__ = ("_digest", "_serialise", "algorithm", "none_hash", "seed")

    def __init__(self, algorithm: str, seed: str | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown block hash algorithm {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
        self.algorithm = algorithm
        self.seed = DEFAULT_SEED if seed is None else seed
        self._digest: Callable[[bytes], bytes] = _sha256 if algorithm.startswith("sha256") else xxhash.xxh3_128_digest
        self._serialise: Callable[[object], bytes] = _cbor if algorithm.endswith("_cbor") else _pickle
        self.none_hash: bytes = self._digest(self._serialise(self.seed))

    def chain(self, tokens: Sequence[int], block_size: int, extra: Extra = NO_EXTRA) -> Chain:
        """The chain of a prompt's token ids (each >= 0). `block_size` is the engine's hash block size, in tokens."""
        return _whole(self, tokens, block_size, extra)

    def block(self, parent: bytes, tokens: Sequence[int], keys: tuple[Any, ...] | None = None) -> bytes:
        """The digest of one block with extra keys of any kind, tagged, as (("mm", identifier, offset), ...), or not."""
        if keys is not None:
            keys = tuple(
                (sys.intern(key[0]), *map(_fresh, key[1:])) if isinstance(key, tuple) else _fresh(key) for key in keys
            )
        return self._digest(self._serialise((parent, tuple(tokens), keys)))

    def blocks(self, tail: Sequence[int], tokens: Sequence[int], block_size: int) -> Iterator[tuple[int, ...]]:
        """The full blocks of token ids, as the tuples that the engine serialises."""
        ids = chain(_ints(tail), _ints(tokens)) if tail else iter(_ints(tokens))
        return zip(*[ids] * block_size, strict=False)

    def links(self, parent: bytes, tokens: Sequence[int], block_size: int, keys: tuple[Any, ...] | None) -> list[bytes]:
        """Digests of the full blocks of `tokens`, all with the same extra keys."""
        return self.digests(parent, self.blocks((), tokens, block_size), block_size, keys)

    def digests(
        self, parent: bytes, blocks: Iterable[tuple[int, ...]], block_size: int, keys: tuple[Any, ...] | None
    ) -> list[bytes]:
        """Digests of `blocks`, which follow `parent`, all with the same extra keys."""
        digests = []
        digest, serialise = self._digest, self._serialise
        if serialise is _cbor:
            head, size, ends = b"\x83" + _head(0x40, len(parent)), _head(0x80, block_size), _cbor(keys)
            encoded, join = _ENCODED_INT.__getitem__, b"".join
            for block in blocks:
                parent = digest(join((head, parent, size, *map(encoded, block), ends)))
                digests.append(parent)
        elif self.algorithm == "sha256":  # the default, so with fewer calls
            dumps, sha256 = pickle.dumps, hashlib.sha256
            for block in blocks:
                parent = sha256(dumps((parent, block, keys), _PICKLE_PROTOCOL)).digest()
                digests.append(parent)
        else:
            for block in blocks:
                parent = digest(serialise((parent, block, keys)))
                digests.append(parent)
        return digests


class ByteHasher:
    """Chained blocks of bytes, for models whose tokenizer isn't at hand. Its keys mean nothing to an engine."""

    __slots__ = ("none_hash",)

    def __init__(self, seed: str | None = None) -> None:
        self.none_hash: bytes = xxhash.xxh3_128_digest(_cbor(DEFAULT_SEED if seed is None else seed))

    def chain(self, tokens: bytes, block_size: int, extra: Extra = NO_EXTRA) -> Chain:
        """The chain of a prompt's bytes; `block_size` in bytes."""
        return _whole(self, tokens, block_size, extra)

    def blocks(self, tail: Sequence[int], tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
        """The full blocks of bytes."""
        whole = bytes(tail) + bytes(tokens)
        return (whole[i : i + block_size] for i in range(0, len(whole) - block_size + 1, block_size))

    def digests(
        self, parent: bytes, blocks: Iterable[bytes], block_size: int, keys: tuple[Any, ...] | None
    ) -> list[bytes]:
        """Digests of `blocks`, which follow `parent`, all with the same extra keys."""
        ends, digests = _cbor(keys), []
        for block in blocks:
            parent = xxhash.xxh3_128_digest(b"".join((parent, ends, block)))
            digests.append(parent)
        return digests


def grow(
    hasher: Links,
    digest: bytes,
    tail: Sequence[int],
    tokens: Sequence[int],
    block_size: int,
    extra: Extra,
    *,
    first: bool,
) -> Run:
    """Go on from a block's `digest` and the `tail` of tokens behind it. `first`: no block is full yet."""
    if block_size < 1:
        raise ValueError(f"block size must be at least 1, not {block_size}")
    count, left = divmod(len(tail) + len(tokens), block_size)
    if not count:
        return Run([], digest, _joined(tail, tokens))
    blocks = hasher.blocks(tail, tokens, block_size)
    digests: list[bytes] = []
    if first and extra.cache_salt:
        digests = hasher.digests(digest, islice(blocks, 1), block_size, extra.keys(first=True))
        digest = digests[0]
    digests += hasher.digests(digest, blocks, block_size, extra.keys(first=False))
    # A tail fills no block, so what is left over is all of `tokens`.
    return Run(_low_64_bits(digests), digests[-1], tokens[len(tokens) - left :])


def chain_of(keys: list[int], run: Run, block_size: int, length: int, hasher: Links, extra: Extra) -> Chain:
    """The chain with these keys, which ends as `run` does."""
    return Chain(keys, block_size, length, hasher, extra, run.digest, run.tail)


def _whole(hasher: Links, tokens: Sequence[int], block_size: int, extra: Extra) -> Chain:
    run = grow(hasher, hasher.none_hash, tokens[:0], tokens, block_size, extra, first=True)
    return chain_of(run.keys, run, block_size, len(tokens), hasher, extra)


def _ints(tokens: Sequence[int]) -> Iterable[int]:
    """The same from lists, which give their items faster than an array does; a long one in parts, as a list is made in
    one step for all threads."""
    if not isinstance(tokens, array):
        return tokens
    if len(tokens) <= _AT_ONCE:
        return tokens.tolist()
    return chain.from_iterable(tokens[i : i + _AT_ONCE].tolist() for i in range(0, len(tokens), _AT_ONCE))


def _joined(tail: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    if not tail:
        return tokens
    return tail + tokens if type(tail) is type(tokens) else [*tail, *tokens]  # type: ignore[operator]


def _low_64_bits(digests: list[bytes]) -> list[int]:
    """The keys of blocks with these digests, which are all of one length."""
    words = array("Q", b"".join(digests))
    if sys.byteorder == "little":
        words.byteswap()
    step = len(digests[0]) // 8
    return words[step - 1 :: step].tolist()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=_PICKLE_PROTOCOL)


def _fresh(value: Any) -> Any:
    """An equal string that is its own object; other values as they are.

    Tags are constants of the engine, so they are one object each; names, paths and salts reach it as separate objects.
    Pickle writes an object that it meets again as a reference, so both kinds must be alike here.
    """
    return value[:1] + value[1:] if isinstance(value, str) else value


def _cbor(value: object) -> bytes:
    """Canonical CBOR (RFC 8949, section 4.2.1) of the few kinds that block hashes are made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0x00, value) if value >= 0 else _head(0x20, -1 - value)
    if isinstance(value, bytes):
        return _head(0x40, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(0x60, len(text)) + text
    if isinstance(value, tuple | list):
        return _head(0x80, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"no block hash is made of {type(value).__name__}")


def _head(major: int, n: int) -> bytes:
    """A CBOR item's head: its major type (upper three bits) and argument in the shortest form."""
    if n < 24:
        return bytes((major | n,))
    for info, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if n < 1 << 8 * width:
            return bytes((major | info,)) + n.to_bytes(width, "big")
    raise ValueError(f"{n} is too large for a token id or a length")


class _EncodedInts(dict[int, bytes]):
    """Every token id met so far in CBOR: a look-up per token instead of a call. Bounded by the largest vocabularies."""

    def __missing__(self, n: int) -> bytes:
        encoded = _cbor(n)
        if 0 <= n < 1 << 18:
            self[n] = encoded
        return encoded


_ENCODED_INT = _EncodedInts()
