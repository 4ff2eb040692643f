"""The router's own choice and index over fake engines, in virtual time: a day of traffic in a minute. Pure.

What decides here is `router.choose.dispatch`, byte for byte what decides in the router; what answers is
`fake_backend.engine`, step by step what answers in a fake replica. Only sockets, tokenizers and waiting are left out.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from fake_backend.engine import Engine
from fake_backend.request import Request
from router.choose.dispatch import Dispatch, Placement
from router.config import Address
from router.fleet.rates import Rates
from router.fleet.replica import Replica, State
from router.fleet.scrape import CacheConfig, Metrics
from router.index.memory import Index
from router.prompt.blocks import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fake_backend.scheduler import SchedulerConfig
    from fake_backend.timing import StepTime
    from router.choose.policies import Policy


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a workload. `keys` names the full blocks of prompt and answer; times in seconds."""

    at: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[int, ...]
    session: int = -1
    answer_named: bool = True
    """Whether the blocks of the answer are those that a next turn will ask for; traces often cannot tell."""

    def moved(self, at: float) -> Call:
        """The same call at another time."""
        return replace(self, at=at)


class Workload(Protocol):
    """Who sends what, and when."""

    def first(self) -> Sequence[Call]:
        """The calls that depend on no other."""

    def following(self, call: Call, now: float) -> Call | None:
        """The call that the end of another brings about, if any."""


@dataclass(slots=True)
class Record:
    """What became of a call."""

    call: Call
    replica: int
    predicted: int
    cached: int = 0
    ttft: float = 0.0
    """Seconds from the decision to the first token."""
    took: float = 0.0
    """Seconds from the decision to the end."""


@dataclass(slots=True)
class _Flight:
    call: Call
    placement: Placement
    record: Record


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Equal replicas: how many, and what each is."""

    replicas: int
    blocks: int
    scheduler: SchedulerConfig
    step_time: StepTime


@dataclass(slots=True)
class Simulation:
    """One run. `prefill_tokens_per_second` is what the router assumes until it has learned better."""

    shape: FleetShape
    policy: Policy
    prefill_tokens_per_second: float = 8000.0
    records: list[Record] = field(default_factory=list)

    def run(self, workload: Workload) -> list[Record]:
        """Play a workload to its end; the records are in order of arrival."""
        shape = self.shape
        size = shape.scheduler.block_size
        engines = [Engine(shape.scheduler, shape.blocks, shape.step_time) for _ in range(shape.replicas)]
        index, rates = Index(), Rates(self.prefill_tokens_per_second)
        dispatch = Dispatch(index, rates, self.policy)
        replicas = []
        for number in range(shape.replicas):
            cache = CacheConfig(block_size=size, num_gpu_blocks=shape.blocks)
            replica = Replica(
                f"replica-{number:03}", Address("r", number + 1, False, ""), State.READY, metrics=Metrics(cache=cache)
            )
            replicas.append(replica)
            index.size(replica.name, shape.blocks - 1)
        numbers = {replica.name: number for number, replica in enumerate(replicas)}
        busy = [False] * shape.replicas
        # Time, order of making, then either an arriving call or the number of an engine whose step ends.
        events: list[tuple[float, int, Call | int]] = []
        made = 0

        def push(at: float, what: Call | int) -> None:
            nonlocal made
            heapq.heappush(events, (at, made, what))
            made += 1

        def step(number: int, now: float) -> None:
            begun = engines[number].begin(now)
            busy[number] = begun is not None
            if begun is not None:
                push(begun.ends, number)

        for call in workload.first():
            push(call.at, call)
        while events:
            now, _, what = heapq.heappop(events)
            if isinstance(what, Call):
                number = self._arrive(what, now, dispatch, replicas, numbers, engines)
                if not busy[number]:
                    step(number, now)
                continue
            outcome = engines[what].end(now)
            for request in outcome.advanced:
                if request.generated == 1:
                    flight: _Flight = request.payload  # type: ignore[assignment]
                    dispatch.first_token(now, flight.placement)
                    flight.record.ttft = now - flight.call.at
            for request in outcome.finished:
                flight = request.payload  # type: ignore[assignment]
                flight.record.took = now - flight.call.at
                flight.record.cached = request.cached_tokens or 0
                dispatch.end(now, flight.placement)
                dispatch.answered(flight.placement, [whole(flight.call, size)])
                follower = workload.following(flight.call, now)
                if follower is not None:
                    push(follower.at, follower)
            step(what, now)
        return self.records

    def _arrive(
        self,
        call: Call,
        now: float,
        dispatch: Dispatch,
        replicas: list[Replica],
        numbers: dict[str, int],
        engines: list[Engine],
    ) -> int:
        size = self.shape.scheduler.block_size
        prompt = [prompt_of(call, size)]
        placement = dispatch.place(
            now,
            replicas,
            [prompt] * len(replicas),
            [call.prompt_tokens],
            answer_tokens=call.answer_tokens,
            visible=True,
        )
        number = numbers[placement.replica.name]
        record = Record(call, number, placement.hit)
        self.records.append(record)
        engines[number].add(
            Request(
                id=str(len(self.records)),
                prompt_tokens=call.prompt_tokens,
                answer_tokens=call.answer_tokens,
                keys=call.keys,
                arrival=now,
                max_tokens=call.answer_tokens,
                payload=_Flight(call, placement, record),
            )
        )
        return number


def prompt_of(call: Call, size: int) -> Blocks:
    """The prompt; its last token is always computed."""
    return Blocks(array("Q", call.keys[: call.prompt_tokens // size]), max(0, call.prompt_tokens - 1) // size)


def whole(call: Call, size: int) -> Blocks:
    """Prompt and answer; the last token of an answer is sampled, never computed."""
    tokens = call.prompt_tokens + (call.answer_tokens - 1 if call.answer_named else 0)
    return Blocks(array("Q", call.keys[: tokens // size]), 0)
