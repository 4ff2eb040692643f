"""One request's way through the router, in the order in which it happens.

    read    what does the prompt look like to the engine?             router.prompt
    match   which replica holds how much of it?                       router.index
    choose  where is it answered soonest? Book it there at once,      router.choose
            so that a burst spreads
    send    pass it on, pass the answer back, another replica if      router.wire
            the first one fails before its first byte
    learn   what is cached there now, and how fast was it?            router.choose

With a shared store, what other routers know is asked for before that, once. Between match and booking nothing is
awaited: no other request can slip in and see a load that is about to change.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from router.choose.explanation import Explanation
from router.choose.split import decider
from router.divided import Divided, FellBackError
from router.evidence import Evidence
from router.fleet.replica import State
from router.learning import Learning
from router.leg import Leg, asked_rank
from router.prompt.request import Ask, without_hand_off
from router.wire import errors
from router.wire.attempts import Attempt, Ending, Outcome, Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.choose.dispatch import Dispatch
    from router.config import HandOff as HandOffSettings
    from router.divided import HandOver
    from router.fleet.discovery import Fleet
    from router.fleet.links import Links
    from router.fleet.replica import Replica
    from router.handoff.connectors import Connectors
    from router.index.feedback import Feedback
    from router.index.shared import Shared
    from router.index.shared_codec import Outside
    from router.prompt.blocks import Chain
    from router.reading import Prompt, Reading
    from router.telemetry import Telemetry
    from router.wire.errors import Refusal
    from router.wire.front import Front
    from router.wire.http import Headers, Request
    from router.wire.upstream import Pool

log = logging.getLogger("warmroute.journey")

# Of a request with many prompts so many are looked up in the shared index; the others by what is known here.
MAX_ASKED = 16
# What is answered with these is worth asking another replica: it is down, starting, overloaded or broken.
TRY_ELSEWHERE = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Rules:
    """What a reload may change of how requests are served. `replica_headers`: what each request carries to a replica
    beside the client's own headers."""

    patience: Patience
    max_attempts: int
    show_choice: bool
    replica_headers: Headers


class Journey:
    """Serves requests. One for all of them; what belongs to one request is in `Prompt` and `Leg`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        pools: dict[str, Pool],
        reading: Reading,
        dispatch: Dispatch,
        feedback: Feedback,
        telemetry: Telemetry,
        rules: Rules,
        handoff: HandOffSettings,
        connectors: Connectors,
        links: Links,
        shared: Shared | None = None,
    ) -> None:
        """`handoff`, `connectors` and `links` are for fleets with roles."""
        self._fleet = fleet
        self._pools = pools
        self._reading = reading
        self._dispatch = dispatch
        self._feedback = feedback
        self._telemetry = telemetry
        self.rules = rules
        self._shared = shared
        self._learning = Learning(
            reading=reading,
            dispatch=dispatch,
            feedback=feedback,
            telemetry=telemetry,
            load_changed=self._load_changed,
            links=links,
        )
        self._links = links
        guards = {"least_uncached": handoff.split_min_tokens} if handoff.split == "cost" else {}
        self._decider = decider(handoff.split, **guards)
        self.divided = Divided(
            fleet=fleet,
            pools=pools,
            reading=reading,
            dispatch=dispatch,
            learning=self._learning,
            telemetry=telemetry,
            connectors=connectors,
            handoff=handoff,
        )
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    async def serve(self, request: Request, client: Front) -> None:
        """Answer one client's request. Cancelled when the client leaves."""
        begun = self._clock()
        ending, status = "failed", 500
        try:
            ending, status = await self._serve(request, client)
        except asyncio.CancelledError:
            ending, status = "left", 0
            raise
        finally:
            self._telemetry.request(ending, status)
            self._telemetry.duration.observe(self._clock() - begun)

    async def _serve(self, request: Request, client: Front) -> tuple[str, int]:
        """How it ended, and the status that the client was told."""
        rules = self.rules
        if rules.replica_headers:
            request.headers = [*request.headers, *rules.replica_headers]
        body = request.body
        ask, size = Ask(), 0
        begun = perf_counter()
        if request.method == b"POST":
            ask, size = await self._reading.ask(request.path, body)
            if ask.hand_off:
                # These steer KV transfers inside the fleet; a client's can pin blocks or kill an engine.
                body = await self._reading.aside(len(body), lambda: without_hand_off(request.body))
        if not self._fleet.able(None):
            return self._refuse(
                client, errors.no_replica(f"none of {len(self._fleet)} is ready (GET /ready tells why)")
            )
        prompt = await self._reading.aside(size, lambda: self._reading.prompt(ask, request.path, len(body)))

        deadline = self._clock() + rules.patience.first_byte
        tried: list[str] = []
        evidence = Evidence(self._clock)
        doubtful = False
        last = Outcome(Ending.UNREACHED)
        rank = asked_rank(request)
        hand_over = self.divided.offer(request, prompt, body, rank) if self._fleet.divided else None
        while len(tried) < rules.max_attempts and self._clock() < deadline:
            outside = None
            if self._shared is not None:
                outside = await self._outside(prompt, [*self._candidates(ask.model, tried), *_computing(hand_over)])
            replicas = self._candidates(ask.model, tried)
            if not replicas:
                break
            leg = self._choose(prompt, replicas, _computing(hand_over), rank, outside)
            if not tried:
                self._telemetry.decision.observe(perf_counter() - begun)
            replica = leg.placement.replica
            tried.append(replica.name)
            # A 500, or a connection lost over it, may be this very request's doing: one more try, no tour of the fleet.
            leg.sound = evidence.sound if hand_over is None else hand_over.sounds(evidence)
            evidence.sent(replica)
            leg.may_move = functools.partial(self._may_move, ask.model, tuple(tried))
            leg.may_retry = functools.partial(self._may_retry, ask.model, tuple(tried), doubtful)
            patience = Patience(max(0.001, deadline - self._clock()), rules.patience.idle)
            try:
                added = leg.added()
                if hand_over is None or leg.split is None:
                    last = await Attempt(client, request, leg, patience, added).run(self._pools[replica.name], body)
                else:
                    last = await hand_over.run(client, leg, patience, added)
            except FellBackError:
                # Nothing is known against this replica, and the client has seen nothing: it goes on otherwise.
                tried.pop()
                evidence.left(replica)
                self._dispatch.withdraw(self._clock(), leg.placement)
                continue
            except asyncio.CancelledError:
                evidence.left(replica)
                self._dispatch.left(self._clock(), leg.placement)
                raise
            finally:
                self._dispatch.end(self._clock(), leg.placement)
                self._load_changed()
            evidence.ended(replica, last)
            self._telemetry.replica(replica.name).attempt(last.ending.value)
            if last.ending in (Ending.COMPLETE, Ending.BROKEN, Ending.STALLED):
                if last.ending is not Ending.COMPLETE:
                    log.debug("%s broke off an answer: %s", replica.name, last.why)
                elif last.status is not None and last.status < 300:
                    self._learning.answered(leg)
                else:
                    self._dispatch.withdraw(self._clock(), leg.placement)
                return last.ending.value, last.status or 0
            self._dispatch.withdraw(self._clock(), leg.placement)
            if last.ending is Ending.EXHAUSTED:
                return self._refuse(client, errors.no_connection_left())
            if last.begun and doubtful:
                break  # two replicas have failed over it: it may be what fails them
            doubtful = doubtful or last.begun

        if not tried:
            return self._refuse(client, self._none(ask.model))
        if last.ending is Ending.SILENT:
            return self._refuse(client, errors.first_byte_timeout(tried[-1], rules.patience.first_byte))
        return self._refuse(client, errors.unreachable(tried, last.why))

    @staticmethod
    def _refuse(client: Front, refusal: Refusal) -> tuple[str, int]:
        client.refuse(refusal)
        return "refused", refusal.status

    def _may_retry(self, model: str | None, tried: tuple[str, ...], doubtful: bool, status: int) -> bool:
        """Whether an answer of this status is dropped because another replica will be asked."""
        if status not in TRY_ELSEWHERE or (status == 500 and doubtful) or len(tried) >= self.rules.max_attempts:
            return False
        return bool(self._candidates(model, tried))

    async def explain(self, path: str, body: bytes) -> Explanation:
        """What would be done with a request that came now. Nothing is sent, booked or remembered."""
        ask, _ = await self._reading.ask(path, body)
        prompt = await self._reading.aside(len(body), lambda: self._reading.prompt(ask, path, len(body)))
        replicas = self._candidates(ask.model, ())
        decision = None
        if replicas:
            outside = await self._outside(prompt, replicas)
            decision = self._dispatch.weigh(
                self._clock(), replicas, lambda replica: self._reading.chains(prompt, replica), prompt.tokens, outside
            )
        blocks = {view[0]: sum(len(chain.keys) for chain in chains) for view, chains in prompt.chains.items()}
        return Explanation(
            model=ask.model,
            kind=ask.kind,
            read_as=prompt.reader.mode if prompt.reader is not None and prompt.prompts else None,
            unread=prompt.unread,
            tokens=prompt.tokens,
            blocks=blocks,
            decision=decision,
            none_because="; ".join(self._fleet.missing()) or self._none(ask.model).message,
            errors={
                replica.name: (record.error, record.cause)
                for replica in replicas
                if (record := self._feedback.of(replica.name))
            },
        )

    # -- match, choose, book ------------------------------------------------------------------------------------

    def _candidates(self, model: str | None, tried: Iterable[str]) -> list[Replica]:
        """Replicas that may be asked next: never one that was, none whose breaker is open; those that just failed only
        where there is no other."""
        now = self._clock()
        left = self._admitted(self._fleet.able(model), tried, now)
        if not left and self._fleet.divided:
            left = self._admitted(self._fleet.computing(model), tried, now)
        return [replica for replica in left if replica.shunned_until <= now] or left

    def _may_move(self, model: str | None, tried: tuple[str, ...]) -> bool:
        """Whether a replica that is alive could be asked instead."""
        if len(tried) >= self.rules.max_attempts:
            return False
        return any(replica.state is State.READY for replica in self._candidates(model, tried))

    @staticmethod
    def _admitted(replicas: list[Replica], tried: Iterable[str], now: float) -> list[Replica]:
        return [replica for replica in replicas if replica.name not in tried and replica.breaker.admits(now)]

    def _none(self, model: str | None) -> Refusal:
        """Why there is no replica for a model though some are ready."""
        able, now = self._fleet.able(model), self._clock()
        if not able:
            return errors.no_replica(f"none that is ready serves {model}")
        seconds = min(replica.breaker.seconds_left(now) for replica in able)
        names = ", ".join(replica.name for replica in able)
        return errors.no_replica(f"their last requests failed ({names})", retry_after=max(1, math.ceil(seconds)))

    async def _outside(self, prompt: Prompt, replicas: list[Replica]) -> Outside | None:
        """What all routers know of this prompt and have given to the fleet; None where there is no shared store, or it
        does not answer. One question, for every way in which the prompts are hashed."""
        if self._shared is None:
            return None
        views: dict[int, tuple[list[Chain], list[str]]] = {}
        for replica in replicas:
            chains = self._reading.chains(prompt, replica)
            views.setdefault(id(chains), (chains, []))[1].append(replica.name)
        return await self._shared.consult(
            [(chain.keys, names) for chains, names in views.values() for chain in chains[:MAX_ASKED]]
        )

    def _load_changed(self) -> None:
        if self._shared is not None:
            self._shared.load_changed()

    def _choose(
        self,
        prompt: Prompt,
        replicas: list[Replica],
        computing: list[Replica],
        rank: int | None,
        outside: Outside | None,
    ) -> Leg:
        """Decide and book. `computing`: replicas that may compute the prompt for one of `replicas`."""
        split = None
        if computing and any(replica.decodes for replica in replicas):
            split = self._dispatch.place_split(
                self._clock(),
                [*replicas, *(each for each in computing if each not in replicas)],
                lambda replica: self._reading.chains(prompt, replica),
                prompt.tokens,
                decider=self._decider,
                links=self._links,
                answer_tokens=prompt.answer_tokens,
                visible=prompt.ask.stream,
                sequences=prompt.sequences,
                rank=rank,
                outside=outside,
            )
            placement = split.decode
            self._telemetry.splits.labels("local" if split.prefill is None else "split").inc()
            split = None if split.prefill is None else split
        else:
            placement = self._dispatch.place(
                self._clock(),
                replicas,
                lambda replica: self._reading.chains(prompt, replica),
                prompt.tokens,
                answer_tokens=prompt.answer_tokens,
                visible=prompt.ask.stream,
                sequences=prompt.sequences,
                rank=rank,
                outside=outside,
            )
        self._load_changed()
        leg = Leg(
            prompt,
            placement,
            self._learning.first_token,
            show_choice=self.rules.show_choice,
            rank_given=rank is not None,
            split=split,
        )
        if prompt.unread is not None:
            self._telemetry.unread.labels(prompt.unread).inc()
        name, hit = leg.prefilled.replica.name, leg.prefilled.decision.candidate.hit
        counters = self._telemetry.replica(name)
        counters.prompt_tokens.inc(sum(prompt.tokens))
        counters.predicted_tokens.inc(hit)
        self._feedback.placed(name, hit)
        return leg


def _computing(hand_over: HandOver | None) -> list[Replica]:
    return hand_over.computing() if hand_over is not None else []
