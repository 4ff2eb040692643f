"""What the workers of one router tell each other."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec


class Record(msgspec.Struct, array_like=True, gc=False):
    """See `Index.record`; with `forgotten`, `Index.forget`. Times are of the clock that all processes of a machine have
    in common.

    As it is told, `keys` are only those after the first `common` ones, which it shares with the record told before it,
    or, of an answer, with its `prompt`, if that is known by its last key; see `Abridger`.
    """

    replica: str
    keys: array  # type: ignore[type-arg]  # msgspec evaluates it, and before Python 3.12 it can't be subscripted
    rank: int | None = None
    ended: bool = False
    prompt_blocks: int = 0
    now: float = 0.0
    until: float = 0.0
    beyond: int = 0
    partial: bool = False
    forgotten: bool = False
    common: int = 0
    prompt: int | None = None


class Load(msgspec.Struct, array_like=True, gc=False):
    """One replica's load from one worker; see `router.fleet.ledger.Load`."""

    replica: str
    in_flight: int
    decoding: int
    waiting_ms: float
    head_ms: float
    routed: float


class News(msgspec.Struct, array_like=True):
    """What one worker tells all others: its whole load, and what it recorded since the last time."""

    worker: int
    loads: list[Load]
    records: list[Record]


def encoded(value: object) -> bytes:
    """What msgspec cannot encode by itself: keys, as the machine has them."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"nothing is told of {type(value).__name__}")


def decoded(kind: type, value: Any) -> object:
    """The other way round. Raises ValueError for keys that are none."""
    if kind is not array:
        raise NotImplementedError(f"nothing is told of {kind}")
    if not isinstance(value, bytes):
        raise ValueError("keys are told as bytes")
    return array("Q", value)
