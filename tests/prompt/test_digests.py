"""Block hashes written in C are those written in Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.prompt.blocks as hashing
from router.prompt.blocks import Extra, Hasher
from tests.native import compiled

SOURCE = Path(hashing.__file__).with_name("digests.c")

Sha256 = Callable[[bytes, "array[int]", int], bytes]

IDS = st.one_of(
    st.integers(0, 2**31 - 1), st.integers(-(2**31), -1), st.sampled_from([0, 255, 256, 65_535, 65_536, 2**31 - 1])
)


@pytest.fixture(scope="module")
def sha256(tmp_path_factory: pytest.TempPathFactory) -> Sha256:
    module = compiled("router.prompt.digests", SOURCE, tmp_path_factory.mktemp("digests"), "crypto")
    return module.sha256  # type: ignore[no-any-return]


@pytest.mark.interpreted
@settings(deadline=None)
@given(ids=st.lists(IDS, max_size=150), size=st.integers(4, 40), parent=st.binary(min_size=32, max_size=32))
def test_the_same_digests(sha256: Sha256, ids: list[int], size: int, parent: bytes) -> None:
    # A list is never hashed in C.
    assert sha256(parent, array("i", ids), size) == Hasher("sha256").links(parent, ids, size, None)


@pytest.mark.parametrize(("size", "count"), [(4, 0), (4, 3), (16, 16 * 300 + 7), (10_000, 20_000), (9_999, 9_999)])
def test_the_largest_blocks_and_many_of_them(sha256: Sha256, size: int, count: int) -> None:
    hasher = Hasher("sha256")
    ids = [i * 65_537 % 150_000 for i in range(count)]
    found = sha256(hasher.none_hash, array("i", ids), size)
    assert found == hasher.links(hasher.none_hash, ids, size, None)
    assert len(found) == 32 * (count // size)


def test_what_it_cannot_pickle_is_refused(sha256: Sha256) -> None:
    ids, parent = array("i", range(64)), bytes(32)
    for size in (0, -1, 3, 10_001):
        with pytest.raises(ValueError, match="blocks of 4 to 10000 ids"):
            sha256(parent, ids, size)
    with pytest.raises(ValueError, match="a digest of 32 bytes"):
        sha256(bytes(16), ids, 16)
    for other in (array("q", range(64)), array("I", range(64)), bytes(64)):
        with pytest.raises(TypeError, match="32-bit"):
            sha256(parent, other, 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sha256(parent, list(range(64)), 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected"):
        sha256(parent, ids)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected"):
        sha256("a" * 32, ids, 16)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        sha256(parent, ids, 2**70)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("algorithm", "extra", "size", "ids"),
    [
        ("sha256", Extra(), 16, array("i", range(100))),
        ("sha256", Extra(), 3, array("i", range(100))),
        ("sha256", Extra(cache_salt="s"), 16, array("i", range(100))),
        ("sha256", Extra(lora_name="a", lora_path="/a"), 16, array("i", range(100))),
        ("sha256", Extra(), 16, array("q", range(2**40, 2**40 + 100))),
        ("sha256", Extra(), 16, list(range(100))),
        ("sha256_cbor", Extra(), 16, array("i", range(100))),
        ("xxhash", Extra(), 16, array("i", range(100))),
    ],
)
def test_a_hasher_asks_it_for_what_it_can_do(
    sha256: Sha256,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    extra: Extra,
    size: int,
    ids: list[int],
) -> None:
    asked = []

    def ask(parent: bytes, ids: array[int], size: int) -> bytes:
        asked.append(len(ids) // size)
        return sha256(parent, ids, size)

    hasher = Hasher(algorithm)
    monkeypatch.setattr(hashing, "_native", None)
    expected = hasher.chain(ids, size, extra)
    monkeypatch.setattr(hashing, "_native", ask)
    chain = hasher.chain(ids, size, extra)
    assert chain == expected
    more = ids[7:50]
    assert chain.extend(more) == expected.extend(more)
    plain = algorithm == "sha256" and extra.lora_name is None and size > 3 and ids[0] < 2**31
    assert (sum(asked) > 0) == (plain and isinstance(ids, array))
