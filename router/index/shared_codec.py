"""What goes to the shared index and what comes back, as bytes. Pure. The other end: the .lua files beside this one."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING

from router.index.pages import PAGE_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.index.pages import Page

KEY_BYTES = 8

RECORD = 1
"""Held from the decision on."""
ENDED = 2
"""Answered: the answer's blocks are among them."""
FORGET = 3
"""Not computed after all, from some block on."""
AGAIN = 4
"""Told anew to a store that lost it."""

BEGIN = b"\1\0"
"""All pages are told again from here on."""
WHOLE = b"\3\0"
"""All pages were told."""
_TOLD = 2
_AGAIN, _REMOVED, _MORE = 1, 2, 4

_MATCH = Struct(">II")
_SOON = Struct(">HII")
_RANK = Struct(">HI")
_HEAD = Struct(">BHI")
_PART = Struct(">IIII")
_LOAD = Struct(">HIIfff")


@dataclass(frozen=True, slots=True)
class Others:
    """What the other routers have at one replica, summed. Units as in `router.fleet.ledger.Load`."""

    in_flight: int = 0
    decoding: int = 0
    waiting_ms: float = 0.0
    routed: float = 0.0


NO_LOAD = Others()


@dataclass(slots=True)
class Told:
    """What the store knows of one chain at one replica, or at one data-parallel `rank` of it (None: not told apart).

    `depth`: leading blocks. `continues`: see `Match`. `exact`: a writer tells what the replica's events say, so that
    nothing is presumed; `open`: it may hold more of the page that begins at `depth` or before. `soon`: to which depth
    it will hold it once the prompts that other routers sent there are computed, if it holds it to `soon_from`.
    """

    depth: int
    continues: bool = False
    exact: bool = False
    open: bool = False
    soon_from: int = 0
    soon: int = 0
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Outside:
    """What is known beyond this process: per replica, for each chain asked about, what is told of it and of its ranks;
    and the others' load."""

    matches: Mapping[str, Sequence[Sequence[Told]]] = field(default_factory=dict)
    loads: Mapping[str, Others] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place in the store: its number, and the epoch of its present incarnation."""

    slot: int
    epoch: int


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys (unsigned, 64 bits) as big-endian bytes: their order is then the numbers' own."""
    packed = array("Q", keys)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def pack_question(packed: bytes) -> tuple[bytes, bytes, bytes]:
    """What is asked with of a packed chain: the first key of each page; of each key the last byte but one; the last."""
    firsts = memoryview(packed).cast("Q")[::PAGE_BLOCKS].tobytes()
    return firsts, packed[KEY_BYTES - 2 :: KEY_BYTES], packed[KEY_BYTES - 1 :: KEY_BYTES]


def common_keys(one: bytes, other: bytes) -> int:
    """How many leading keys two packed chains have in common: by bisection, for they name all that comes before."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = (middle - 1) * KEY_BYTES, middle * KEY_BYTES
        if one[begin:end] == other[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low


def pack_slots(slots: Iterable[int]) -> bytes:
    packed = array("H", slots)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def read_matches(packed: bytes, soon: bytes, count: int) -> list[tuple[Told, int]]:
    """`count` matches, in the order in which they were asked for, each with the replica's epoch in the store. Raises
    ValueError for bytes that are none."""
    if len(packed) != count * _MATCH.size or len(soon) % _SOON.size:
        raise ValueError(f"{len(packed)} and {len(soon)} bytes are not {count} matches")
    found = [
        (Told(depth >> 3, bool(depth & 1), bool(depth & 2), bool(depth & 4)), epoch)
        for depth, epoch in _MATCH.iter_unpack(packed)
    ]
    for which, begin, end in _SOON.iter_unpack(soon):
        found[which][0].soon_from, found[which][0].soon = begin, end
    return found


def read_ranks(packed: bytes) -> list[Seat]:
    """The places of a replica's data-parallel ranks, from 0 on; none where they are not told apart."""
    return [Seat(slot, epoch) for slot, epoch in _RANK.iter_unpack(packed)]


def operation(kind: int, seat: Seat, base: int, start: int, total: int, prompt_end: int, ms: int) -> bytes:
    """The head of one write; see shared_record.lua. For FORGET `prompt_end` is the first block that is not held."""
    return _HEAD.pack(kind, seat.slot, seat.epoch) + base.to_bytes(6, "big") + _PART.pack(start, total, prompt_end, ms)


def pack_seat(seat: Seat) -> bytes:
    return _RANK.pack(seat.slot, seat.epoch)


def pack_page(page: Page, *, again: bool) -> tuple[bytes, bytes]:
    """Head and body of what is told of a page; see shared_contents.lua."""
    flags = _AGAIN * again | _REMOVED * page.removed | _MORE * page.more
    body = [pack_keys([page.name])]
    for path in page.paths:
        body += [bytes([len(path)]), pack_keys(path)]
    return bytes([_TOLD, flags]), b"".join(body)


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
