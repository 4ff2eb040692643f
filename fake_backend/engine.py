"""The engine of one replica: steps in, events out.

It owns no clock. Whoever drives it says what time it is, in seconds, and lets the time of a step pass between
:meth:`Engine.begin` and :meth:`Engine.end`: by sleeping (runtime.py) or by moving a virtual clock. The same calls at
the same times give the same events.
"""

from dataclasses import dataclass, field

from fake_backend.connector import Connector, TierEvent
from fake_backend.pool import BlockPool, CacheEvent
from fake_backend.request import Request, State
from fake_backend.scheduler import Batch, Scheduler, SchedulerConfig
from fake_backend.timing import StepTime


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way."""

    batch: Batch
    begun: float
    seconds: float

    @property
    def ends(self) -> float:
        return self.begun + self.seconds


@dataclass(slots=True)
class Outcome:
    """What a step brought."""

    advanced: list[Request] = field(default_factory=list)
    """Sequences that got one token each; ``request.generated`` is its number."""
    finished: list[Request] = field(default_factory=list)
    """Requests that ended since the last outcome: done, aborted or failed. ``finish_reason`` says which."""
    cache_events: list[CacheEvent | TierEvent] = field(default_factory=list)
    prompt_tokens: int = 0
    """Prompts whose first token came in this step, in tokens, as ``vllm:iteration_tokens_total`` counts them."""
    preempted: int = 0


class Engine:
    """A pool, a scheduler and a step time."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        step_time: StepTime,
        *,
        caching: bool = True,
        record_events: bool = False,
        connector: Connector | None = None,
    ) -> None:
        self.config = config
        self.step_time = step_time
        self.pool = BlockPool(num_blocks, caching=caching, record=record_events or connector is not None)
        self.scheduler = Scheduler(config, self.pool, connector)
        self.connector = connector
        self.stopped = False
        """While True no step begins (a sleeping or paused engine)."""
        self._step: Step | None = None
        self._told = 0
        """How many of the pool's events the connector has seen."""
        self._leaving: list[tuple[Request, str]] = []
        self._ended: list[Request] = []

    @property
    def idle(self) -> bool:
        """Nothing to do until a request arrives."""
        return len(self.scheduler) == 0 and self._step is None and not self._ended

    @property
    def step(self) -> Step | None:
        """The step under way."""
        return self._step

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of the requests that have no token yet, what has been computed of them included."""
        return sum(request.prompt_tokens for request in self.scheduler if request.first_token is None)

    def add(self, request: Request) -> None:
        """Put a request in line; it is admitted when a step begins."""
        self.scheduler.add(request)

    def abort(self, request: Request, now: float, reason: str = "abort") -> None:
        """End a request early. In the middle of a step that happens when the step ends."""
        if request.state is State.FINISHED:
            return
        if self._step is not None:
            self._leaving.append((request, reason))
            return
        self.scheduler.finish(request, reason, now)
        self._ended.append(request)

    def begin(self, now: float) -> Step | None:
        """Start the next step; None if there is nothing to compute."""
        assert self._step is None
        if self.stopped:
            return None
        batch = self.scheduler.schedule(now)
        self._ended += batch.failed
        if self.connector is not None and len(self.pool.events) > self._told:
            self.connector.evicted(self.pool.events[self._told :], now)
            self._told = len(self.pool.events)
        if not batch:
            return None
        self._step = Step(batch, now, self.step_time.seconds(batch.load))
        return self._step

    def end(self, now: float) -> Outcome:
        """Finish the step under way, if there is one, and report all that happened since the last report."""
        outcome = Outcome()
        step, self._step = self._step, None
        if step is not None:
            outcome.preempted = len(step.batch.preempted)
            outcome.advanced, outcome.finished = self.scheduler.complete(step.batch, now)
            outcome.prompt_tokens = sum(r.prompt_tokens for r in outcome.advanced if r.generated == 1)
        for request, reason in self._leaving:
            if request.state is not State.FINISHED:
                self.scheduler.finish(request, reason, now)
                outcome.finished.append(request)
        self._leaving.clear()
        if step is not None:
            # Only a step publishes: what an idle engine forgets (a reset) is told when the next one runs.
            outcome.cache_events, self.pool.events, self._told = list(self.pool.events), [], 0
            if self.connector is not None:
                outcome.cache_events += self.connector.take_events()
        outcome.finished += self._ended
        self._ended = []
        return outcome

    def next_event(self) -> float | None:
        """When an engine with nothing to compute will have something, without any new request; None if never."""
        return None if self.connector is None else self.connector.next_event()

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Forget all cached blocks; False while any is in use. ``preempt`` sends running sequences back first."""
        if preempt:
            # A step under way is lost with its sequences' blocks: they are computed again.
            self.scheduler.preempt_all()
        return self.pool.clear()
