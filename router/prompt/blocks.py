"""Tokens to block hashes: the chain by which vLLM names the blocks of its prefix cache.

A block's digest is H((parent digest, token ids, extra keys)), chained from NONE_HASH over every full block
(vLLM v1/core/kv_cache_utils.py `hash_block_tokens`). KV events and the index know a block by its key: the low
64 bits of the digest (vLLM `maybe_convert_block_hash`).
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
import struct
import sys
from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import xxhash

from router.prompt.others import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ALGORITHMS: Final = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""The choices of `--prefix-caching-hash-algo`, as `vllm:cache_config_info` spells them."""

DEFAULT_SEED: Final = "vllm-none-hash"
"""What vLLM >= 0.29 seeds sha256 and sha256_cbor with where PYTHONHASHSEED is unset. An xxhash engine then draws a
random seed: its hashes can't be reproduced unless PYTHONHASHSEED is set there."""

_PICKLE_PROTOCOL: Final = 5  # pickle.HIGHEST_PROTOCOL of CPython 3.8 to 3.14, which is what vLLM asks for

# Of a pickle of (parent, block, None) what stands behind the parent, and behind the block.
_BEHIND_PARENT, _BEHIND_BLOCK = b"\x94", b"N\x87\x94."
# Other threads wait for each of these, and beyond 64 KiB pickles are framed anew. A block takes five bytes for each id
# of a vocabulary, up to eleven for any of 64 bits that an engine may tell of, and less than 20 beside.
_AT_ONCE_BYTES: Final = 16_000
_ID_BYTES, _MOST_ID_BYTES, _BESIDE_BYTES = 5, 11, 20
# Stands between blocks that are pickled together. A float is written in full each time, and no client can know it.
_BETWEEN: Final = secrets.randbits(52) + 0.5
_WRITTEN_BETWEEN: Final = pickle.dumps(_BETWEEN, _PICKLE_PROTOCOL)[-10:-1]

# The pickles that digests.c writes: of so many 32-bit ids.
_FEWEST_NATIVE: Final = 4
_MOST_NATIVE: Final = 10_000
_native: Callable[[bytes, array[int], int], bytes] | None
try:
    from router.prompt.digests import sha256 as _native
except ImportError:  # it is not compiled
    _native = None


class Extra:
    """What separates equal tokens in the cache: the LoRA adapter in every block, the salt in the first one.

    `lora_path` is the `root` of the adapter's card in /v1/models. Salts and adapters never share a block. `tagged`: the
    engine is vLLM 0.31 or later, which hashes each key with a tag and adapters by their path too. Nothing changes it.
    """

    __slots__ = ("_hash", "cache_salt", "lora_name", "lora_path", "tagged")

    def __init__(
        self,
        lora_name: str | None = None,
        lora_path: str | None = None,
        cache_salt: str | None = None,
        tagged: bool = True,
    ) -> None:
        self.lora_name = lora_name
        self.lora_path = lora_path
        self.cache_salt = cache_salt
        self.tagged = tagged
        self._hash = hash((lora_name, lora_path, cache_salt, tagged))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extra) and (self.lora_name, self.lora_path, self.cache_salt, self.tagged) == (
            other.lora_name,
            other.lora_path,
            other.cache_salt,
            other.tagged,
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Extra({self.lora_name!r}, {self.lora_path!r}, {self.cache_salt!r}, tagged={self.tagged})"

    def untagged(self) -> Extra:
        """The same for an engine before 0.31."""
        return Extra(self.lora_name, self.lora_path, self.cache_salt, tagged=False)

    def keys(self, *, first: bool) -> tuple[Any, ...] | None:
        """The extra keys of a block, as the engine hashes them; None where there are none."""
        salt = self.cache_salt if first else None
        if self.lora_name is None and not salt:
            return None
        if not self.tagged:
            return tuple(_fresh(key) for key in (self.lora_name, salt) if key) or None
        keys: list[tuple[str, ...]] = []
        if self.lora_name is not None:
            keys.append(("lora", _fresh(self.lora_name), _fresh(self.lora_path or "")))
        if salt:
            keys.append(("cache_salt", _fresh(salt)))
        return tuple(keys) or None


NO_EXTRA: Final = Extra()


class Blocks:
    """A prompt's blocks, as far as it matters where they are cached. Nothing changes them.

    `keys`: one unsigned 64-bit integer per full block, in order; bare numbers ("Q"), since long prompts have thousands.
    `usable_blocks`: the most blocks that this prompt can hit: vLLM always computes the last token itself.
    """

    __slots__ = ("keys", "usable_blocks")

    def __init__(self, keys: array[int], usable_blocks: int) -> None:
        self.keys = keys
        self.usable_blocks = usable_blocks


def bare(keys: Sequence[int]) -> array[int]:
    """Keys as bare numbers, which those of `Blocks` are already: these themselves. Not to be changed."""
    return keys if isinstance(keys, array) else array("Q", keys)


class Chain(Blocks):
    """The keys of a prompt's full blocks, and what it takes to go on from there. Nothing changes it.

    `block_size` and `length` are counted in tokens (bytes where a `ByteHasher` made it); the last
    `length % block_size` of them belong to no block yet.
    """

    __slots__ = ("_extra", "_hasher", "_run", "block_size", "length")

    def __init__(self, keys: array[int], run: Run, block_size: int, length: int, hasher: Links, extra: Extra) -> None:
        """`run`: how it ends."""
        super().__init__(keys, (length - 1) // block_size if length else 0)
        self.block_size = block_size
        self.length = length
        self._run = run
        self._hasher = hasher
        self._extra = extra

    def __eq__(self, other: object) -> bool:
        """Whether both go on alike, too."""
        return isinstance(other, Chain) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash((self.length, self._run.digest))

    def _all(self) -> tuple[object, ...]:
        return self.keys, self.block_size, self.length, self._extra, self._run.digest, list(self._run.tail)

    def __repr__(self) -> str:
        return f"Chain(keys={self.keys.tolist()}, block_size={self.block_size}, length={self.length})"

    def has_room(self, more: int) -> bool:
        """Whether so many more tokens leave the blocks as they are: they come into the last one, and do not fill it."""
        begun = self.length % self.block_size
        return begun > 0 and begun + more < self.block_size

    def extend(self, tokens: Sequence[int]) -> Chain:
        """The chain of this prompt followed by `tokens` (same kind as the prompt's: ids, or bytes)."""
        run = grow(
            self._hasher, self._run.digest, self._run.tail, tokens, self.block_size, self._extra, first=not self.keys
        )
        keys = self.keys + run.keys if run.keys else self.keys
        return Chain(keys, run, self.block_size, self.length + len(tokens), self._hasher, self._extra)


class Run:
    """What more tokens add to a chain: keys of the blocks that they fill, the last digest, and what is left over."""

    __slots__ = ("digest", "keys", "tail")

    def __init__(self, keys: array[int], digest: bytes, tail: Sequence[int]) -> None:
        self.keys = keys
        self.digest = digest
        self.tail = tail


class Links(Protocol):
    """A `Hasher` or a `ByteHasher`."""

    none_hash: bytes

    def __hash__(self) -> int: ...

    def links(self, parent: bytes, tokens: Sequence[int], block_size: int, keys: tuple[Any, ...] | None) -> bytes:
        """The digests of the full blocks of `tokens`, one after the other: they follow `parent`, all with the same
        extra keys. Each is as long as `none_hash`."""
        ...


class Hasher:
    """vLLM's block hashes for one engine's algorithm and PYTHONHASHSEED.

    Raises ValueError for an algorithm that vLLM doesn't know.
    """

    __slots__ = ("_digest", "_heads", "_in_cbor", "_serialise", "algorithm", "none_hash", "seed")

    def __init__(self, algorithm: str, seed: str | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown block hash algorithm {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
        self.algorithm = algorithm
        self.seed = DEFAULT_SEED if seed is None else seed
        self._digest: Callable[[bytes], bytes] = _sha256 if algorithm.startswith("sha256") else xxhash.xxh3_128_digest
        self._in_cbor = algorithm.endswith("_cbor")
        self._serialise: Callable[[object], bytes] = _cbor if self._in_cbor else _pickle
        self.none_hash: bytes = self._digest(self._serialise(self.seed))
        self._heads: list[bytes] = []  # see `_heads_up_to`

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

    def links(self, parent: bytes, tokens: Sequence[int], block_size: int, keys: tuple[Any, ...] | None) -> bytes:
        """Digests of the full blocks of `tokens`; see `Links`."""
        plain = keys is None and len(parent) == len(self.none_hash)
        if (
            _native is not None
            and plain
            and self.algorithm == "sha256"
            and isinstance(tokens, array)
            and tokens.typecode == "i"
            and _FEWEST_NATIVE <= block_size <= _MOST_NATIVE
        ):
            return _native(parent, tokens, block_size)
        digests: list[bytes] = []
        usual = _ID_BYTES * block_size + _BESIDE_BYTES
        together = plain and not self._in_cbor and 2 * usual < _AT_ONCE_BYTES
        heads = self._heads_up_to(_MOST_ID_BYTES * block_size + _BESIDE_BYTES) if together else []
        at_once = max(1, _AT_ONCE_BYTES // usual)
        blocks = _tuples(tokens, block_size)
        while part := list(islice(blocks, at_once)):
            give_way()
            if together:
                self._pickled(parent, part, heads, digests)
            else:
                digests += self._one_by_one(parent, part, block_size, keys)
            parent = digests[-1]
            if len(part) < at_once:
                break
        return b"".join(digests)

    def digests(
        self, parent: bytes, tokens: Sequence[int], block_size: int, keys: tuple[Any, ...] | None = None
    ) -> list[bytes]:
        """The same, each by itself."""
        linked, size = self.links(parent, tokens, block_size, keys), len(self.none_hash)
        return [linked[i : i + size] for i in range(0, len(linked), size)]

    def _one_by_one(
        self, parent: bytes, blocks: list[tuple[int, ...]], block_size: int, keys: tuple[Any, ...] | None
    ) -> list[bytes]:
        digests = []
        digest, serialise = self._digest, self._serialise
        if self._in_cbor:
            head, size, ends = b"\x83" + _head(0x40, len(parent)), _head(0x80, block_size), _cbor(keys)
            encoded, join = _ENCODED_INT.__getitem__, b"".join
            for block in blocks:
                parent = digest(join((head, parent, size, *map(encoded, block), ends)))
                digests.append(parent)
        else:
            for block in blocks:
                parent = digest(serialise((parent, block, keys)))
                digests.append(parent)
        return digests

    def _heads_up_to(self, length: int) -> list[bytes]:
        """What a pickle of (parent, block, None) begins with, by the length of the block's own pickle."""
        heads = self._heads
        if len(heads) < length:
            # Put there whole: other threads hash with this, too.
            heads = self._heads = [_head_of_pickle(len(self.none_hash), each) for each in range(length)]
        return heads

    def _pickled(self, parent: bytes, blocks: list[tuple[int, ...]], heads: list[bytes], digests: list[bytes]) -> None:
        """Adds the digests of a few blocks without extra keys, which are pickled together and put into their places
        then: a call for each would cost more than the digest."""
        apart: list[object] = [_BETWEEN] * (2 * len(blocks) + 1)
        apart[1::2] = blocks
        written = pickle.dumps(tuple(apart), _PICKLE_PROTOCOL).split(_WRITTEN_BETWEEN)
        join, behind_parent, behind_block = b"".join, _BEHIND_PARENT, _BEHIND_BLOCK
        if self.algorithm == "sha256":
            new = _SHA256.copy
            for block in written[1:-1]:
                hashed = new()
                hashed.update(join((heads[len(block)], parent, behind_parent, block, behind_block)))
                parent = hashed.digest()
                digests.append(parent)
        else:
            digest = self._digest
            for block in written[1:-1]:
                parent = digest(join((heads[len(block)], parent, behind_parent, block, behind_block)))
                digests.append(parent)


class ByteHasher:
    """Chained blocks of bytes, for models whose tokenizer isn't at hand. Its keys mean nothing to an engine."""

    __slots__ = ("none_hash",)

    def __init__(self, seed: str | None = None) -> None:
        self.none_hash: bytes = xxhash.xxh3_128_digest(_cbor(DEFAULT_SEED if seed is None else seed))

    def chain(self, tokens: bytes, block_size: int, extra: Extra = NO_EXTRA) -> Chain:
        """The chain of a prompt's bytes; `block_size` in bytes."""
        return _whole(self, tokens, block_size, extra)

    def links(self, parent: bytes, tokens: Sequence[int], block_size: int, keys: tuple[Any, ...] | None) -> bytes:
        """Digests of the full blocks of bytes; see `Links`."""
        ends, digests, whole = _cbor(keys), [], bytes(tokens)
        for i in range(0, len(whole) - block_size + 1, block_size):
            parent = xxhash.xxh3_128_digest(b"".join((parent, ends, whole[i : i + block_size])))
            digests.append(parent)
        return b"".join(digests)


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
    ids, size = _joined(tail, tokens), len(hasher.none_hash)
    count, left = divmod(len(ids), block_size)
    if not count:
        return Run(array("Q"), digest, ids)
    digests = b""
    if first and extra.cache_salt:
        digests = digest = hasher.links(digest, ids[:block_size], block_size, extra.keys(first=True))
        ids = ids[block_size:]
    digests += hasher.links(digest, ids, block_size, extra.keys(first=False))
    # A tail fills no block, so what is left over is all of `tokens`.
    return Run(_low_64_bits(digests, size), digests[-size:], tokens[len(tokens) - left :])


def _whole(hasher: Links, tokens: Sequence[int], block_size: int, extra: Extra) -> Chain:
    run = grow(hasher, hasher.none_hash, tokens[:0], tokens, block_size, extra, first=True)
    return Chain(run.keys, run, block_size, len(tokens), hasher, extra)


def _joined(tail: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    if not tail:
        return tokens
    return tail + tokens if type(tail) is type(tokens) else [*tail, *tokens]  # type: ignore[operator]


def _head_of_pickle(parent: int, block: int) -> bytes:
    """The protocol, the length of what follows, and that there are `parent` bytes."""
    length = 2 + parent + len(_BEHIND_PARENT) + block + len(_BEHIND_BLOCK)
    return b"\x80\x05\x95" + length.to_bytes(8, "little") + bytes((0x43, parent))


def _low_64_bits(digests: bytes, size: int) -> array[int]:
    """The keys of blocks with these digests of `size` bytes each."""
    words = array("Q", digests)
    if sys.byteorder == "little":
        words.byteswap()
    step = size // 8
    return words[step - 1 :: step]


def _tuples(ids: Sequence[int], block_size: int) -> Iterator[tuple[int, ...]]:
    """The full blocks, as the engine serialises them."""
    if isinstance(ids, array):
        whole = memoryview(ids)[: len(ids) - len(ids) % block_size]
        return struct.iter_unpack(f"{block_size}{ids.typecode}", whole)
    return zip(*[iter(ids)] * block_size, strict=False)


# A copy takes two thirds of the time of a new one, which looks for the algorithm each time.
_SHA256: Final = hashlib.sha256()


def _sha256(data: bytes) -> bytes:
    hashed = _SHA256.copy()
    hashed.update(data)
    return hashed.digest()


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


_ENCODED_INT: Final = _EncodedInts()
