"""A fleet with roles in virtual time: the router's own choice over fake engines that hand KV over. Pure.

As in `bench.simulation`, what decides is `router.choose.dispatch` and what answers is `fake_backend.engine`; the KV
goes the way of `fake_backend.transfer`, over links that concurrent transfers share. Of a hand-over nothing is left out
but HTTP: the prefill replica's answer, the second request and its tokenization are a constant.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.simulation import Call, prompt_of, whole
from fake_backend.engine import Engine
from fake_backend.link import Link as EngineLink
from fake_backend.request import Request
from fake_backend.transfer import LEASE_SECONDS, Transfers, describe
from router.choose.dispatch import Dispatch, SplitPlacement
from router.choose.policies import Cost
from router.config import Address
from router.fleet.links import Link, Links
from router.fleet.rates import Rates
from router.fleet.replica import Replica, Role, State
from router.fleet.scrape import CacheConfig, Metrics
from router.index.memory import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.simulation import Workload
    from fake_backend.engine import Outcome
    from fake_backend.scheduler import SchedulerConfig
    from fake_backend.timing import StepTime
    from router.choose.split import SplitDecider

# The first replica's answer, the second request, and its prompt tokenized once more.
HAND_OVER_SECONDS = 0.005
# Nobody tells the router how long an answer will be; it takes long ones to be this long (router.reading).
KNOWN_ANSWER_TOKENS = 256
BEAT_SECONDS = LEASE_SECONDS / 6
# When nothing arrived and no engine got any further this long, none ever will.
DEADLOCK_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SplitShape:
    """Equal engines: how many, in what roles, on what links.

    The first `computing` may prefill for others; with `open_roles` they answer too, else they do nothing but prefill.
    The `answering` others answer, and prefill for themselves where that is chosen.
    """

    computing: int
    answering: int
    open_roles: bool
    blocks: int
    scheduler: SchedulerConfig
    step_time: StepTime
    bytes_per_token: float
    link: Link
    """What the links are, and what the router is told of them."""

    @property
    def replicas(self) -> int:
        return self.computing + self.answering

    def role(self, number: int) -> Role:
        if number >= self.computing:
            return Role.DECODE
        return Role.BOTH if self.open_roles else Role.PREFILL


@dataclass(slots=True)
class SplitRecord:
    """What became of a call. `prefill`: the replica that computed its prompt for `decode`, if another did."""

    call: Call
    prefill: int | None
    decode: int
    ttft: float = 0.0
    """Seconds from the decision to the first token."""
    took: float = 0.0
    """Seconds from the decision to the end."""


@dataclass(slots=True, eq=False)
class _Flight:
    call: Call
    split: SplitPlacement
    record: SplitRecord


@dataclass(slots=True)
class SplitSimulation:
    """One run. `prefill_tokens_per_second` is what the router assumes until it has learned better."""

    shape: SplitShape
    decider: SplitDecider
    prefill_tokens_per_second: float = 8000.0
    records: list[SplitRecord] = field(default_factory=list)
    links: Links = field(init=False)
    _dispatch: Dispatch = field(init=False)
    _replicas: list[Replica] = field(init=False)
    _numbers: dict[str, int] = field(init=False)
    _engines: list[Engine] = field(init=False)
    _transfers: list[Transfers] = field(init=False)
    _busy: list[bool] = field(init=False)
    _wakes: list[float] = field(init=False)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(init=False)
    _workload: Workload = field(init=False)
    _made: int = 0
    _advanced_at: float = 0.0

    def run(self, workload: Workload) -> list[SplitRecord]:
        """Play a workload to its end; the records are in order of arrival.

        Two replicas that compute for one another can fill their pools with blocks that each keeps for a request which
        waits for room at the other. Heartbeats keep these leases alive for ever, as they do between real engines: what
        still waits then counts as long as it has waited.
        """
        self._build()
        self._workload = workload
        for call in workload.first():
            self._at(call.at, self._arrival(call))
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
            if now - self._advanced_at > DEADLOCK_SECONDS:
                self._give_up(now)
                break
        return self.records

    def _give_up(self, now: float) -> None:
        for record in self.records:
            record.ttft = record.ttft or now - record.call.at
            record.took = record.took or now - record.call.at

    def _build(self) -> None:
        shape, link = self.shape, self.shape.link
        index, rates = Index(), Rates(self.prefill_tokens_per_second)
        self._dispatch = Dispatch(index, rates, Cost(0.0))
        self.links = Links(Link(link.bandwidth, link.latency, link.rdma), bytes_per_token=shape.bytes_per_token)
        self._replicas, self._engines, self._transfers = [], [], []
        for number in range(shape.replicas):
            cache = CacheConfig(block_size=shape.scheduler.block_size, num_gpu_blocks=shape.blocks)
            name = f"replica-{number:03}"
            replica = Replica(
                name, Address("r", number + 1, False, ""), State.READY, shape.role(number), metrics=Metrics(cache=cache)
            )
            index.size(name, shape.blocks - 1)
            transfers = Transfers(name, EngineLink(link.bandwidth, link.latency), shape.bytes_per_token)
            self._replicas.append(replica)
            self._transfers.append(transfers)
            self._engines.append(Engine(shape.scheduler, shape.blocks, shape.step_time, connector=transfers))
        self._numbers = {replica.name: number for number, replica in enumerate(self._replicas)}
        self._busy = [False] * shape.replicas
        self._wakes = [float("inf")] * shape.replicas
        self._events = []

    def _at(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, self._made, happens))
        self._made += 1

    # -- engines ------------------------------------------------------------------------------------------------

    def _run(self, number: int, now: float) -> None:
        """Begin the next step of an engine that is in none, or see to it that it is looked at again."""
        if self._busy[number]:
            return
        engine = self._engines[number]
        step = engine.begin(now)
        self._busy[number] = step is not None
        if step is not None:
            self._at(step.ends, lambda then: self._step_ends(number, then))
        else:
            self._report(number, engine.end(now), now)
        self._deliver(number, now)
        if self._busy[number]:
            return
        wake = engine.next_event()
        if wake is not None and (self._wakes[number] <= now or wake < self._wakes[number]):
            self._wakes[number] = max(wake, now)
            self._at(self._wakes[number], lambda then: self._run(number, then))

    def _step_ends(self, number: int, now: float) -> None:
        outcome = self._engines[number].end(now)
        self._busy[number] = False
        self._report(number, outcome, now)
        self._run(number, now)

    def _deliver(self, number: int, now: float) -> None:
        """What an engine's connector has to say to others; on the side channel that takes no time."""
        outbox = self._transfers[number].outbox
        touched = []
        while outbox:
            letter = outbox.pop(0)
            peer = self._numbers[letter.peer.engine_id]
            if letter.kind == "done":
                self._transfers[peer].done(letter.remote_request)
                touched.append(peer)
            elif letter.request is not None and self._transfers[peer].read(letter.remote_request):
                self._transfers[number].granted(letter.request, now)
            elif letter.request is not None:
                self._transfers[number].denied(letter.request, now)
        for peer in touched:
            self._run(peer, now)

    # -- requests -----------------------------------------------------------------------------------------------

    def _arrival(self, call: Call) -> Callable[[float], None]:
        def happens(now: float) -> None:
            self._advanced_at = now
            size = self.shape.scheduler.block_size
            prompt = [prompt_of(call, size)]
            split = self._dispatch.place_split(
                now,
                self._replicas,
                [prompt] * len(self._replicas),
                [call.prompt_tokens],
                decider=self.decider,
                links=self.links,
                answer_tokens=min(call.answer_tokens, KNOWN_ANSWER_TOKENS),
                visible=True,
            )
            first = None if split.prefill is None else self._numbers[split.prefill.replica.name]
            record = SplitRecord(call, first, self._numbers[split.decode.replica.name])
            self.records.append(record)
            flight = _Flight(call, split, record)
            if first is None:
                self._send(record.decode, flight, f"{len(self.records)}", call.answer_tokens, None, now)
            else:
                asked = {"do_remote_decode": True}
                self._send(first, flight, f"{len(self.records)}-first", 1, asked, now)

        return happens

    def _send(
        self,
        number: int,
        flight: _Flight,
        name: str,
        answer_tokens: int,
        transfer: Mapping[str, Any] | None,
        now: float,
    ) -> None:
        self._engines[number].add(
            Request(
                id=name,
                prompt_tokens=flight.call.prompt_tokens,
                answer_tokens=answer_tokens,
                keys=flight.call.keys,
                arrival=now,
                max_tokens=answer_tokens,
                transfer=transfer,
                payload=flight,
            )
        )
        self._run(number, now)

    def _report(self, number: int, outcome: Outcome, now: float) -> None:
        if outcome.advanced or outcome.finished:
            self._advanced_at = now
        for request in outcome.advanced:
            if request.generated == 1:
                flight: _Flight = request.payload  # type: ignore[assignment]
                if number == flight.record.decode:
                    flight.record.ttft = now - flight.call.at
                    self._dispatch.fetched(now, flight.split, self.links)
        for request in outcome.finished:
            flight = request.payload  # type: ignore[assignment]
            if number == flight.record.decode:
                self._ended(flight, now)
            else:
                self._handed(number, request, flight, now)

    def _handed(self, number: int, request: Request, flight: _Flight, now: float) -> None:
        """The prefill replica has answered: the other one is told where the KV is."""
        params = describe(request, self._replicas[number].name, "r", 1 + number, 1)
        self._dispatch.handed(now, flight.split, visible=True)

        def happens(then: float) -> None:
            self._send(
                flight.record.decode,
                flight,
                request.id.removesuffix("-first"),
                flight.call.answer_tokens,
                params,
                then,
            )

        def beat(then: float) -> None:
            if not flight.record.ttft:
                self._transfers[number].heartbeat(request.id, then)
                self._at(then + BEAT_SECONDS, beat)

        self._at(now + HAND_OVER_SECONDS, happens)
        self._at(now + BEAT_SECONDS, beat)

    def _ended(self, flight: _Flight, now: float) -> None:
        call = flight.call
        flight.record.took = now - call.at
        self._dispatch.end(now, flight.split.decode)
        self._dispatch.answered(flight.split.decode, [whole(call, self.shape.scheduler.block_size)])
        follower = self._workload.following(call, now)
        if follower is not None:
            self._at(follower.at, self._arrival(follower))
