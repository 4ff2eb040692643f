"""Whether a request's prompt is computed where it is answered, or by another replica that hands its KV over. Pure.

    local    the wait and the prefill at a replica that answers, and what this prefill takes from the answers that it
             decodes meanwhile
    split    the wait and the prefill at another replica, then the KV's way to the one that answers
    either   what one more answer costs those that are decoded beside it

One minimum in milliseconds over all replicas that answer and all pairs. It never goes through the pairs one by one:
what a prefill costs depends on the one end, the wait and the decoding on the other, and only the transfer on both;
with the costs of either end in order, the first pair is the best wherever the links are alike.

Other routers' rules stand beside it by name, to compare with: they see the prompt's length alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from router.choose.cost import DECODE_WEIGHT, Candidate, Price, begins_branch, prices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.fleet.links import Link, Links
    from router.fleet.rates import Rates

# A prefill on a replica that decodes holds all its answers up; so much of that is set against the request's own first
# token. Both count in the end-to-end time, but only one in the time to the first token.
DAMAGE = 0.1
# The same for what one more answer takes from those beside it.
CROWDING = 0.1


@dataclass(slots=True)
class PairPrice:
    """The terms of one pair's cost, ms."""

    prefill: Price
    transfer_ms: float
    decode_waiting_ms: float
    """Of the replica that answers: this passes while the prompt is computed."""
    crowding_ms: float

    @property
    def total_ms(self) -> float:
        arrival = self.prefill.total_ms + self.transfer_ms
        return max(arrival, self.decode_waiting_ms) + self.crowding_ms


@dataclass(slots=True)
class LocalPrice:
    """The terms of a replica's cost that does all of a request itself, ms."""

    price: Price
    damage_ms: float
    crowding_ms: float

    @property
    def total_ms(self) -> float:
        return self.price.total_ms + self.damage_ms + self.crowding_ms


@dataclass(slots=True)
class Pair:
    """Places of two candidates, and what it costs that the first computes the prompt and the second answers."""

    prefill: int
    decode: int
    price: PairPrice
    link: Link


@dataclass(slots=True)
class SplitDecision:
    """`prefill` and `decode` are places among `candidates`; `prefill` is None where the replica that answers computes
    the prompt itself. `local` and `pair` are the best of either kind, whichever was taken; `pair` is None where there
    is none to be had. `locals` are the prices of all that answer, in the order of the places in `answering`.
    """

    prefill: int | None
    decode: int
    reason: str
    candidates: Sequence[Candidate]
    answering: Sequence[int]
    locals: Sequence[LocalPrice]
    local: int
    """The best place to do all of it, among `candidates`."""
    pair: Pair | None

    @property
    def local_price(self) -> LocalPrice:
        return self.locals[self.answering.index(self.local)]


@dataclass(slots=True)
class Choice:
    """What a decider is asked: everything about one request and the replicas that could do it or a part of it.

    `computing` and `answering` are places among `candidates`: of those that may compute a prompt for others, and of
    those that may answer (at least one). A replica that does both stands in both. `tokens`: the lengths of the prompts.
    """

    candidates: Sequence[Candidate]
    computing: Sequence[int]
    answering: Sequence[int]
    tokens: Sequence[int]
    answer_tokens: int
    rates: Rates
    links: Links
    locals: Sequence[LocalPrice] = field(init=False)
    local: int = field(init=False)
    branch: bool = field(init=False)

    def __post_init__(self) -> None:
        self.branch = begins_branch(self.candidates)
        own = [self.candidates[place] for place in self.answering]
        priced = prices(own, self.tokens, self.rates, branch=self.branch)
        self.locals = [
            LocalPrice(price, DAMAGE * candidate.decoding * price.prefill_ms, self.crowding_ms(candidate))
            for candidate, price in zip(own, priced, strict=True)
        ]
        best = min(range(len(own)), key=lambda i: (self.locals[i].total_ms, own[i].routed, own[i].name))
        self.local = self.answering[best]

    @property
    def local_price(self) -> LocalPrice:
        return self.locals[self.answering.index(self.local)]

    @property
    def uncached(self) -> int:
        """Tokens that the best place for all of it would have to compute."""
        return sum(self.tokens) - self.candidates[self.local].hit

    def crowding_ms(self, candidate: Candidate) -> float:
        """What this answer takes from those beside it, and they from it."""
        return CROWDING * self.answer_tokens * DECODE_WEIGHT * self.rates.token_ms * candidate.in_flight

    def best_pair(self, transfer_ms: Callable[[Link, float], float] | None = None) -> Pair | None:
        """The pair of the least cost; None where there is none. `transfer_ms`: what moving bytes over a link is taken
        to cost, no less than the link takes."""
        links, candidates, total = self.links, self.candidates, sum(self.tokens)
        cost = transfer_ms or (lambda link, size: link.transfer_ms(size))
        given = [candidates[place] for place in self.computing]
        if not given:
            return None
        priced = prices(given, self.tokens, self.rates, branch=self.branch)
        computing = sorted(
            (
                (price.total_ms, candidate.routed, place, price)
                for price, candidate, place in zip(priced, given, self.computing, strict=True)
            ),
            key=lambda each: each[:3],
        )
        answering = []
        for place in self.answering:
            candidate = candidates[place]
            size = (total - candidate.hit) * links.bytes_per_token
            floor = links.fastest.transfer_ms(size)
            crowding = self.crowding_ms(candidate)
            bound = max(computing[0][0] + floor, candidate.waiting_ms) + crowding
            answering.append((bound, candidate.routed, place, size, floor, crowding))
        answering.sort(key=lambda each: each[:3])
        best: Pair | None = None
        least = float("inf")
        for bound, _, decode, size, floor, crowding in answering:
            if bound >= least:
                break  # and so are all after it
            waiting, name = candidates[decode].waiting_ms, candidates[decode].name
            for spent, _, prefill, price in computing:
                if max(spent + floor, waiting) + crowding >= least:
                    break
                if prefill == decode:
                    continue
                link = links.between(candidates[prefill].name, name)
                transfer = cost(link, size)
                all_in_all = max(spent + transfer, waiting) + crowding
                if all_in_all < least:
                    least = all_in_all
                    best = Pair(prefill, decode, PairPrice(price, transfer, waiting, crowding), link)
        return best

    def stay(self, reason: str, pair: Pair | None = None) -> SplitDecision:
        """One replica does all of it."""
        return self._decision(None, self.local, reason, pair)

    def split(self, pair: Pair, reason: str) -> SplitDecision:
        return self._decision(pair.prefill, pair.decode, reason, pair)

    def _decision(self, prefill: int | None, decode: int, reason: str, pair: Pair | None) -> SplitDecision:
        return SplitDecision(prefill, decode, reason, self.candidates, self.answering, self.locals, self.local, pair)


class SplitDecider(Protocol):
    def decide(self, choice: Choice) -> SplitDecision:
        """Local or split, and where."""


@dataclass(frozen=True, slots=True)
class Always:
    """Split wherever there is a pair."""

    def decide(self, choice: Choice) -> SplitDecision:
        pair = choice.best_pair()
        return choice.stay("no replica to compute it elsewhere") if pair is None else choice.split(pair, "always split")


@dataclass(frozen=True, slots=True)
class Never:
    """Each replica that answers computes its prompts itself."""

    def decide(self, choice: Choice) -> SplitDecision:
        return choice.stay("never split")


@dataclass(frozen=True, slots=True)
class UncachedTokens:
    """Split from so many uncached tokens on: llm-d's rule."""

    least: int = 16

    def decide(self, choice: Choice) -> SplitDecision:
        pair = choice.best_pair() if choice.uncached >= self.least else None
        if pair is None:
            return choice.stay(f"{choice.uncached} uncached tokens")
        return choice.split(pair, f"{choice.uncached} uncached tokens")


@dataclass(frozen=True, slots=True)
class IslBounding:
    """Local where few tokens are uncached and these are a small part of the prompt: Dynamo's rule."""

    below_tokens: int = 2048
    below_share: float = 0.7

    def decide(self, choice: Choice) -> SplitDecision:
        uncached, total = choice.uncached, max(1, sum(choice.tokens))
        few = uncached < self.below_tokens and uncached / total < self.below_share
        pair = None if few else choice.best_pair()
        if pair is None:
            return choice.stay(f"{uncached} of {total} tokens are uncached")
        return choice.split(pair, f"{uncached} of {total} tokens are uncached")


@dataclass(frozen=True, slots=True)
class Cost:
    """The least milliseconds, within guards that keep small gains from costing a hand-off.

    `least_uncached`: fewer uncached tokens are never handed over. `least_ratio`: nor are prompts that are shorter, in
    uncached tokens, than so many times the answer expected. `gain`: what a split has to save of the local cost, 0 to 1,
    and at least `gain_ms`. `slow_gain`: the same where the link is not RDMA. `force`: a slow link is as good as any.
    """

    least_uncached: int = 256
    least_ratio: float = 0.0
    gain: float = 0.05
    gain_ms: float = 5.0
    slow_gain: float = 0.5
    force: bool = False

    def decide(self, choice: Choice) -> SplitDecision:
        uncached = choice.uncached
        if len(choice.tokens) != 1:
            return choice.stay("several prompts stay together")
        if uncached < self.least_uncached:
            return choice.stay(f"only {uncached} uncached tokens")
        if uncached < self.least_ratio * choice.answer_tokens:
            return choice.stay(f"{uncached} uncached tokens for an answer of {choice.answer_tokens}")
        pair = choice.best_pair()
        if pair is None:
            return choice.stay("no replica to compute it elsewhere")
        local_ms, split_ms = choice.local_price.total_ms, pair.price.total_ms
        slow = not (pair.link.fast or self.force)
        needed = max(self.gain_ms, (self.slow_gain if slow else self.gain) * local_ms)
        if split_ms + needed < local_ms:
            return choice.split(pair, f"{local_ms - split_ms:.0f} ms sooner than local")
        if slow and split_ms < local_ms:
            how = "measured" if pair.link.measured else "told"
            return choice.stay(
                f"the link is not RDMA ({how}: {pair.link.bandwidth / 1e9:.1f} GB/s) and gains too little", pair
            )
        return choice.stay("local is as soon" if split_ms < local_ms else "local is sooner", pair)


def decider(name: str, **settings: float | bool) -> SplitDecider:
    """The decider of that name. Raises KeyError for another."""
    deciders: dict[str, Callable[..., SplitDecider]] = {
        "cost": Cost,
        "always": Always,
        "never": Never,
        "uncached_tokens": UncachedTokens,
        "isl_bounding": IslBounding,
    }
    return deciders[name](**settings)
