"""What the workers of one router tell each other."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, array_like=True, gc=False):
    """See `Index.record`; with `forgotten`, `Index.forget`. `keys`: 8 bytes each. Times are of the clock that all
    processes of a machine have in common."""

    replica: str
    keys: bytes
    rank: int | None = None
    ended: bool = False
    prompt_blocks: int = 0
    now: float = 0.0
    until: float = 0.0
    beyond: int = 0
    partial: bool = False
    forgotten: bool = False


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
