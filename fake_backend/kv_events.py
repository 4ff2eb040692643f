"""KV events as vLLM writes them (distributed/kv_events.py): what a batch of pool events looks like on the wire."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fake_backend.connector import TierEvent, TierRemoved, TierStored
from fake_backend.pool import CacheEvent, Cleared, Removed, Stored
from fake_backend.request import Request

MAP_ENCODING_SINCE = (0, 24)
"""Before, events were arrays in a fixed order."""

TIER_MEDIUM = "CPU"

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Content:
    """What an event says of a request's blocks."""

    token_ids: Sequence[int]
    """Prompt and answer."""
    digests: Sequence[bytes]
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """How hashes and events are written."""

    block_size: int
    whole_hashes: bool = False
    """All bytes of a digest (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) instead of its low 64 bits as a number."""
    as_maps: bool = True

    def payload(self, events: Sequence[Mapping[str, Any]], timestamp: float, rank: int) -> bytes:
        """One message: an array of time, events and data-parallel rank."""
        shown = events if self.as_maps else [list(event.values()) for event in events]
        return _encode([timestamp, shown, rank])


class Describer:
    """Turns pool events into vLLM's, in their order.

    Removed blocks are named by the digest that was stored under their key, which is remembered while any block has it.
    """

    def __init__(self, encoding: Encoding, content_of: Callable[[Request], Content], medium: str = "GPU") -> None:
        self._encoding = encoding
        self._content_of = content_of
        self._medium = medium
        self._digests: dict[int, bytes] = {}

    def describe(self, event: CacheEvent | TierEvent) -> list[dict[str, Any]]:
        """One event, or one for each block of another tier."""
        match event:
            case TierStored(keys=keys):
                return [self._tier_stored(key) for key in keys]
            case TierRemoved(keys=keys):
                return [self._removed(key, TIER_MEDIUM) for key in keys]
            case Stored():
                return [self._stored(event)]
            case Removed(key=key):
                return [self._removed(key, self._medium)]
            case Cleared():
                return [{"type": "AllBlocksCleared"}]

    def _removed(self, key: int, medium: str) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [self._name(key)], "medium": medium, "group_idx": 0}

    def _tier_stored(self, key: int) -> dict[str, Any]:
        """VLLM's placeholder: unless told otherwise it says no more of an offloaded block than its hash."""
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._name(key)],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": TIER_MEDIUM,
            "lora_name": None,
        }
        return stored if self._encoding.as_maps else stored | {"extra_keys": None, "group_idx": 0}

    def _name(self, key: int) -> int | bytes:
        return self._digests[key] if self._encoding.whole_hashes else key

    def _stored(self, event: Stored) -> dict[str, Any]:
        content = self._content_of(event.request)
        size, keys = self._encoding.block_size, event.request.keys
        if self._encoding.whole_hashes:
            for index in range(max(0, event.first - 1), event.last):
                self._digests[keys[index]] = content.digests[index]
        extra: list[list[str] | None] = []
        for index in range(event.first, event.last):
            known = [content.lora_name] if content.lora_name else []
            if index == 0 and content.cache_salt:
                known.append(content.cache_salt)
            extra.append(known or None)
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._name(key) for key in keys[event.first : event.last]],
            "parent_block_hash": self._name(keys[event.first - 1]) if event.first else None,
            "token_ids": list(content.token_ids[event.first * size : event.last * size]),
            "block_size": size,
            "lora_id": content.lora_id,
            "medium": self._medium,
            "lora_name": content.lora_name,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if content.session_id is not None and self._encoding.as_maps:
            stored["session_id"] = content.session_id
        if not self._encoding.as_maps:
            stored["kv_cache_spec_sliding_window"] = None
        return stored


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank publishes: the port moved on by its number."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{rank}"
    base, _colon, port = endpoint.rpartition(":")
    return endpoint if port == "0" else f"{base}:{int(port) + rank}"


def binds(endpoint: str) -> bool:
    """Wildcard, ipc and inproc endpoints are bound, all others connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
