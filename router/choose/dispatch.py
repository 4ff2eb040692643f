"""Match, choose and book, as one step; and what is learned of how it went. No I/O, no clock: `now` in seconds.

The router drives this with real requests, the simulation with modelled ones in virtual time: what is measured there is
what runs here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from router.choose.cost import DECODE_WEIGHT, Candidate, End, Price, holds, total
from router.choose.policies import Decision, Policy, decide
from router.choose.split import Choice, SplitDecision
from router.fleet.ledger import ROUTED_WINDOW_SECONDS, Booking, Stage
from router.index.outside import together
from router.index.shared_codec import NO_LOAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.choose.split import SplitDecider
    from router.fleet.links import Links
    from router.fleet.rates import Rates
    from router.fleet.replica import Replica
    from router.index.memory import Index
    from router.index.shared_codec import Outside
    from router.prompt.blocks import Blocks


B = TypeVar("B", bound="Blocks")


class Placement:
    """One request at one replica: what is booked, and what of the decision counts afterwards. Open streams hold it.

    `waiting_ms`: how long it was thought to wait there. `due`: when the prefill was thought to be done; of one that
    `fetches`, whose prompt is computed elsewhere, when its first token would come.
    """

    __slots__ = (
        "booking",
        "cached",
        "chains",
        "chosen_at",
        "due",
        "epoch",
        "fetches",
        "hit",
        "rank",
        "replica",
        "tokens",
        "waiting_ms",
    )

    def __init__(
        self,
        replica: Replica,
        candidate: Candidate,
        booking: Booking,
        chains: Sequence[Blocks],
        tokens: list[int],
        chosen_at: float,
        due: float,
        fetches: bool = False,
    ) -> None:
        self.replica = replica
        self.epoch = replica.epoch
        self.cached = candidate.cached
        """Leading tokens of each prompt that it was thought to hold."""
        self.hit = candidate.hit
        """Their sum."""
        self.rank = candidate.rank
        self.waiting_ms = candidate.waiting_ms
        self.booking = booking
        self.chains = chains
        self.tokens = tokens
        self.chosen_at = chosen_at
        self.due = due
        self.fetches = fetches


class SplitPlacement:
    """One request at the replica that answers it and, if it was split, at another that computes its prompt."""

    __slots__ = ("decode", "handed_at", "prefill", "prefills", "size")

    def __init__(self, prefill: Placement | None, decode: Placement, size: float = 0.0) -> None:
        self.prefill = prefill
        self.decode = decode
        self.size = size
        """Bytes of KV that `decode` is thought to need of `prefill`."""
        self.handed_at: float | None = None
        """When the prompt was computed; None until then."""
        self.prefills: int | None = None
        """How many `decode` had been given by then; None where some waited there still."""


class Dispatch:
    """Decides where requests go, and remembers what that means."""

    def __init__(self, index: Index, rates: Rates, policy: Policy) -> None:
        self._index = index
        self._rates = rates
        self.policy = policy

    def place(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        *,
        answer_tokens: int,
        visible: bool,
        sequences: int = 1,
        rank: int | None = None,
        outside: Outside | None = None,
    ) -> Placement:
        """Choose among `replicas` (at least one) for prompts of `tokens`, and book it in the same breath.

        `chains`: the prompts' blocks as each of them hashes these, none of a prompt that could not be read.
        `answer_tokens`: what is expected to be generated. `visible`: the first token will be seen.
        `sequences`: how many the request is to an engine, one for each prompt and answer. `rank`: the data-parallel
        rank that the client asks for. `outside`: what other routers know and have given to the replicas.
        """
        decision = self._decide(self.policy, now, replicas, chains, tokens, rank, outside)
        candidate, price, chosen = decision.candidate, decision.price, decision.chosen
        replica, own = replicas[chosen], chains[chosen]
        return self._book(
            now, replica, candidate, price, own, tokens, answer_tokens, visible=visible, sequences=sequences
        )

    def place_split(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        *,
        decider: SplitDecider,
        links: Links,
        answer_tokens: int,
        visible: bool,
        sequences: int = 1,
        rank: int | None = None,
        outside: Outside | None = None,
    ) -> SplitPlacement:
        """The same in a fleet with roles: `decider` says whether another replica computes the prompt. Both are booked,
        and remembered as holding it, in the same breath.

        Of `replicas` at least one has to decode. If the outcome has a `prefill`, ask that one first, and say `handed`
        when it has answered. Then `fetched` is for the answer's first token what `first_token` is otherwise. What went
        wrong is told of each placement by itself, with `end` and `withdraw` or `left`, as after `place`; so is the end.
        """
        decision = decider.decide(self._choice(now, replicas, chains, tokens, rank, outside, answer_tokens, links))
        candidate = decision.candidates[decision.decode]
        replica, own = replicas[decision.decode], chains[decision.decode]
        if decision.prefill is None or decision.pair is None:
            alone = decision.local_price.prefill.price
            local = self._book(
                now, replica, candidate, alone, own, tokens, answer_tokens, visible=visible, sequences=sequences
            )
            return SplitPlacement(None, local)
        price = decision.pair.price
        first = self._book(
            now,
            replicas[decision.prefill],
            decision.candidates[decision.prefill],
            price.prefill.price,
            chains[decision.prefill],
            tokens,
            0,
            visible=True,
        )
        size = (total(tokens) - candidate.hit) * links.bytes_per_token
        booking = replica.load.book_decode(
            now,
            work=answer_tokens * DECODE_WEIGHT,
            fetches=size,
            sequences=sequences,
            holds=holds(candidate, tokens) + answer_tokens,
        )
        second = Placement(replica, candidate, booking, own, tokens, now, now + price.own_ms / 1000, fetches=True)
        self._remember(second, own, answered=answer_tokens > 1)
        return SplitPlacement(first, second, size)

    def _book(
        self,
        now: float,
        replica: Replica,
        candidate: Candidate,
        price: Price,
        chains: list[B],
        tokens: list[int],
        answer_tokens: int,
        *,
        visible: bool,
        sequences: int = 1,
    ) -> Placement:
        prefill_ms = price.prefill_ms
        booking = replica.load.book(
            now,
            prefill_ms=prefill_ms,
            work=prefill_ms / self._rates.token_ms + answer_tokens * DECODE_WEIGHT,
            visible=visible,
            sequences=sequences,
            holds=holds(candidate, tokens) + answer_tokens,
        )
        due = now + (price.waiting_ms + prefill_ms) / 1000
        placement = Placement(replica, candidate, booking, chains, tokens, now, due)
        self._remember(placement, chains, answered=answer_tokens > 1)
        return placement

    def _remember(self, placement: Placement, chains: list[B], *, answered: bool) -> None:
        for chain in chains:
            keys = chain.keys
            # Present from the decision on, so that siblings follow before the first one is through.
            self._index.record(
                placement.replica.name,
                keys,
                now=placement.chosen_at,
                until=placement.due,
                rank=placement.rank,
                # What is generated goes into another block where the last one is full.
                partial=answered or chain.usable_blocks == len(keys),
            )

    def weigh(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        outside: Outside | None = None,
    ) -> Decision:
        """What `place` would decide now, without deciding it: nothing is booked, recorded or counted."""
        return self._decide(self.policy.aside(), now, replicas, chains, tokens, outside=outside)

    def weigh_split(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        *,
        decider: SplitDecider,
        links: Links,
        answer_tokens: int,
        outside: Outside | None = None,
    ) -> SplitDecision:
        """What `place_split` would decide now; likewise."""
        return decider.decide(self._choice(now, replicas, chains, tokens, None, outside, answer_tokens, links))

    def _decide(
        self,
        policy: Policy,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        rank: int | None = None,
        outside: Outside | None = None,
    ) -> Decision:
        seen = self._candidates(now, replicas, chains, tokens, rank, outside)
        return decide(policy, seen, tokens, self._rates)

    def _choice(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        rank: int | None,
        outside: Outside | None,
        answer_tokens: int,
        links: Links,
    ) -> Choice:
        return Choice(
            self._ends(now, replicas, chains, tokens, rank, outside),
            [place for place, replica in enumerate(replicas) if replica.prefills],
            [place for place, replica in enumerate(replicas) if replica.decodes],
            tokens,
            answer_tokens,
            self._rates,
            links,
        )

    def _ends(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        rank: int | None,
        outside: Outside | None,
    ) -> list[Candidate]:
        """Candidates to be one end of a split: what this takes to price beside the rest."""
        found = self._candidates(now, replicas, chains, tokens, rank, outside)
        for candidate, replica in zip(found, replicas, strict=True):
            candidate.end = self._end(now, candidate, replica, tokens)
        return found

    def _end(self, now: float, candidate: Candidate, replica: Replica, tokens: list[int]) -> End:
        load, capacity = replica.load, replica.cache.capacity
        share, wait = load.prefilling(now)
        # What is not this router's own is known by number alone: its prefills are taken to be like this router's, what
        # it holds like this request's.
        own = load.routed(now)
        more = candidate.routed / own if own else 1.0
        held = load.holding + (candidate.in_flight - load.in_flight) * total(tokens)
        return End(
            fetching=load.fetching,
            expected=load.expected,
            fetched=load.fetched(now),
            prefilling=share * more,
            residual_ms=wait * more,
            answering=load.answering(now) + candidate.decoding - load.decoding,
            room=math.inf if capacity is None else capacity * replica.block_size - held,
            # Before answers have ended there, what it holds is taken to be gone within the minute.
            freed=max(load.freed(now) * more, held / ROUTED_WINDOW_SECONDS),
        )

    def _candidates(
        self,
        now: float,
        replicas: list[Replica],
        chains: list[list[B]],
        tokens: list[int],
        rank: int | None,
        outside: Outside | None,
    ) -> list[Candidate]:
        nothing = (0,) * len(tokens)
        found = []
        for place, replica in enumerate(replicas):
            candidate = self._candidate(now, replica, chains[place], nothing, rank, outside)
            self._add_others(now, candidate, replica, tokens, outside)
            found.append(candidate)
        return found

    def _candidate(
        self,
        now: float,
        replica: Replica,
        chains: list[B],
        nothing: tuple[int, ...],
        rank: int | None,
        outside: Outside | None,
    ) -> Candidate:
        """The replica as this router has loaded it. `nothing`: no token of any of the prompts."""
        name, load = replica.name, replica.load
        cached, continues = nothing, False
        if chains:
            told = outside.matches.get(name, ()) if outside is not None else ()
            hits: list[int] = []
            for place, chain in enumerate(chains):
                if place < len(told):
                    match = together(self._index, name, chain.keys, now, rank, told[place])
                else:
                    match = self._index.match(name, chain.keys, now, rank)
                rank = match.rank  # all prompts of a request go to one
                continues = continues or match.continues
                if match.depth and replica.prefix_caching:
                    held = min(match.depth, chain.usable_blocks) * replica.block_size
                    hits.append(held - held % replica.alignment)
                else:
                    hits.append(0)
            cached = tuple(hits)
        return Candidate(
            name,
            cached,
            continues,
            load.waiting_ms(now),
            load.decoding,
            load.in_flight,
            load.routed(now),
            self._rates.slowness(name),
            rank,
        )

    def _add_others(
        self, now: float, found: Candidate, replica: Replica, tokens: list[int], outside: Outside | None
    ) -> None:
        """The load that is not this router's own."""
        running, waiting = replica.strangers(now)
        if running or waiting:
            found.decoding += running
            found.in_flight += running + waiting
            # What others have queued there is unknown; it is taken to be like this request.
            found.waiting_ms += waiting * self._rates.prefills_ms(tokens, (0,) * len(tokens))
        if outside is not None:
            others = outside.loads.get(found.name, NO_LOAD)
            found.decoding += others.decoding
            found.in_flight += others.in_flight
            found.waiting_ms += others.waiting_ms
            found.routed += others.routed

    def first_token(self, now: float, placement: Placement) -> None:
        """The engine is through with the prefill."""
        placement.booking.first_token(now)
        if len(placement.tokens) == 1 and placement.chains and not placement.fetches:
            self._rates.observe(
                placement.replica.name,
                tokens=placement.tokens[0],
                cached=placement.hit,
                queued_ms=placement.waiting_ms,
                ttft_ms=(now - placement.chosen_at) * 1000,
            )

    def handed(self, now: float, split: SplitPlacement, *, visible: bool) -> None:
        """The prompt is computed: `split.prefill` has answered, and `split.decode` is sent to fetch the KV. `visible`:
        its first token will be seen."""
        if split.prefill is None or split.handed_at is not None:
            return
        self.first_token(now, split.prefill)
        self.end(now, split.prefill)
        self.answered(split.prefill, split.prefill.chains)
        split.handed_at = now
        load = split.decode.replica.load
        split.prefills = None if load.waiting_ms(now) > 0 else load.prefills
        if not visible:
            split.decode.booking.first_token(now)

    def fetched(self, now: float, split: SplitPlacement, links: Links) -> None:
        """The first token of a split request's answer: the KV has arrived, and tells how fast the link is."""
        self.first_token(now, split.decode)
        if split.prefill is None or split.handed_at is None or split.prefills != split.decode.replica.load.prefills:
            return  # behind a prefill it tells nothing of the transfer
        links.answered(
            split.prefill.replica.name, split.decode.replica.name, size=split.size, seconds=now - split.handed_at
        )

    def end(self, now: float, placement: Placement) -> None:
        """The request is over at this replica, however it ended. Safe to call twice."""
        placement.booking.close(now)

    def answered(self, placement: Placement, chains: Sequence[Blocks], *, beyond: int = 0) -> None:
        """It was answered whole: these blocks, the answer's among them as far as they are known, are cached there.
        `beyond`: full blocks of the answer that are not known."""
        if placement.epoch == placement.replica.epoch:
            for place, chain in enumerate(chains):
                self._index.record(
                    placement.replica.name,
                    chain.keys,
                    ended=True,
                    prompt_blocks=len(placement.chains[place].keys) if place < len(placement.chains) else 0,
                    now=placement.chosen_at,
                    rank=placement.rank,
                    beyond=beyond,
                    partial=beyond > 0 or chain.usable_blocks == len(chain.keys),
                )

    def left(self, now: float, placement: Placement) -> None:
        """The client left. Before its prefill's turn is over the engine has not computed the prompt, and never will."""
        stage = placement.booking.stage
        if stage == Stage.ELSEWHERE or (stage == Stage.PREFILL and now < placement.due):
            self.withdraw(now, placement)

    def withdraw(self, now: float, placement: Placement) -> None:
        """The prompt was not computed there after all."""
        placement.booking.take_back(now)
        if placement.epoch == placement.replica.epoch:
            # An unread prompt has a hit (of none) but no chain.
            for chain, cached in zip(placement.chains, placement.cached, strict=False):
                computed = chain.keys[cached // placement.replica.block_size :]
                self._index.forget(placement.replica.name, computed, placement.rank)
