"""What goes to the shared index and what comes back, as bytes. Pure. The other end: the .lua files beside this one."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING

from router.index.memory import Match

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

KEY_BYTES = 8
PAGE_BLOCKS = 16

RECORD = 1
"""Held from the decision on."""
ENDED = 2
"""Answered: the answer's blocks are among them."""
FORGET = 3
"""Not computed after all, from some block on."""
AGAIN = 4
"""Told anew to a store that lost it."""

_MATCH = Struct(">II")
_HEAD = Struct(">BHI")
_PART = Struct(">III")
_LOAD = Struct(">HIIfff")


@dataclass(frozen=True, slots=True)
class Others:
    """What the other routers have at one replica, summed. Units as in `router.fleet.ledger.Load`."""

    in_flight: int = 0
    decoding: int = 0
    waiting_ms: float = 0.0
    routed: float = 0.0


NO_LOAD = Others()


@dataclass(frozen=True, slots=True)
class Outside:
    """What is known beyond this process: per replica a match for each chain asked about, and the others' load."""

    matches: Mapping[str, Sequence[Match]] = field(default_factory=dict)
    loads: Mapping[str, Others] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place in the store: its number, and the epoch of its present incarnation."""

    slot: int
    epoch: int


def deeper(own: Match, told: Match) -> Match:
    """The deeper of what this router and what all of them know of one chain at one replica. The rank is this one's."""
    if told.depth > own.depth:
        return Match(told.depth, told.continues, own.rank)
    if told.depth == own.depth and told.continues and not own.continues:
        return Match(own.depth, True, own.rank)
    return own


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys (unsigned, 64 bits) as big-endian bytes: their order is then the numbers' own."""
    packed = array("Q", keys)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def pack_slots(slots: Iterable[int]) -> bytes:
    packed = array("H", slots)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def read_matches(packed: bytes, count: int) -> list[tuple[Match, int]]:
    """`count` matches, in the order in which they were asked for, each with the replica's epoch in the store."""
    if len(packed) != count * _MATCH.size:
        raise ValueError(f"{len(packed)} bytes are not {count} matches")
    return [(Match(depth >> 1, bool(depth & 1)), epoch) for depth, epoch in _MATCH.iter_unpack(packed)]


def operation(kind: int, seat: Seat, base: int, start: int, total: int, prompt_end: int) -> bytes:
    """The head of one write; see shared_record.lua. For FORGET `prompt_end` is the first block that is not held."""
    return _HEAD.pack(kind, seat.slot, seat.epoch) + base.to_bytes(6, "big") + _PART.pack(start, total, prompt_end)


def pack_load(loads: Iterable[tuple[int, Others, float]]) -> bytes:
    """A router's own load: number, load and ms that the first prefill in the queue still takes, for each busy replica.

    The waiting time goes down by itself until that prefill is done, so it travels in two parts.
    """
    return b"".join(
        _LOAD.pack(slot, load.in_flight, load.decoding, load.waiting_ms, head_ms, load.routed)
        for slot, load, head_ms in loads
    )


def add_load(packed: bytes, age_ms: float, into: dict[int, Others]) -> None:
    """Add a load that was published `age_ms` ago. Raises ValueError for bytes that are none."""
    if len(packed) % _LOAD.size:
        raise ValueError(f"{len(packed)} bytes are no load")
    for slot, in_flight, decoding, waiting_ms, head_ms, routed in _LOAD.iter_unpack(packed):
        before = into.get(slot, NO_LOAD)
        into[slot] = Others(
            before.in_flight + in_flight,
            before.decoding + decoding,
            before.waiting_ms + max(0.0, waiting_ms - min(head_ms, age_ms)),
            before.routed + routed,
        )
