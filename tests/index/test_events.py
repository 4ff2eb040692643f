"""Payloads as vLLM wrote them, as older ones wrote them, and as nobody should."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.events import Cleared, EventError, Removed, Stored, read_batch, time_of

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).resolve().parents[1] / "data" / "vllm" / "kv_events.jsonl").read_text().splitlines()
]


def payload(*events: Any, ts: float = 1.5, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def test_what_vllm_sent_is_read_as_recorded() -> None:
    seen = 0
    for batch in RECORDED:
        if "payload" not in batch:
            continue
        read = read_batch(bytes.fromhex(batch["payload"]))
        assert read.malformed == 0
        assert len(read.events) == len(batch["events"])
        for event, told in zip(read.events, batch["events"], strict=True):
            seen += 1
            if isinstance(event, Stored):
                assert told["type"] == "BlockStored"
                assert event.keys == told["block_hashes"]
                assert event.parent == told["parent_block_hash"]
                assert event.tokens == told["token_ids"]
                assert (event.block_size, event.medium, event.group) == (32, "GPU", 0)
                assert (event.kind, event.extra) == ("full_attention", told["extra_keys"])
            elif isinstance(event, Removed):
                assert (event.keys, event.medium, event.group) == (told["block_hashes"], "GPU", 0)
            else:
                assert told == {"type": "AllBlocksCleared"}
    assert seen == 12


def test_arrays_of_vllm_before_0_24() -> None:
    read = read_batch(
        payload(
            ["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "GPU", "adapter", [["adapter"], None], 1, "mamba", None],
            ["BlockRemoved", [7], "CPU", 1],
            ["BlockRemoved", [7]],
            ["AllBlocksCleared"],
            rank=3,
        )
    )
    assert read.events == [
        Stored([7, 8], 6, [1, 2, 3, 4], 2, "GPU", "adapter", [["adapter"], None], 1, "mamba", lookahead=False),
        Removed([7], "CPU", 1),
        Removed([7], "GPU", None),
        Cleared(),
    ]
    assert (read.at, read.rank, read.malformed) == (1.5, 3, 0)


def test_hashes_of_bytes_are_known_by_their_end() -> None:
    digest = bytes(range(32))
    stored = {"type": "BlockStored", "block_hashes": [digest], "parent_block_hash": digest, "token_ids": [1],
              "block_size": 1}  # fmt: skip
    (event,) = read_batch(payload(stored)).events
    assert isinstance(event, Stored)
    assert event.keys == [0x18191A1B1C1D1E1F]
    assert event.parent == 0x18191A1B1C1D1E1F


def test_unknown_fields_and_types_are_passed_over() -> None:
    read = read_batch(
        payload(
            {
                "type": "BlockRemoved",
                "block_hashes": [1],
                "medium": "GPU",
                "locality": "LOCAL",
                "of_tomorrow": {"a": 1},
            },
            {"type": "BlockMoved", "to": 3},
            ["BlockMoved", 3],
            ["BlockRemoved", [2], "GPU", 0, "more", "and more"],
        )
    )
    assert read.events == [Removed([1], "GPU", None), Removed([2], "GPU", 0)]
    assert read.malformed == 0


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockRemoved", "block_hashes": ["text"]},
        {"type": "BlockRemoved"},
        {"type": "BlockRemoved", "block_hashes": [b"short"]},
        {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3],
         "block_size": 2},
        {"type": 7},
        {},
        [],
        ["BlockStored", 1],
        "AllBlocksCleared",
        None,
    ],
)  # fmt: skip
def test_an_event_that_makes_no_sense_is_counted_and_the_others_stand(event: Any) -> None:
    read = read_batch(payload({"type": "AllBlocksCleared"}, event, {"type": "AllBlocksCleared"}))
    assert read.events == [Cleared(), Cleared()]
    assert read.malformed == 1


@pytest.mark.parametrize("junk", [b"", b"\x93", b"\x90", b"junk", msgspec.msgpack.encode([1.0, 2, 3]), b"\x91" * 5000])
def test_a_payload_that_makes_no_sense(junk: bytes) -> None:
    with pytest.raises(EventError):
        read_batch(junk)


def test_a_payload_beyond_all_measure_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.index.events.MAX_PAYLOAD_BYTES", 30)
    assert read_batch(payload(["AllBlocksCleared"])).events == [Cleared()]
    with pytest.raises(EventError, match="bytes"):
        read_batch(payload(["AllBlocksCleared"], ["AllBlocksCleared"]))


def test_the_time_without_reading_the_rest() -> None:
    assert time_of(payload(ts=1764000000.25)) == 1764000000.25
    assert time_of(b"\x93\xcb\x00") is None
    assert time_of(b"junk that is long enough") is None


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for each in (data, b"\x93\xcb" + bytes(8) + b"\x91" + data):
        with contextlib.suppress(EventError):
            read_batch(each)
