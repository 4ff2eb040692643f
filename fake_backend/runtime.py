"""Drives an engine in real time and tells whoever waits what its steps brought."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from fake_backend.answers import Answer
from fake_backend.clock import Clock
from fake_backend.engine import Engine, Outcome, Step
from fake_backend.kv_events import Content
from fake_backend.request import Request
from fake_backend.transfer import EngineDeathError

log = logging.getLogger("fake_backend")


class Signal:
    """Wakes the one task that waits for news of any of its tickets."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next :meth:`set`; look at the tickets before, nothing is remembered."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Ticket:
    """One sequence under way, seen from the front end."""

    __slots__ = ("answer", "content", "prompt_ids", "request", "runtime", "signal")

    def __init__(
        self, request: Request, answer: Answer, prompt_ids: list[int], signal: Signal, content: Content
    ) -> None:
        self.request = request
        self.content = content
        self.runtime: Runtime | None = None
        self.answer = answer
        self.prompt_ids = prompt_ids
        self.signal = signal

    @property
    def done(self) -> bool:
        return self.request.finish_reason is not None

    def abandon(self) -> None:
        """The client has left."""
        if self.runtime is not None and not self.done:
            self.runtime.abort(self)


def content_of(request: Request) -> Content:
    """What KV events say of a request that came through a ticket."""
    assert isinstance(request.payload, Ticket)
    return request.payload.content


class Runtime:
    """The engine loop of one data-parallel rank."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        observe: Callable[[Outcome, float], None],
        attend: Callable[[], None] | None = None,
    ) -> None:
        """``attend`` is called whenever the engine may have left something for its connector's couriers."""
        self._attend = attend
        self.on_death: Callable[[], None] | None = None
        self.engine = engine
        self.clock = clock
        self._observe = observe
        self._tickets: set[Ticket] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def now(self) -> float:
        """What time it is for the engine, which may be late: nothing happens after the end of the step under way."""
        step, now = self.engine.step, self.clock.now()
        return now if step is None else min(now, step.ends)

    def submit(self, ticket: Ticket) -> None:
        ticket.request.payload = ticket
        ticket.runtime = self
        self._tickets.add(ticket)
        self.engine.add(ticket.request)
        self._wake.set()

    def abort(self, ticket: Ticket) -> None:
        """The client has left: the engine stops working on this when the running step ends."""
        try:
            self.engine.abort(ticket.request, self.now())
        except EngineDeathError as error:
            self._die(error)
        self._wake.set()

    def nudge(self) -> None:
        """Something outside the engine has changed; look again."""
        self._wake.set()

    def _die(self, error: Exception) -> None:
        """Nothing that was under way will be finished."""
        log.error("EngineCore encountered a fatal error: %s", error, exc_info=not isinstance(error, EngineDeathError))
        for ticket in self._tickets:
            ticket.request.finish_reason = "error"
            ticket.signal.set()
        self._tickets.clear()
        if self.on_death is not None:
            self.on_death()

    async def _run(self) -> None:
        try:
            await self._loop()
        except Exception as error:  # whatever goes wrong in an engine is its end, as it is in vLLM
            self._die(error)

    async def _loop(self) -> None:
        engine, clock = self.engine, self.clock
        while True:
            now = clock.now()
            step = self._begin(now)
            while step is not None:
                await clock.sleep_until(step.ends)
                # A step that ended late has cost real time that the model doesn't know: the next one starts on the
                # model's schedule until the loop has caught up, unless it is hopelessly behind.
                now = step.ends if clock.now() - step.ends < 1.0 else clock.now()
                self._tell(engine.end(now), now)
                step = self._begin(now)
            self._tell(engine.end(now), now)
            self._wake.clear()
            event = None if engine.stopped else engine.next_event()
            if event is None:
                await self._wake.wait()
            else:
                sleep = asyncio.ensure_future(clock.sleep_until(event))
                wake = asyncio.ensure_future(self._wake.wait())
                _done, pending = await asyncio.wait((sleep, wake), return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()

    def _begin(self, now: float) -> Step | None:
        step = self.engine.begin(now)
        if self._attend is not None:
            self._attend()
        return step

    def _tell(self, outcome: Outcome, now: float) -> None:
        self._observe(outcome, now)
        if self._attend is not None:
            self._attend()
        for request in outcome.advanced:
            payload = request.payload
            if isinstance(payload, Ticket):
                payload.signal.set()
        for request in outcome.finished:
            payload = request.payload
            if isinstance(payload, Ticket):
                self._tickets.discard(payload)
                payload.signal.set()
