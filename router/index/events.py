"""KV events as they come off the wire (vLLM distributed/kv_events.py): bytes to what happened in a cache. No I/O.

A payload is an array of time, events and data-parallel rank. Events are maps with a "type" since vLLM 0.24, arrays in a
fixed order before. Fields and types that are not known here are passed over: newer engines add them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
"""A batch beyond this is not looked at. One that stores a million tokens has about 6 MiB."""

_LOW = (1 << 64) - 1
_Hash: TypeAlias = int | bytes


class EventError(ValueError):
    """A payload or an event in it is not what vLLM writes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks came to be cached, each the child of the one before; the first one's parent is `parent`.

    `keys`: low 64 bits of their hashes. `tokens`: ids of all of them, empty where the event names the blocks alone
    (what is offloaded). `extra`: for each block what else was hashed, untagged. `lookahead`: ids beyond the blocks were
    hashed too (draft models, vLLM >= 0.33). `group`: the KV cache group; `kind`: its attention where that is told.
    """

    keys: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    medium: str
    lora_name: str | None
    extra: list[list[Any] | None] | None
    group: int
    kind: str | None
    lookahead: bool


@dataclass(frozen=True, slots=True)
class Removed:
    keys: list[int]
    medium: str
    group: int | None
    """None where the event does not tell, which means the only one."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block of the engine is gone."""


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one engine step did. `at`: unix seconds by the engine's clock. `malformed`: events that make no sense."""

    at: float
    events: list[Event]
    rank: int
    malformed: int


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lookahead_token_ids: Any = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


# The same in order of position.
class _StoredRow(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedRow(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_batch = msgspec.msgpack.Decoder(_Batch)
_map = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_double = struct.Struct(">d")
_any = msgspec.msgpack.Decoder()
_KNOWN = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def time_of(payload: bytes) -> float | None:
    """A batch's time, without reading the rest; None where it is not written as vLLM writes it."""
    return float(_double.unpack_from(payload, 2)[0]) if payload[:2] == b"\x93\xcb" and len(payload) >= 10 else None


def read_batch(payload: bytes) -> Batch:
    """Raises EventError where the payload as a whole makes no sense; single events that make none are counted."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventError(f"a batch of {len(payload)} bytes")
    try:
        batch = _batch.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EventError(str(error)) from None
    events: list[Event] = []
    malformed = 0
    for raw in batch.events:
        try:
            event = _event(bytes(raw))
        except (msgspec.MsgspecError, EventError, RecursionError):
            malformed += 1
        else:
            if event is not None:
                events.append(event)
    return Batch(batch.ts, events, batch.rank or 0, malformed)


def _event(raw: bytes) -> Event | None:
    """None for a type that is not known here."""
    as_map = raw[0] & 0xF0 == 0x80 or raw[0] in (0xDE, 0xDF)
    try:
        event = (_map if as_map else _row).decode(raw)
    except msgspec.ValidationError:
        if _type(_any.decode(raw)) in _KNOWN:
            raise
        return None
    match event:
        case _Stored() | _StoredRow():
            return _stored(event)
        case _Removed() | _RemovedRow():
            return Removed([_key(h) for h in event.block_hashes], event.medium or "GPU", event.group_idx)
        case _:
            return Cleared()


def _type(value: Any) -> str:
    name = value.get("type") if isinstance(value, dict) else value[0] if isinstance(value, list) and value else None
    if not isinstance(name, str):
        raise EventError("an event without a type")
    return name


def _stored(event: _Stored | _StoredRow) -> Stored:
    if event.token_ids and len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise EventError(
            f"{len(event.token_ids)} token ids for {len(event.block_hashes)} blocks of {event.block_size} tokens"
        )
    return Stored(
        keys=[_key(h) for h in event.block_hashes],
        parent=None if event.parent_block_hash is None else _key(event.parent_block_hash),
        tokens=event.token_ids,
        block_size=event.block_size,
        medium=event.medium or "GPU",
        lora_name=event.lora_name,
        extra=event.extra_keys,
        group=event.group_idx or 0,
        kind=event.kv_cache_spec_kind,
        lookahead=bool(getattr(event, "lookahead_token_ids", None)),
    )


def _key(digest: _Hash) -> int:
    if isinstance(digest, int):
        return digest & _LOW
    if len(digest) < 8:
        raise EventError(f"a hash of {len(digest)} bytes")
    return int.from_bytes(digest[-8:], "big")
