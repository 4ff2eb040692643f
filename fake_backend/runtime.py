"""Drives an engine in real time and tells whoever waits what its steps brought."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from fake_backend.answers import Answer
from fake_backend.clock import Clock
from fake_backend.engine import Engine, Outcome
from fake_backend.kv_events import Content
from fake_backend.request import Request


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

    def __init__(self, engine: Engine, clock: Clock, observe: Callable[[Outcome, float], None]) -> None:
        self.engine = engine
        self.clock = clock
        self.dead = False
        self._observe = observe
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

    def submit(self, ticket: Ticket) -> None:
        ticket.request.payload = ticket
        ticket.runtime = self
        self.engine.add(ticket.request)
        self._wake.set()

    def abort(self, ticket: Ticket) -> None:
        """The client has left: the engine stops working on this when the running step ends."""
        self.engine.abort(ticket.request, self.clock.now())
        self._wake.set()

    def nudge(self) -> None:
        """Something outside the engine has changed; look again."""
        self._wake.set()

    async def _run(self) -> None:
        engine, clock = self.engine, self.clock
        while True:
            now = clock.now()
            step = engine.begin(now)
            while step is not None:
                await clock.sleep_until(step.ends)
                # A step that ended late has cost real time that the model doesn't know: the next one starts on the
                # model's schedule until the loop has caught up, unless it is hopelessly behind.
                now = step.ends if clock.now() - step.ends < 1.0 else clock.now()
                self._tell(engine.end(now), now)
                step = engine.begin(now)
            self._tell(engine.end(now), now)
            self._wake.clear()
            if not engine.idle and not engine.stopped and engine.next_event() is None and not len(engine.scheduler):
                continue
            event = engine.next_event()
            if event is None:
                await self._wake.wait()
            else:
                sleep = asyncio.ensure_future(clock.sleep_until(event))
                wake = asyncio.ensure_future(self._wake.wait())
                _done, pending = await asyncio.wait((sleep, wake), return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()

    def _tell(self, outcome: Outcome, now: float) -> None:
        self._observe(outcome, now)
        for request in outcome.advanced:
            payload = request.payload
            if isinstance(payload, Ticket):
                payload.signal.set()
        for request in outcome.finished:
            payload = request.payload
            if isinstance(payload, Ticket):
                payload.signal.set()
