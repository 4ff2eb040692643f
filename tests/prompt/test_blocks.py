from __future__ import annotations

import hashlib
from array import array

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.prompt import blocks
from router.prompt.blocks import ALGORITHMS, NO_EXTRA, ByteHasher, Extra, Hasher

ids = st.lists(st.integers(0, 2**32 - 1), max_size=60)
sizes = st.integers(1, 9)
texts = st.text(max_size=8)
extras = st.builds(Extra, st.none() | texts, st.none() | texts, st.none() | texts)
algorithms = st.sampled_from(ALGORITHMS)


def plain(hasher: Hasher, tokens: list[int], block_size: int, extra: Extra) -> list[bytes]:
    """The definition, spelled out: one digest after the other through the general-purpose encoders."""
    parent, digests = hasher.none_hash, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hasher.block(parent, tokens[start : start + block_size], extra.keys(first=start == 0))
        digests.append(parent)
    return digests


def low_64_bits(digests: list[bytes]) -> array[int]:
    return array("Q", [int.from_bytes(d, "big") & 0xFFFF_FFFF_FFFF_FFFF for d in digests])


@given(algorithms, ids, sizes, extras)
def test_a_chain_is_one_digest_after_the_other(algorithm: str, tokens: list[int], size: int, extra: Extra) -> None:
    hasher = Hasher(algorithm, "0")
    assert hasher.chain(tokens, size, extra).keys == low_64_bits(plain(hasher, tokens, size, extra))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_ids_beyond_any_vocabulary_are_hashed_like_others(algorithm: str, token: int) -> None:
    hasher, tokens = Hasher(algorithm, "0"), [token] * 64
    assert hasher.chain(tokens, 16).keys == low_64_bits(plain(hasher, tokens, 16, NO_EXTRA))


@given(ids, sizes, extras, st.sampled_from(["sha256_cbor", "xxhash_cbor"]))
def test_canonical_cbor_agrees_with_a_library(tokens: list[int], size: int, extra: Extra, algorithm: str) -> None:
    digest = xxhash.xxh3_128_digest if algorithm == "xxhash_cbor" else lambda data: hashlib.sha256(data).digest()
    hasher = Hasher(algorithm, "0")
    parent, keys = digest(cbor2.dumps("0", canonical=True)), []
    assert hasher.none_hash == parent
    for start in range(0, len(tokens) - size + 1, size):
        block = (parent, tuple(tokens[start : start + size]), extra.keys(first=start == 0))
        parent = digest(cbor2.dumps(block, canonical=True))
        keys.append(parent)
    assert hasher.chain(tokens, size, extra).keys == low_64_bits(keys)


@given(
    st.lists(
        st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300) | st.none(), max_size=30
    )
)
def test_extra_keys_in_canonical_cbor_agree_with_a_library(values: list[object]) -> None:
    hasher = Hasher("sha256_cbor", "0")
    keys = (("mm", *values),)
    expected = hashlib.sha256(cbor2.dumps((b"parent", (1, 2), keys), canonical=True)).digest()
    assert hasher.block(b"parent", (1, 2), keys) == expected


@given(algorithms, ids, ids, ids, sizes, extras)
def test_extending_equals_hashing_the_whole(
    algorithm: str, a: list[int], b: list[int], c: list[int], size: int, extra: Extra
) -> None:
    hasher = Hasher(algorithm, "0")
    whole = hasher.chain(a + b + c, size, extra)
    assert hasher.chain(a, size, extra).extend(b).extend(c) == whole
    assert hasher.chain(a, size, extra).extend(b + c) == whole


@given(ids, ids, sizes)
def test_a_chain_has_room_for_what_leaves_its_blocks_as_they_are(a: list[int], b: list[int], size: int) -> None:
    chain = Hasher("xxhash", "0").chain(a, size)
    longer = chain.extend(b)
    if chain.has_room(len(b)):
        assert longer.keys == chain.keys
        assert len(a) % size > 0
    else:
        assert longer.keys != chain.keys or not b or len(a) % size == 0


@given(st.binary(max_size=200), st.binary(max_size=200), sizes, extras)
def test_extending_bytes_equals_hashing_the_whole(a: bytes, b: bytes, size: int, extra: Extra) -> None:
    hasher = ByteHasher()
    assert hasher.chain(a, size, extra).extend(b) == hasher.chain(a + b, size, extra)


def test_a_long_array_hashes_as_a_list_does() -> None:
    tokens = [i % 50_000 for i in range(40_000)]
    hasher = Hasher("sha256", "0")
    assert hasher.chain(array("I", tokens), 16).keys == hasher.chain(tokens, 16).keys
    assert hasher.chain(array("I", [7]), 16).extend(array("I", tokens)).keys == hasher.chain([7, *tokens], 16).keys


def test_extending_leaves_the_parent_alone() -> None:
    parent = Hasher("sha256_cbor").chain([1, 2, 3, 4, 5], 2)
    before = parent.keys[:]
    one, other = parent.extend([6]), parent.extend([7, 8, 9])
    assert parent.keys == before
    assert (one.keys[:2], other.keys[:2]) == (before, before)
    assert one.keys[2] != other.keys[2]
    assert (one.length, other.length, len(other.keys)) == (6, 8, 4)


@given(ids, ids, sizes)
def test_equal_beginnings_share_exactly_their_blocks(a: list[int], b: list[int], size: int) -> None:
    hasher = Hasher("xxhash_cbor", "0")
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    one, other = hasher.chain(a, size).keys, hasher.chain(b, size).keys
    shared = common // size
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


@pytest.mark.parametrize("hasher", [*(Hasher(a, "0") for a in ALGORITHMS), ByteHasher()], ids=[*ALGORITHMS, "bytes"])
def test_a_suffix_never_matches_as_a_prefix(hasher: Hasher | ByteHasher) -> None:
    x, y = bytes(range(32)), bytes(range(100, 132))
    tokens = list if isinstance(hasher, Hasher) else bytes
    chains = [hasher.chain(tokens(t), 16) for t in (x, y + x, x + y, y[:16] + x, x[16:])]  # type: ignore[arg-type]
    keys = [set(c.keys) for c in chains]
    assert keys[0] & keys[1] == keys[0] & keys[3] == keys[0] & keys[4] == set()
    assert keys[0] < keys[2]
    assert len(keys[1]) == 4


@pytest.mark.parametrize("hasher", [*(Hasher(a, "0") for a in ALGORITHMS), ByteHasher()], ids=[*ALGORITHMS, "bytes"])
def test_salts_and_adapters_separate_every_block(hasher: Hasher | ByteHasher) -> None:
    tokens = bytes(range(8)) if isinstance(hasher, ByteHasher) else list(range(8))
    extras = [
        NO_EXTRA,
        Extra(cache_salt="a"),
        Extra(cache_salt="b"),
        Extra(lora_name="a", lora_path="/a"),
        Extra(lora_name="a", lora_path="/b"),
        Extra(lora_name="b", lora_path="/a"),
        Extra(lora_name="a", lora_path="/a", cache_salt="a"),
        Extra(lora_name="cache_salt", lora_path="a"),
    ]
    keys = [key for extra in extras for key in hasher.chain(tokens, 4, extra).keys]  # type: ignore[arg-type]
    assert len(keys) == len(set(keys)) == 2 * len(extras)


def test_an_empty_salt_is_none() -> None:
    assert Extra(cache_salt="").keys(first=True) is None
    assert Extra(cache_salt="s").keys(first=False) is None


@pytest.mark.parametrize(
    ("length", "blocks", "usable"), [(0, 0, 0), (1, 0, 0), (15, 0, 0), (16, 1, 0), (17, 1, 1), (33, 2, 2)]
)
def test_the_last_token_is_never_a_hit(length: int, blocks: int, usable: int) -> None:
    chain = Hasher("sha256_cbor").chain([7] * length, 16)
    assert (len(chain.keys), chain.usable_blocks, chain.length, chain.block_size) == (blocks, usable, length, 16)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_strings_hash_alike_whether_or_not_they_are_one_object(algorithm: str) -> None:
    hasher = Hasher(algorithm, "0")
    one = "adapter"
    other = "".join(["ada", "pter"])
    assert one is not other
    same = hasher.chain([1, 2], 2, Extra(one, one, one)).keys
    assert same == hasher.chain([1, 2], 2, Extra(one, other, "".join(["adap", "ter"]))).keys


def test_a_seed_makes_another_cache() -> None:
    chains = {seed: Hasher("sha256_cbor", seed).chain([1, 2], 2).keys[0] for seed in (None, "", "0", "random")}
    assert len(set(chains.values())) == 4
    assert chains[None] == Hasher("sha256_cbor", "vllm-none-hash").chain([1, 2], 2).keys[0]


def test_what_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown block hash algorithm 'md5', expected one of sha256, sha256_cbor"):
        Hasher("md5")
    with pytest.raises(ValueError, match="block size must be at least 1, not 0"):
        Hasher("sha256").chain([1], 0)


@pytest.mark.interpreted
def test_threads_that_begin_to_hash_at_once_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher, tokens, real = Hasher("sha256", "0"), list(range(100_000, 100_064)), blocks._head_of_pickle
    other_thread = iter([lambda: hasher.chain(tokens, 16)])

    def head(parent: int, block: int) -> bytes:
        for chain in other_thread:
            chain()
        return real(parent, block)

    monkeypatch.setattr(blocks, "_head_of_pickle", head)
    for size in (16, 32):
        assert hasher.chain(tokens, size).keys == low_64_bits(plain(hasher, tokens, size, NO_EXTRA))


@pytest.mark.interpreted
def test_a_chain_shows_what_matters() -> None:
    assert repr(Hasher("sha256", "0").chain([], 16)) == "Chain(keys=[], block_size=16, length=0)"
