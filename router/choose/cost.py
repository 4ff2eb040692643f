"""What a request would cost at each replica, in milliseconds. Pure.

    wait    the prefills already given to the replica and not yet done
    prefill the tokens of this prompt that it would have to compute, slowed by what it decodes meanwhile
    place   only where a new branch begins: what it means to come back here, again and again

A conversation's next turn is not a new branch: it goes where its past is unless the wait there outweighs the prefill
elsewhere. A first turn is: its shared system prompt may be warm at one replica alone, and following the warmth every
time would pile all conversations onto that one. Its price includes how much more work than the least busy replica
this one was given lately, up to a bound, so that a popular prefix spreads as far as its popularity warrants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.fleet.rates import Rates

# Chunked prefill shares the engine's steps with decoding: a fixed overhead, and a part for each decoding request.
# (The best of a grid in simulation over Mooncake's traces, 8 to 16 replicas.)
OVERHEAD: Final = 0.2
PER_DECODE: Final = 0.05
# A decoded token keeps an engine about as busy as this many prefilled ones do, in a well-filled batch.
DECODE_WEIGHT: Final = 5
# Evenness is worth the prefill of this many tokens at the most: warmth beyond that is followed however uneven it gets.
# (In simulation: 4 replicas stay within 1.25 of the mean on chats that share a 4,000-character system prompt; without
# the bound, evenness costs 3-7 % of the hits on Mooncake's traces and up to 5 % end to end; with it, nothing.)
PLACEMENT_TOKENS: Final = 4000


@dataclass(frozen=True, slots=True)
class End:
    """What a replica that may be one end of a split has of splits, and what could hold up those to come."""

    fetching: float = 0.0
    """Bytes of KV on their way to it."""
    expected: int = 0
    """Requests that it will answer and others compute, before their first token."""
    fetched: float = 0.0
    """Bytes of KV a second that came to it lately."""
    prefilling: float = 0.0
    """The share of the time, 0 up, that the prefills given to it lately take."""
    residual_ms: float = 0.0
    """How long what comes at any one moment waits for the one under way, if there is one; on average."""
    answering: float = 0.0
    """How many it decoded at a time lately, on average."""
    room: float = math.inf
    """Tokens of KV that fit beside all that it was given; below 0 where some of that waits for room itself."""
    freed: float = 0.0
    """Tokens of KV a second that answers gave back there which ended lately."""


NO_END: Final = End()


class Candidate:
    """One replica, as the request would find it. Tokens, ms.

    `cached`: leading tokens it holds of each prompt of the request, `hit` their sum. `continues`: the request goes on
    with a turn that ended here. `routed`: work it was given lately, in prefilled tokens' worth. `rank`: the
    data-parallel rank that this is about, where ranks are told apart. `end`: where it may be one end of a split.
    """

    __slots__ = (
        "cached",
        "continues",
        "decoding",
        "end",
        "hit",
        "in_flight",
        "name",
        "rank",
        "routed",
        "slowness",
        "waiting_ms",
    )

    def __init__(
        self,
        name: str,
        cached: tuple[int, ...],
        continues: bool,
        waiting_ms: float,
        decoding: int,
        in_flight: int,
        routed: float,
        slowness: float = 1.0,
        rank: int | None = None,
        end: End = NO_END,
    ) -> None:
        self.name = name
        self.cached = cached
        self.hit = cached[0] if len(cached) == 1 else sum(cached)
        self.continues = continues
        self.waiting_ms = waiting_ms
        self.decoding = decoding
        self.in_flight = in_flight
        self.routed = routed
        self.slowness = slowness
        self.rank = rank
        self.end = end


class Price:
    """The terms of one replica's cost, ms. `prefill_ms`: the engine's own time for the prefill, without what slows it:
    this is what is booked."""

    __slots__ = ("placement_ms", "prefill_ms", "slowed_ms", "total_ms", "waiting_ms")

    def __init__(self, waiting_ms: float, prefill_ms: float, slowed_ms: float, placement_ms: float) -> None:
        self.waiting_ms = waiting_ms
        self.prefill_ms = prefill_ms
        self.slowed_ms = slowed_ms
        self.placement_ms = placement_ms
        self.total_ms = waiting_ms + slowed_ms + placement_ms


def total(tokens: list[int]) -> int:
    """Of all prompts of a request; mostly there is one."""
    return tokens[0] if len(tokens) == 1 else sum(tokens)


def holds(candidate: Candidate, tokens: list[int]) -> int:
    """Tokens of KV that a request takes there which others in flight do not hold anyway: a conversation's past is its
    own, any other beginning is shared."""
    return total(tokens) - (0 if candidate.continues else candidate.hit)


def prices(candidates: list[Candidate], tokens: list[int], rates: Rates, *, branch: bool) -> list[Price]:
    """What a request with prompts of `tokens` costs at each candidate. `branch`: it begins a new one."""
    least = math.inf
    for candidate in candidates:
        least = min(least, candidate.routed)
    found = []
    before, alone = None, 0.0
    for candidate in candidates:
        if candidate.cached != before:  # many hold the same
            before, alone = candidate.cached, rates.prefills_ms(tokens, candidate.cached)
        prefill = alone * candidate.slowness
        slowed = prefill * (1 + OVERHEAD + PER_DECODE * candidate.decoding)
        placement = min(candidate.routed - least, PLACEMENT_TOKENS) * rates.token_ms if branch else 0.0
        found.append(Price(candidate.waiting_ms, prefill, slowed, placement))
    return found


def begins_branch(candidates: list[Candidate]) -> bool:
    """Whether the request is new everywhere: no replica holds a past that ends where this request goes on."""
    deepest, continues = -1, False
    for candidate in candidates:
        hit = candidate.hit
        if hit > deepest:
            deepest, continues = hit, candidate.continues
        elif hit == deepest:
            continues = continues or candidate.continues
    return not continues
