"""Whether a request's prompt is computed where it is answered, or by another replica that hands its KV over. Pure.

    local    the wait and the prefill at a replica that answers, and what this prefill takes from the answers that it
             decodes meanwhile
    split    the wait and the prefill at another replica, then the KV's way to the one that answers
    either   the wait for room for its KV; what it costs those that come behind it and those that are decoded beside it

One minimum in milliseconds over all replicas that answer and all pairs. It never goes through the pairs one by one:
what a prefill costs depends on the one end, the wait and the decoding on the other, and only the transfer on both;
with the costs of either end in order, the first pair is the best wherever the links are alike.

Other routers' rules stand beside it by name, to compare with: they see the prompt's length alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from router.choose.cost import DECODE_WEIGHT, Candidate, Price, begins_branch, holds, prices, total
from router.fleet.links import Link, Links
from router.fleet.rates import STEP_MS, Rates

if TYPE_CHECKING:
    from collections.abc import Callable


# What holds others up counts, too. All of these were found in simulation (python -m bench simulate split).
#
# A prefill on a replica that decodes holds up all its answers. They end later: each counts with this share of it, as
# first tokens are some such share of the time that whole answers take.
DAMAGE = 0.08
# No first token comes later for that as long as there is room; where little is left, what ends later delays all that
# comes after it, on whichever of those that answer. So each of their answers, on average, counts with this share, too,
# over the cube of the room, which is the last at the least.
DELAY = 0.0015
LEAST_ROOM = 0.075
# The busiest that a queue is taken to be: one that is busier has no length to speak of.
BUSIEST = 0.8
# It also holds up the first tokens of those whose KV arrives meanwhile, by what is left of it then.
HELD = 0.5
# One more answer slows those beside it, and they slow it: this share of what it is as work, for each of them.
CROWDING = 0.03
# What a hand-over takes beside the transfer: the second request, the engine's step under way and the one that it joins,
# as long as these are short. Behind a prefill they are not.
RESUME_MS = 35.0


@dataclass(slots=True)
class PrefillPrice:
    """What a prompt costs where it is computed, ms."""

    price: Price
    """As it is booked: on the slow side."""
    likely: float
    """The share of it that is likely: against a transfer, being slow is no virtue."""
    room_ms: float
    """Until its KV finds room."""
    others_ms: float
    """What is set against it for those who wait for it: answers that are held up, prompts that will come."""
    delay_ms: float
    """And for all who come later where there is little room left, wherever among the replicas that answer it is."""

    @property
    def own_ms(self) -> float:
        """From the decision to the end of the prefill. The waits for its turn and for room pass at once."""
        return max(self.likely * self.price.waiting_ms, self.room_ms) + self.likely * self.price.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.own_ms + self.likely * self.price.placement_ms + self.others_ms + self.delay_ms


@dataclass(slots=True)
class PairPrice:
    """The terms of one pair's cost, ms."""

    prefill: PrefillPrice
    fetching_ms: float
    """Of what is on its way to the replica that answers already: this passes while the prompt is computed."""
    transfer_ms: float
    room_ms: float
    """Until it finds room there; likewise."""
    decode_waiting_ms: float
    """Of the replica that answers; likewise."""
    resume_ms: float
    """From the KV's arrival to the first token: a step there, or what others come to prefill there meanwhile."""
    crowding_ms: float
    queue_ms: float
    """How much later those come who will want to fetch after this one."""

    @property
    def own_ms(self) -> float:
        """From the decision to the first token."""
        arrival = max(self.prefill.own_ms, self.fetching_ms, self.room_ms) + self.transfer_ms
        return max(arrival, self.decode_waiting_ms) + self.resume_ms

    @property
    def total_ms(self) -> float:
        others_ms = self.prefill.total_ms - self.prefill.own_ms
        return self.own_ms + others_ms + self.crowding_ms + self.queue_ms


@dataclass(slots=True)
class LocalPrice:
    """The terms of a replica's cost that does all of a request itself, ms."""

    prefill: PrefillPrice
    crowding_ms: float

    @property
    def total_ms(self) -> float:
        return self.prefill.total_ms + self.crowding_ms


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
    candidates: list[Candidate]
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

    candidates: list[Candidate]
    computing: Sequence[int]
    answering: Sequence[int]
    tokens: list[int]
    answer_tokens: int
    rates: Rates
    links: Links
    locals: Sequence[LocalPrice] = field(init=False)
    local: int = field(init=False)
    branch: bool = field(init=False)
    _delay: float = field(init=False)

    def __post_init__(self) -> None:
        self.branch = begins_branch(self.candidates)
        own = [self.candidates[place] for place in self.answering]
        self._delay = DELAY / self._room() ** 3 * math.fsum(each.decoding for each in own) / len(own)
        self.locals = [
            LocalPrice(price, self._crowding_ms(candidate))
            for candidate, price in zip(own, self._prefills(self.answering), strict=True)
        ]
        best = min(range(len(own)), key=lambda i: (self.locals[i].total_ms, own[i].routed, own[i].name))
        self.local = self.answering[best]

    @property
    def local_price(self) -> LocalPrice:
        return self.locals[self.answering.index(self.local)]

    @property
    def uncached(self) -> int:
        """Tokens that the best place for all of it would have to compute."""
        return total(self.tokens) - self.candidates[self.local].hit

    def _room(self) -> float:
        """The share of the time that those who answer would have left if they did all the work of the last minute:
        what is split now is no reason to split less. Without what was booked for answers: how long they will be nobody
        knows before."""
        likely = self.rates.likely
        answer = DECODE_WEIGHT * self.rates.token_ms * likely / STEP_MS
        ends = [candidate.end for candidate in self.candidates]
        busy = math.fsum(end.prefilling * likely + end.answering * answer for end in ends)
        return max(LEAST_ROOM, 1 - busy / len(self.answering))

    def _prefills(self, places: Sequence[int]) -> list[PrefillPrice]:
        """Of those that compute, or of those that answer: all who will come to these come behind it."""
        likely, answering = self.rates.likely, set(self.answering)
        candidates = [self.candidates[place] for place in places]
        busy = math.fsum(candidate.end.prefilling for candidate in candidates) * likely / len(candidates)
        queue = behind(busy, len(candidates))
        found = []
        for place, candidate, price in zip(
            places, candidates, prices(candidates, self.tokens, self.rates, branch=self.branch), strict=True
        ):
            spent = likely * price.prefill_ms
            held = DAMAGE * candidate.decoding + HELD * candidate.end.expected + queue
            delay = self._delay if place in answering else 0.0
            found.append(PrefillPrice(price, likely, self._room_ms(candidate), spent * held, spent * delay))
        return found

    def _room_ms(self, candidate: Candidate) -> float:
        """How long it takes until so much of what it was given has ended that this one's KV fits beside the rest."""
        lacking = holds(candidate, self.tokens) + self.answer_tokens - candidate.end.room
        return lacking / candidate.end.freed * 1000 if lacking > 0 and candidate.end.freed else 0.0

    def _crowding_ms(self, candidate: Candidate) -> float:
        work_ms = self.answer_tokens * DECODE_WEIGHT * self.rates.token_ms * self.rates.likely
        return CROWDING * work_ms * candidate.in_flight

    def _stall_ms(self, candidate: Candidate) -> float:
        """How long KV that arrives some time from now waits for prefills at its end: as a queue of one server has it
        (Pollaczek and Khinchine's formula)."""
        end, likely = candidate.end, self.rates.likely
        return likely * likely * end.residual_ms / (1 - min(BUSIEST, likely * end.prefilling))

    def best_pair(self) -> Pair | None:
        """The pair of the least cost; None where there is none."""
        links, candidates, whole = self.links, self.candidates, total(self.tokens)
        likely, fastest = self.rates.likely, links.fastest.bandwidth / 1000
        given = [candidates[place] for place in self.computing]
        if not given:
            return None
        computing = sorted(
            (
                (price.total_ms, candidate.routed, place, price)
                for price, candidate, place in zip(self._prefills(self.computing), given, self.computing, strict=True)
            ),
            key=lambda each: each[:3],
        )
        answering = []
        for place in self.answering:
            candidate = candidates[place]
            size = (whole - candidate.hit) * links.bytes_per_token
            floor = links.fastest.transfer_ms(size)
            crowding = self._crowding_ms(candidate)
            resume = RESUME_MS + self._stall_ms(candidate)
            waiting = likely * candidate.waiting_ms
            room = self._room_ms(candidate)
            bound = (
                max(max(computing[0][0], candidate.end.fetching / fastest, room) + floor, waiting) + resume + crowding
            )
            answering.append((bound, candidate.routed, place, size, floor, waiting, resume, crowding, room))
        answering.sort(key=lambda each: each[:3])
        best: Pair | None = None
        least = float("inf")
        for bound, _, decode, size, floor, waiting, resume, crowding, room in answering:
            if bound >= least:
                break  # and so are all after it
            for spent, _, prefill, price in computing:
                if max(max(spent, room) + floor, waiting) + resume + crowding >= least:
                    break
                if prefill == decode:
                    continue
                link = links.between(candidates[prefill].name, candidates[decode].name)
                transfer = link.transfer_ms(size)
                fetching = candidates[decode].end.fetching / link.bandwidth * 1000
                queue = transfer * behind(candidates[decode].end.fetched / link.bandwidth, 1)
                pair = PairPrice(price, fetching, transfer, room, waiting, resume, crowding, queue)
                if pair.total_ms < least:
                    least = pair.total_ms
                    best = Pair(prefill, decode, pair, link)
        return best

    def stay(self, reason: str, pair: Pair | None = None) -> SplitDecision:
        """One replica does all of it."""
        return self._decision(None, self.local, reason, pair)

    def split(self, pair: Pair, reason: str) -> SplitDecision:
        return self._decision(pair.prefill, pair.decode, reason, pair)

    def _decision(self, prefill: int | None, decode: int, reason: str, pair: Pair | None) -> SplitDecision:
        return SplitDecision(prefill, decode, reason, self.candidates, self.answering, self.locals, self.local, pair)


def behind(load: float, servers: int) -> float:
    """How much later all who come to a queue come to their turn for one more in it, in times that one's own length;
    `load`: how busy its servers are without, 0 up. This is what one more adds to the queue's length (Sakasegawa's
    approximation), less what it waits itself."""
    load, power = min(BUSIEST, load), math.sqrt(2 * (servers + 1))
    wait: float = load ** (power - 1) / (servers * (1 - load))
    return wait * (power - 1 + load / (1 - load))


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
        uncached, whole = choice.uncached, max(1, total(choice.tokens))
        few = uncached < self.below_tokens and uncached / whole < self.below_share
        pair = None if few else choice.best_pair()
        if pair is None:
            return choice.stay(f"{uncached} of {whole} tokens are uncached")
        return choice.split(pair, f"{uncached} of {whole} tokens are uncached")


@dataclass(frozen=True, slots=True)
class Cost:
    """The least milliseconds, within guards that keep small gains from costing a hand-off.

    `least_uncached`: fewer uncached tokens are never handed over. `least_ratio`: nor are prompts that are shorter, in
    uncached tokens, than so many times the answer expected. `gain`: what a split has to save of the local cost, 0 to 1,
    and at least `gain_ms`. `late`: by so many times its local first token's time may its own one come later, where that
    spares others more. Over a link that is not RDMA, `slow_late`; there it has to save `caution` times as much as it
    comes later, and as much as the transfer takes, of which least is certain. `force`: a slow link is as good as any.
    """

    least_uncached: int = 256
    least_ratio: float = 0.0
    gain: float = 0.02
    gain_ms: float = 5.0
    late: float = 6.0
    slow_late: float = 2.0
    caution: float = 10.0
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
        local, split, link = choice.local_price, pair.price, pair.link
        slow = not (link.fast or self.force)
        saved_ms = local.total_ms - split.total_ms
        if saved_ms < max(self.gain_ms, self.gain * local.total_ms, split.transfer_ms if slow else 0.0):
            return choice.stay("local costs less" if saved_ms < 0 else "local costs hardly more", pair)
        later_ms = split.own_ms - local.prefill.own_ms
        late, caution = (self.slow_late, self.caution) if slow else (self.late, 0.0)
        if later_ms > late * local.prefill.own_ms or caution * later_ms > saved_ms:
            how = "measured" if link.measured else "told"
            why = f"the link is not RDMA ({how}: {link.bandwidth / 1e9:.1f} GB/s): " if slow else ""
            return choice.stay(
                f"{why}its first token would come in {split.own_ms:.0f} ms, locally in {local.prefill.own_ms:.0f}", pair
            )
        return choice.split(pair, f"it costs {saved_ms:.0f} ms less than local")


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
