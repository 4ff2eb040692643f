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
import json
import logging
import math
import secrets
from time import perf_counter, time
from typing import TYPE_CHECKING, Final

from router.access import AccessLog, line
from router.choose.cost import total
from router.choose.explanation import Explanation
from router.choose.split import Cost, decider
from router.course import Course, Rules
from router.divided import Divided, FellBackError, divisible
from router.evidence import Evidence
from router.learning import Learning
from router.leg import Leg, asked_rank
from router.passage import Passage, Steps
from router.prompt.continuing import UnfitError
from router.prompt.request import Ask, without_hand_off
from router.resuming import Resumption, resumable
from router.trail import Trail
from router.turn import Turn
from router.wire import errors
from router.wire.attempts import Attempt, Ending, Patience
from router.wire.upgrade import Upgrade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.choose.dispatch import Dispatch
    from router.choose.split import SplitDecider
    from router.config import HandOff as HandOffSettings
    from router.divided import HandOver
    from router.fleet.discovery import Fleet
    from router.fleet.links import Links
    from router.fleet.replica import Replica
    from router.handoff.connectors import Connectors
    from router.index.feedback import Feedback
    from router.index.neighbours import Neighbours
    from router.index.shared import Shared
    from router.index.shared_codec import Outside
    from router.prompt.blocks import Chain
    from router.reading import Prompt, Reading
    from router.telemetry import Telemetry
    from router.tracing import Tracer
    from router.wire.attempts import Outcome
    from router.wire.errand import Task
    from router.wire.errors import Refusal
    from router.wire.front import Front
    from router.wire.http import Request
    from router.wire.upstream import Pool

log = logging.getLogger("warmroute.journey")

# Of a request with many prompts so many are looked up in the shared index; the others by what is known here.
MAX_ASKED: Final = 16
# Ids are all of one length for as long as this has 16 digits.
_FIRST_NUMBER: Final = 10**15


def split_decider(handoff: HandOffSettings) -> SplitDecider:
    """The rule by which settings have prompts split; only `cost` has guards to be set."""
    if handoff.split != "cost":
        return decider(handoff.split)
    return Cost(
        least_uncached=handoff.split_min_tokens,
        least_ratio=handoff.split_min_ratio,
        force=handoff.split_slow_links,
    )


class Journey(Steps):
    """Serves requests. One for all of them; what belongs to one request is in `Passage`, `Course` and `Leg`."""

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
        shared: Shared | Neighbours | None = None,
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
        self._first_token = self._learning.first_token
        self._links = links
        self._decider = split_decider(handoff)
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
        self.access: AccessLog | None = None
        self.tracer: Tracer | None = None
        # Ids of requests that bring none: unlike any other process's, and cheap.
        self._ids, self._number = secrets.token_hex(8).encode(), _FIRST_NUMBER
        loop = asyncio.get_running_loop()
        self._clock: Callable[[], float] = loop.time
        self._turn = Turn(loop)

    def serve(self, request: Request, client: Front, ended: Callable[[Task], None]) -> Passage:
        """Begin to answer one client's request; `ended` is told when that is over."""
        passage = Passage(self, self._turn, request, client, ended)
        passage.begin()
        return passage

    def prepare(self, passage: Passage) -> None:
        request = passage.request
        if self.tracer is not None:
            passage.span = self.tracer.begin(request)
        if not request.id:
            self._number += 1
            request.id = b"%b%d" % (self._ids, self._number)
            request.lines = b"%bX-Request-Id: %b\r\n" % (request.lines, request.id)
        if self.rules.replica_headers:
            request.add(self.rules.replica_headers)

    def look(self, passage: Passage) -> bool:
        request = passage.request
        if not self._fleet.serves:
            return False
        if request.method != b"POST":
            passage.ask = Ask()
            return True
        passage.looked = self._reading.look(request.path, request.body)
        ask = passage.ask = self._reading.at_once(request.path, request.body, passage.looked)
        return ask is not None and not ask.hand_off

    def read(self, passage: Passage) -> bool:
        ask, request = passage.ask, passage.request
        assert ask is not None
        passage.prompt = self._reading.rows(ask, request.path, len(request.body))
        # An open stream is not to hold them beyond their use.
        passage.looked = passage.ask = None
        return True

    def hash(self, passage: Passage) -> bool:
        prompt, request = passage.prompt, passage.request
        assert prompt is not None
        self._reading.blocks(prompt, len(request.body))
        passage.course = self._course(request, passage.client, prompt, request.body, passage.began)
        passage.prompt = None
        return True

    def choose(self, passage: Passage) -> bool:
        course = passage.course
        assert course is not None
        outside = None
        if self._shared is not None and (outside := self._shared.at_hand()) is None:
            return False
        leg = self._next(passage, course, outside, self._clock())
        return leg is not None and leg.attempt is not None and not passage.request.upgrade

    def send(self, passage: Passage) -> bool:
        course, leg = passage.course, passage.leg
        assert course is not None
        assert leg is not None
        assert leg.attempt is not None
        return leg.attempt.start(self._pools[leg.placement.replica.name], course.body, passage, self._clock())

    async def go_on(self, passage: Passage) -> None:
        passage.told = await self._rest(passage)

    async def _rest(self, passage: Passage) -> tuple[str, int]:
        """How it ended, and the status that the client was told."""
        course = passage.course
        if course is None:
            if not self._fleet.serves:
                why = f"none of {len(self._fleet)} is ready (GET /ready tells why)"
                return self._refuse(passage.client, errors.no_replica(why))
            course = passage.course = await self._begin_aside(passage)
        while True:
            leg = passage.leg
            if leg is None:
                outside = await self._others(course) if self._shared is not None else None
                if (leg := self._next(passage, course, outside, self._clock())) is None:
                    break
            passage.leg = None
            if (told := await self._arrive(course, leg)) is not None:
                return told
            if course.given >= course.rules.max_attempts or self._clock() >= course.deadline:
                break
        return self._give_up(course)

    def left(self, passage: Passage) -> None:
        course, leg = passage.course, passage.leg
        assert course is not None
        assert leg is not None
        if leg.attempt is not None:
            leg.attempt.leave()
        self._left(course, leg)
        self.over(leg, self._clock())

    def finish(self, passage: Passage, now: float) -> None:
        request, client, course = passage.request, passage.client, passage.course
        ending, status = ("left", 0) if passage.cancelled else passage.told or ("failed", 500)
        self._telemetry.request(ending, status)
        self._telemetry.duration.observe(now - passage.began)
        self._telemetry.received_bytes.inc(len(request.body))
        self._telemetry.sent_bytes.inc(client.sent)
        if passage.span is None and self.access is None:
            return
        trail = Trail(passage.legs, passage.began, now, ending, status)
        if course is not None:
            trail.model, trail.stream, trail.tried = course.prompt.ask.model, course.prompt.ask.stream, course.tried
        if self.access is not None:
            self.access.write(line(request, client, trail, now=time()))
        if passage.span is not None and self.tracer is not None:
            self.tracer.end(passage.span, request, client, trail)

    async def _begin_aside(self, passage: Passage) -> Course:
        """Read any other request, in a thread where it is long."""
        request = passage.request
        body, path = request.body, request.path
        ask, size = await self._reading.ask(path, body, passage.looked)
        passage.looked = passage.ask = None
        if ask.hand_off:
            # These steer KV transfers inside the fleet; a client's can pin blocks or kill an engine.
            body = await self._reading.aside(len(body), lambda: without_hand_off(request.body))
        prompt = await self._reading.aside(size, lambda: self._reading.prompt(ask, path, len(body)))
        return self._course(request, passage.client, prompt, body, self._clock())

    def _course(self, request: Request, client: Front, prompt: Prompt, body: bytes, now: float) -> Course:
        rules, rank = self.rules, asked_rank(request)
        return Course(
            request,
            client,
            body,
            prompt,
            self,
            deadline=now + rules.patience.first_byte,
            rules=rules,
            evidence=Evidence(self._clock),
            rank=rank,
            hand_over=self.divided.offer(request, prompt, body, rank) if self._fleet.divided else None,
        )

    async def _others(self, course: Course) -> Outside | None:
        """What other routers know of its prompt."""
        asked = [*self.candidates(course.prompt.ask.model, course.tried), *_computing(course.hand_over)]
        return await self._outside(course.prompt, asked)

    def _next(self, passage: Passage, course: Course, outside: Outside | None, now: float) -> Leg | None:
        """Choose where it goes next, and book it there; None where there is nowhere left."""
        replicas = self._candidates(course.prompt.ask.model, course.tried, now)
        if not replicas:
            return None
        leg = self._choose(course.prompt, replicas, _computing(course.hand_over), course.rank, outside, now)
        passage.leg = leg
        if not passage.legs:
            self._telemetry.decision.observe(perf_counter() - passage.came)
        passage.legs.append(leg)
        self._depart(course, leg, now)
        return leg

    def _give_up(self, course: Course) -> tuple[str, int]:
        """Say why no replica has answered."""
        client, last, tried = course.client, course.last, course.tried
        if course.resumption is not None:
            return self._not_resumed(course, "no other replica" if last.ending == Ending.CUT else "others failed")
        if last.ending == Ending.EXHAUSTED:
            return self._refuse(client, errors.no_connection_left())
        if not tried:
            return self._refuse(client, self._none(course.prompt.ask.model))
        if last.ending == Ending.SILENT:
            return self._refuse(client, errors.first_byte_timeout(tried[-1], course.rules.patience.first_byte))
        return self._refuse(client, errors.unreachable(tried, last.why))

    def _depart(self, course: Course, leg: Leg, now: float) -> None:
        """Make it ready to be sent there."""
        request, replica = course.request, leg.placement.replica
        course.tried.append(replica.name)
        course.evidence.sent(replica)
        leg.request_id = request.id
        leg.way = course
        leg.resumable = course.rules.resume and resumable(request, leg)
        leg.tells_its_end = request.path.endswith("/completions")
        leg.vectors = request.path.endswith("/embeddings")
        if course.hand_over is None or leg.split is None:
            leg.attempt = self._attempt(course, leg, now)

    @staticmethod
    def _patience(course: Course, now: float) -> Patience:
        usual = course.rules.patience
        return Patience(max(0.001, course.deadline - now), usual.idle, usual.keep_alive)

    def _attempt(self, course: Course, leg: Leg, now: float) -> Attempt:
        """What sends it there and passes the answer back."""
        client, request, patience, added = course.client, course.request, self._patience(course, now), leg.added()
        if course.resumption is not None:
            return course.resumption.attempt(client, request, leg, patience, added)
        if request.upgrade:
            switched = self._telemetry.replica(leg.placement.replica.name).upgrades.inc
            return Upgrade(client, request, leg, patience, added, switched)
        return Attempt(client, request, leg, patience, added)

    async def _arrive(self, course: Course, leg: Leg) -> tuple[str, int] | None:
        """One request at one replica. None: another one may be asked; else how the request ended."""
        replica, attempt, hand_over = leg.placement.replica, leg.attempt, course.hand_over
        try:
            if attempt is not None:
                last = await attempt.run(self._pools[replica.name], course.body)
            else:
                assert hand_over is not None
                last = await hand_over.run(course.client, leg, self._patience(course, self._clock()), leg.added())
                attempt = leg.attempt
        except FellBackError:
            # Nothing is known against this replica, and the client has seen nothing: it goes on otherwise.
            course.tried.pop()
            course.evidence.left(replica)
            self._dispatch.withdraw(self._clock(), leg.placement)
            return None
        except asyncio.CancelledError:
            self._left(course, leg)
            raise
        except Exception:
            course.evidence.left(replica)
            raise
        finally:
            self.over(leg, self._clock())
        if last.ending != Ending.CUT:
            return self.judge(course, leg, last)
        self._heard(course, leg, last)
        log.debug("%s broke off an answer: %s", replica.name, last.why)
        return await self._cut(course, leg, attempt)

    def _left(self, course: Course, leg: Leg) -> None:
        course.evidence.left(leg.placement.replica)
        self._dispatch.left(self._clock(), leg.placement)

    def over(self, leg: Leg, now: float) -> None:
        # Each knows the other: left so, only the garbage collector would free them.
        leg.attempt = leg.way = None
        self._dispatch.end(now, leg.placement)
        self._load_changed()

    def _heard(self, course: Course, leg: Leg, last: Outcome) -> None:
        replica = leg.placement.replica
        course.last = last
        course.given += last.ending != Ending.UNREACHED or last.begun
        course.evidence.ended(replica, last)
        self._telemetry.replica(replica.name).attempt(last.ending)

    def judge(self, course: Course, leg: Leg, last: Outcome) -> tuple[str, int] | None:
        self._heard(course, leg, last)
        if last.ending in (Ending.COMPLETE, Ending.BROKEN, Ending.STALLED):
            if last.ending != Ending.COMPLETE:
                log.debug("%s broke off an answer: %s", leg.placement.replica.name, last.why)
            elif last.status is not None and last.status < 300:
                self._learning.answered(leg)
                if course.resumption is not None:
                    self._telemetry.resumed.inc()
            else:
                self._dispatch.withdraw(self._clock(), leg.placement)
            return last.ending, last.status or 0
        self._dispatch.withdraw(self._clock(), leg.placement)
        # A 500, or a connection lost over it, may be this very request's doing: one more try, no tour of the fleet.
        if last.ending == Ending.EXHAUSTED or (last.begun and course.doubtful):
            course.deadline = -math.inf
        course.doubtful = course.doubtful or last.begun
        return None

    async def _cut(self, course: Course, leg: Leg, attempt: Attempt | None) -> tuple[str, int] | None:
        """The answer broke off. None: another replica may go on with it; else how the request ended."""
        assert attempt is not None
        path, reader = course.request.path, course.prompt.reader
        resumption = course.resumption = course.resumption or Resumption(path, course.body)
        try:
            progress = resumption.add(attempt, leg)
            if not progress and course.doubtful:
                raise UnfitError("others failed")
            course.doubtful = course.doubtful or not progress
            if resumption.ended:
                if course.prompt.ask.include_usage:
                    raise UnfitError("usage is missing")
                attempt.conclude()
                return Ending.COMPLETE, 200
            body = await self._reading.aside(resumption.size, lambda: resumption.body(reader))
        except UnfitError as error:
            return self._not_resumed(course, str(error))
        except Exception:
            log.exception("an answer could not be continued")
            return self._not_resumed(course, "prompt cannot be read")
        ask, size = await self._reading.ask(path, body)
        course.body, course.hand_over = body, None
        course.prompt = await self._reading.aside(size, lambda: self._reading.prompt(ask, path, len(body)))
        # To the client this is a pause within its answer.
        course.deadline = self._clock() + course.rules.patience.idle
        return None

    def _not_resumed(self, course: Course, why: str) -> tuple[str, int]:
        """The client has part of an answer, and that is all there will be."""
        assert course.resumption is not None
        assert course.resumption.broken is not None
        self._telemetry.unresumed.labels(why).inc()
        course.resumption.broken.tell(course.last.why)
        return Ending.BROKEN, 200

    @staticmethod
    def _refuse(client: Front, refusal: Refusal) -> tuple[str, int]:
        client.refuse(refusal)
        return "refused", refusal.status

    async def explain(self, path: str, body: bytes) -> Explanation:
        """What would be done with a request that came now. Nothing is sent, booked or remembered."""
        ask, _ = await self._reading.ask(path, body)
        prompt = await self._reading.aside(len(body), lambda: self._reading.prompt(ask, path, len(body)))
        replicas = self.candidates(ask.model, ())
        decision = split = None
        if replicas:
            divided = self._fleet.divided and self.divided.splits and divisible(path, prompt, body)
            computing = self.divided.computing(ask) if divided else []
            outside = await self._outside(prompt, [*replicas, *computing])
            decision = self._dispatch.weigh(
                self._clock(), replicas, self._chains(prompt, replicas), prompt.tokens, outside
            )
            if both := _both(replicas, computing):
                split = self._dispatch.weigh_split(
                    self._clock(),
                    both,
                    self._chains(prompt, both),
                    prompt.tokens,
                    decider=self._decider,
                    links=self._links,
                    answer_tokens=prompt.answer_tokens,
                    outside=outside,
                )
        blocks = {view.block_size: sum(len(chain.keys) for chain in view.chains) for view in prompt.views}
        return Explanation(
            model=ask.model,
            kind=ask.kind,
            read_as=prompt.reader.mode if prompt.reader is not None and prompt.prompts else None,
            unread=prompt.unread if _is_object(body) else "its body is no JSON object; a replica will say so",
            served=ask.model is None or any(ask.model in replica.models for replica in self._fleet),
            tokens=prompt.tokens,
            blocks=blocks,
            decision=decision,
            none_because="; ".join(self._fleet.missing()) or self._none(ask.model).message,
            errors={
                replica.name: (record.error, record.cause)
                for replica in replicas
                if (record := self._feedback.of(replica.name))
            },
            split=split,
        )

    # -- match, choose, book ------------------------------------------------------------------------------------

    def candidates(self, model: str | None, tried: Iterable[str]) -> list[Replica]:
        """Replicas that may be asked next: never one that was, none whose breaker is open; those that just failed only
        where there is no other."""
        return self._candidates(model, tried, self._clock())

    def _candidates(self, model: str | None, tried: Iterable[str], now: float) -> list[Replica]:
        left = self._admitted(self._fleet.able(model), tried, now)
        if not left and self._fleet.divided:
            left = self._admitted(self._fleet.computing(model), tried, now)
        if any(replica.shunned_until > now for replica in left):
            return [replica for replica in left if replica.shunned_until <= now] or left
        return left

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

    def _chains(self, prompt: Prompt, replicas: list[Replica]) -> list[list[Chain]]:
        """Its blocks as each of them hashes these."""
        return [self._reading.chains(prompt, replica) for replica in replicas]

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
        now: float,
    ) -> Leg:
        """Decide and book. `computing`: replicas that may compute the prompt for one of `replicas`."""
        split = None
        if both := _both(replicas, computing):
            split = self._dispatch.place_split(
                now,
                both,
                self._chains(prompt, both),
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
                now,
                replicas,
                self._chains(prompt, replicas),
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
            self._first_token,
            show_choice=self.rules.show_choice,
            rank_given=rank is not None,
            split=split,
        )
        if prompt.unread is not None:
            self._telemetry.unread(prompt.unread)
        name, hit = leg.prefilled.replica.name, leg.prefilled.hit
        counters = self._telemetry.replica(name)
        counters.prompt_tokens.inc(total(prompt.tokens))
        counters.predicted_tokens.inc(hit)
        self._feedback.placed(name, hit)
        return leg


def _both(replicas: list[Replica], computing: list[Replica]) -> list[Replica]:
    """Among whom a request may be split; empty where it cannot be."""
    if not computing or not any(replica.decodes for replica in replicas):
        return []
    return [*replicas, *(each for each in computing if each not in replicas)]


def _computing(hand_over: HandOver | None) -> list[Replica]:
    return hand_over.computing() if hand_over is not None else []


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False
