"""One request on two replicas: one computes its prompt, the other fetches the KV and answers.

    ask     the one that computes: the client's body, for one token, and told that its KV will be fetched
    check   what it hands over, whole, before anybody sees it                       router.handoff
    fetch   the other one gets the client's own body and what was handed over; the beginning of its stream is held
            back until there is an answer in it

Until the client has seen anything, whatever goes wrong is invisible. Another replica computes the prompt, once; then
the one that answers computes it itself. What was handed over is used once, soon, and never after a failure: to send it
twice would make an engine read blocks that are somebody else's by now. If it will not be used at all, the replica that
was to fetch is told, so that the other need not keep the blocks for the whole lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from router.evidence import Evidence
from router.handoff.bodies import decode_body, prefill_body
from router.handoff.connector import Handed, WrongParametersError
from router.leg import RANK_HEADER, Way
from router.wire.attempts import SHOWN, Attempt, Ending, Outcome, Patience
from router.wire.gather import Gathered, gather
from router.wire.http import crossing
from router.wire.stream import CachedCount, JsonWatch
from router.wire.upstream import BrokenError, ExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from router.choose.dispatch import Dispatch, SplitPlacement
    from router.config import HandOff as HandOffSettings
    from router.fleet.discovery import Fleet
    from router.fleet.replica import Replica
    from router.handoff.connector import Parameters
    from router.handoff.connectors import Connectors
    from router.learning import Learning
    from router.leg import Leg
    from router.prompt.request import Ask
    from router.reading import Prompt, Reading
    from router.telemetry import Telemetry
    from router.wire.front import Front
    from router.wire.http import Headers, Request
    from router.wire.upstream import Pool

log = logging.getLogger("warmroute.divided")

# So often another replica is asked to compute one request's prompt; what fails twice is computed where it is answered.
MAX_HAND_OVERS: Final = 2
# Routes on which engines read kv_transfer_params (vLLM entrypoints/openai); what others ask for stays in one place.
ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
# Of the lease, from the one's answer to the question to the other: later, a slow connection could lose the race.
FRESH_SHARE: Final = 0.5
# An answer to our own question to let blocks go. Nothing hangs on it: the lease frees them as well.
RELEASE_SECONDS: Final = 5.0
REQUEST_ID: Final = b"x-request-id"
# Members of a body that need its whole prompt computed where it is answered.
UNDIVIDED: Final = (b'"prompt_logprobs"', b'"echo"', b'"use_beam_search"')
# What an engine refuses for its own reasons; it may be the hand-over that it does not like, so it is asked without.
DISLIKED: Final = frozenset({400, 404, 409, 422, 500, 502, 503, 504})

# Reasons for which a prompt was computed in vain, by a replica that is well otherwise.
DOUBTFUL: Final = frozenset({"no_parameters", "kv_load"})


class FellBackError(Exception):
    """A split did not come off, and nobody is to blame who could answer. `over`: no other is to be tried."""

    def __init__(self, reason: str, *, over: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.over = over


@dataclass(frozen=True, slots=True)
class Computed:
    """A prompt that another replica holds for us, since `at`."""

    handed: Handed
    at: float


class Divided:
    """What all split requests share."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        pools: dict[str, Pool],
        reading: Reading,
        dispatch: Dispatch,
        learning: Learning,
        telemetry: Telemetry,
        connectors: Connectors,
        handoff: HandOffSettings,
    ) -> None:
        self.fleet = fleet
        self.pools = pools
        self.reading = reading
        self.dispatch = dispatch
        self.learning = learning
        self.telemetry = telemetry
        self.connectors = connectors
        self.splits = handoff.split != "never"
        self.lease = handoff.kv_lease_seconds
        self.prefill_seconds = handoff.prefill_timeout_seconds
        self.pass_token_ids = handoff.pass_token_ids
        self.pinned: dict[str, int] = {}
        """Blocks that prefill replicas keep for others, as far as this router had them kept."""
        self.clock = asyncio.get_running_loop().time
        self._told: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, request: Request, prompt: Prompt, body: bytes, rank: int | None) -> HandOver | None:
        """A request that may be split; None where it may not. `rank`: what the client names; that is one replica's."""
        if not self.splits or rank is not None or not divisible(request.path, prompt, body):
            return None
        return HandOver(self, request, prompt, body)

    def computing(self, ask: Ask, tried: Iterable[str] = ()) -> list[Replica]:
        """Replicas that may compute a prompt for another now."""
        now = self.clock()
        return [
            replica
            for replica in self.fleet.computing(ask.model)
            if replica.name not in tried
            and replica.shunned_until <= now
            and replica.breaker.admits(now)
            and not self.connectors.doubts.doubted(replica.name, now)
            # What serves one sequence must not be given to several.
            and not (ask.n > 1 and self.connectors.of(replica.name).once)
        ]

    def aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what no client waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Blocks that nobody will fetch are let go first; that is bounded."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_SECONDS)
        for task in self._tasks:
            task.cancel()

    def wrong(self, replica: str, why: str) -> None:
        """Say once what is wrong with what a replica hands over; the metrics count it."""
        if (replica, why) not in self._told and len(self._told) < 1000:
            self._told.add((replica, why))
            log.warning("%s computed a prompt, but its KV cannot be passed on: %s", replica, why)

    def pin(self, replica: str, blocks: int) -> Callable[[], None]:
        """Count blocks as kept, at the most as long as the lease; returns how to say that they are free."""
        self.pinned[replica] = self.pinned.get(replica, 0) + blocks
        freed = False

        def free() -> None:
            nonlocal freed
            if not freed:
                freed = True
                self.pinned[replica] -= blocks
                if not self.pinned[replica]:
                    del self.pinned[replica]

        asyncio.get_running_loop().call_later(self.lease, free)
        return free

    async def release(
        self, request: Request, replica: Replica, parameters: Parameters, free: Callable[[], None]
    ) -> None:
        """Let a decode replica say that blocks are not wanted. An engine does so for each request that it turns away at
        its door (vLLM entrypoints/generate/base/serving.py), so it is sent one: for a model that nobody serves."""
        body = orjson.dumps({"model": "-", "prompt": [0], "max_tokens": 1, "kv_transfer_params": parameters})
        asked = request.like(method=b"POST", target=b"/v1/completions")
        pool = self.pools.get(replica.name)
        if pool is None:
            return
        try:
            await gather(pool, asked, body, added=[], seconds=RELEASE_SECONDS)
        except (BrokenError, ExhaustedError, TimeoutError) as error:
            log.debug("%s could not be told to let blocks go: %s", replica.name, error)
        else:
            free()


class HandOver:
    """One request that may be split: who was asked to compute its prompt, and what became of that."""

    def __init__(self, divided: Divided, request: Request, prompt: Prompt, body: bytes) -> None:
        self.divided = divided
        self.request = request
        self.prompt = prompt
        self.body = body
        self.evidence = Evidence(divided.clock)
        self._left = MAX_HAND_OVERS
        self._tried: list[str] = []

    def computing(self) -> list[Replica]:
        """Replicas that may compute the prompt now; none where it is no longer to be split."""
        if not self._left:
            return []
        return self.divided.computing(self.prompt.ask, self._tried)

    async def run(self, client: Front, leg: Leg, patience: Patience, added: Headers | None) -> Outcome:
        """Both legs. Returns how the second one ended. Raises FellBackError where the first one failed, or what it
        handed over did not arrive, before the client was shown anything."""
        prefill = leg.prefilled
        self._left -= 1
        self._tried.append(prefill.replica.name)
        fallbacks, given = self.divided.telemetry.fallbacks, self.request.lines
        doubts = self.divided.connectors.doubts
        doubts.begin(prefill.replica.name, self.divided.clock())
        try:
            outcome = await _Legs(self, client, leg, patience, added).run()
        except FellBackError as failure:
            fallbacks.labels(failure.reason).inc()
            if failure.reason in DOUBTFUL:
                doubts.failed(prefill.replica.name, self.divided.clock())
            if failure.over:
                self._left = 0
            raise
        finally:
            self.request.lines = given
            self.divided.dispatch.end(self.divided.clock(), prefill)
        if outcome.ending not in SHOWN:
            fallbacks.labels("decode_lost" if outcome.ending != Ending.REFUSED else "decode_refused").inc()
            # The other one did its part, and holds the prompt now: it may do so again, for another to answer.
            self._tried.pop()
        elif outcome.status == 200:
            doubts.arrived(prefill.replica.name)
        return outcome


class _SecondLeg(Way):
    """The way of the leg that answers: what it dislikes goes back to the first."""

    __slots__ = ("_way",)

    def __init__(self, way: Way) -> None:
        self._way = way

    def may_retry(self, status: int) -> bool:
        return status in DISLIKED

    def may_move(self) -> bool:
        return self._way.may_move()

    def sound(self, replica: Replica) -> None:
        self._way.sound(replica)


class _Legs:
    """Two replicas working on one request. Use once."""

    def __init__(self, hand_over: HandOver, client: Front, leg: Leg, patience: Patience, added: Headers | None) -> None:
        assert leg.split is not None
        self._hand_over = hand_over
        self._divided = hand_over.divided
        self._request = hand_over.request
        self._client = client
        self._leg = leg
        self._split: SplitPlacement = leg.split
        self._prefill = leg.prefilled
        self._added = added
        self._idle = patience.idle
        self._deadline = self._divided.clock() + patience.first_byte
        self._connector = self._divided.connectors.of(self._prefill.replica.name)
        self._name = secrets.token_hex(16)
        self._count = CachedCount()
        self._own_id = self._connector.shares_id or self._request.header(REQUEST_ID) is None
        if self._own_id:
            # Where the engines mind, it must be nobody else's; elsewhere the client's own, so that all logs agree.
            others = [header for header in self._request.headers if header[0].lower() != REQUEST_ID]
            self._request.headers = [*others, (b"X-Request-Id", self._name.encode())]

    async def run(self) -> Outcome:
        name, rank = self._prefill.replica.name, self._prefill.rank
        try:
            ahead = self._connector.ahead(self._name, self._divided.connectors.origin(name, rank))
        except WrongParametersError as error:
            self._withdraw()
            self._divided.wrong(name, str(error))
            raise FellBackError("no_parameters") from None
        if self._leg.way is not None:
            self._leg.way = _SecondLeg(self._leg.way)
        if ahead is None:
            return await self._answer(await self._compute())
        return await self._together(Computed(ahead, self._divided.clock()))

    async def _together(self, ahead: Computed) -> Outcome:
        """Both at once: the one that answers waits for what the other one sends."""
        loop = asyncio.get_running_loop()
        computing, answering = loop.create_task(self._compute()), loop.create_task(self._answer(ahead))
        outcome: Outcome | None = None
        failure: BaseException | None = None
        try:
            await asyncio.wait({computing, answering}, return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and computing.exception() is not None and not self._client.started:
                await computing  # the other one would wait for what never comes
            outcome = await answering
        except BaseException as error:
            failure = error
        # Not in a `finally`: compiled, what is being raised while a coroutine waits there is never let go of.
        if answering.done() and not answering.cancelled() and answering.exception() is None:
            # What was answered was computed: its end is near, and the client need not wait for it.
            self._divided.aside(_ended(computing))
        else:
            computing.cancel()
            answering.cancel()
            await _ended(computing, answering)
        if outcome is not None:
            return outcome
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback leads back here

    # -- the one that computes ----------------------------------------------------------------------------------

    async def _compute(self) -> Computed:
        divided, prefill, evidence = self._divided, self._prefill, self._hand_over.evidence
        replica, body = prefill.replica, self._hand_over.body
        token_ids = divided.pass_token_ids and self._hand_over.prompt.ask.kind == "chat"
        rank = prefill.rank
        # A compressed answer could not be read.
        plain = [header for header in self._request.headers if header[0].lower() != b"accept-encoding"]
        evidence.sent(replica)
        try:
            question = await divided.reading.aside(
                len(body), lambda: prefill_body(body, self._connector.ask(self._name), token_ids=token_ids)
            )
            gathered = await gather(
                divided.pools[replica.name],
                self._request.like(lines=crossing(plain)),
                question,
                added=[] if rank is None else [(RANK_HEADER, b"%d" % rank)],
                seconds=max(0.001, min(divided.prefill_seconds, self._deadline - divided.clock())),
                unread=self._unread,
            )
        except asyncio.CancelledError:
            evidence.left(replica)
            divided.dispatch.left(divided.clock(), prefill)
            raise
        except BrokenError as error:
            raise self._failed("prefill_dead", Outcome(Ending.UNREACHED, why=str(error), begun=True)) from None
        except TimeoutError:
            why = f"it did not compute a prompt within {divided.prefill_seconds:g} s (prefill_timeout_seconds)"
            raise self._failed("prefill_slow", Outcome(Ending.SILENT, why=why)) from None
        except ExhaustedError:
            raise self._failed("prefill_dead", Outcome(Ending.EXHAUSTED)) from None
        if gathered.status != 200:
            refused = Outcome(Ending.REFUSED, gathered.status, f"it answered {gathered.status}")
            # A judgement of the client's own body is for the one that answers to repeat.
            raise self._failed("prefill_refused", refused, over=gathered.status < 500)
        return self._computed(gathered, token_ids=token_ids)

    def _computed(self, gathered: Gathered, *, token_ids: bool) -> Computed:
        divided, prefill, prompt = self._divided, self._prefill, self._hand_over.prompt
        replica, now = prefill.replica, divided.clock()
        replica.heard_at = now
        divided.telemetry.replica(replica.name).attempt(Ending.COMPLETE)
        divided.telemetry.prefill_seconds.labels(replica.name).observe(now - prefill.chosen_at)
        self._hand_over.evidence.ended(replica, Outcome(Ending.COMPLETE, 200))
        divided.dispatch.handed(now, self._split, visible=prompt.ask.stream)
        watch = JsonWatch()
        watch.feed(gathered.body)
        answer = watch.answer()
        self._count.tokens = answer.cached_tokens
        divided.learning.computed(prompt, prefill, answer)
        try:
            whole = _object(gathered.body)
            handed = self._connector.read(whole)
        except WrongParametersError as error:
            divided.wrong(replica.name, str(error))
            raise FellBackError("no_parameters") from None
        divided.connectors.handed(replica.name, prefill.rank, handed)
        if divided.connectors.of(replica.name).shares_id and not self._own_id:
            # Its first answer shows that ids matter here, and this one is the client's: perhaps not the only one.
            raise FellBackError("settling")
        ids = whole.get("prompt_token_ids")
        if token_ids and handed.parameters is not None and isinstance(ids, list) and set(map(type, ids)) == {int}:
            handed = replace(handed, parameters=handed.parameters | {"prompt_token_ids": ids})
        return Computed(handed, now)

    def _failed(self, reason: str, outcome: Outcome, *, over: bool = False) -> FellBackError:
        replica = self._prefill.replica
        self._divided.telemetry.replica(replica.name).attempt(outcome.ending)
        self._hand_over.evidence.ended(replica, outcome)
        self._withdraw()
        return FellBackError(reason, over=over)

    def _withdraw(self) -> None:
        self._divided.dispatch.withdraw(self._divided.clock(), self._prefill)

    def _unread(self, gathered: Gathered) -> None:
        """The client left in the very moment in which the prompt was computed."""
        try:
            handed = self._connector.read(_object(gathered.body))
        except WrongParametersError:
            return
        self._release(handed, lambda: None)

    def _release(self, handed: Handed, free: Callable[[], None], *, gone: bool = False) -> None:
        """Nobody will fetch this. The replica that was to do it says so; if that one is `gone`, another."""
        if handed.parameters is None or not handed.blocks:
            return
        divided, chosen, now = self._divided, self._split.decode.replica, self._divided.clock()
        able = divided.fleet.able(self._hand_over.prompt.ask.model)
        able = [each for each in able if each.shunned_until <= now and not (gone and each is chosen)]
        replica = chosen if chosen in able else next(iter(able), None)
        if replica is not None:
            divided.aside(divided.release(self._request.like(), replica, handed.parameters, free))

    # -- the one that answers -----------------------------------------------------------------------------------

    async def _answer(self, computed: Computed) -> Outcome:
        divided, handed, prefill = self._divided, computed.handed, self._prefill.replica
        free = divided.pin(prefill.name, handed.blocks)
        now, decode = divided.clock(), self._split.decode.replica
        if now - computed.at > divided.lease * FRESH_SHARE:
            self._release(handed, free)
            raise FellBackError("late")
        patience = Patience(max(0.001, self._deadline - now), self._idle)
        leg = self._leg
        attempt = leg.attempt = Attempt(self._client, self._request, leg, patience, self._added, leg, self._count)
        try:
            outcome = await attempt.run(
                divided.pools[decode.name], decode_body(self._hand_over.body, handed.parameters)
            )
        except asyncio.CancelledError:
            # One that was asked tells the other one itself, as soon as it sees that the client is gone.
            free() if attempt.sent else self._release(handed, free)
            raise
        if outcome.ending in SHOWN:
            free()
            if outcome.ending == Ending.COMPLETE and outcome.status == 200:
                divided.telemetry.fetched_bytes.labels(decode.name).inc(self._split.size)
            return outcome
        if not attempt.sent:
            self._release(handed, free, gone=True)
        if outcome.ending != Ending.REFUSED or outcome.status in (502, 503, 504):
            return outcome
        if outcome.status in (200, 500):
            # The engine lives and the KV did not come: whoever was to send it is in doubt.
            lost = Outcome(Ending.UNREACHED, why="its KV could not be fetched", begun=True)
            self._hand_over.evidence.ended(prefill, lost)
            raise FellBackError("kv_load", over=True)
        free()  # who turns a request away lets its blocks go
        raise FellBackError("decode_refused", over=True)


def divisible(path: str, prompt: Prompt, body: bytes) -> bool:
    """Whether one replica may compute this prompt for another."""
    whole = prompt.unread is not None or len(prompt.prompts) != 1 or path.partition("?")[0] not in ROUTES
    return not whole and not any(mark in body for mark in UNDIVIDED)


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Take in how tasks ended that nobody waits for."""
    await asyncio.gather(*tasks, return_exceptions=True)


def _object(body: bytes) -> dict[str, Any]:
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WrongParametersError("its answer is no JSON") from None
    if not isinstance(whole, dict):
        raise WrongParametersError("its answer is no object")
    return whole
