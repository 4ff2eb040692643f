"""One request being served: without a coroutine for as long as nothing has to be waited for but its answer."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from router.wire.attempts import Ending
from router.wire.errand import Errand, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from router.course import Course
    from router.leg import Leg
    from router.prompt.request import Ask
    from router.reading import Looked, Prompt
    from router.tracing import Span
    from router.turn import Turn
    from router.wire.attempts import Outcome
    from router.wire.front import Front
    from router.wire.http import Request

log = logging.getLogger("warmroute.journey")

# Endings after which nothing is left to be tried.
_LAST: Final = frozenset({Ending.COMPLETE, Ending.BROKEN, Ending.STALLED})


class Steps(ABC):
    """What a request's way consists of."""

    __slots__ = ()

    @abstractmethod
    def prepare(self, passage: Passage) -> None:
        """Give the request what it carries beside the client's own headers, its id first of all: it may be called off,
        and is told of by that, before there is a next step."""

    @abstractmethod
    def look(self, passage: Passage) -> bool:
        """What does it ask for? False here, or at one of the next steps: something has to be waited for, and `go_on`
        does the rest."""

    @abstractmethod
    def read(self, passage: Passage) -> bool:
        """What does its prompt look like to the engine?"""

    @abstractmethod
    def hash(self, passage: Passage) -> bool:
        """And what are its blocks?"""

    @abstractmethod
    def choose(self, passage: Passage) -> bool:
        """Where is it answered soonest?"""

    @abstractmethod
    def send(self, passage: Passage) -> bool:
        """Send it there. Whether it is on its way: then its `answered` is told of its answer."""

    @abstractmethod
    def go_on(self, passage: Passage) -> Coroutine[Any, Any, None]:
        """All the rest, from where it stands. Cancelled when the client leaves."""

    @abstractmethod
    def left(self, passage: Passage) -> None:
        """The client left while a replica was at work on its answer."""

    @abstractmethod
    def over(self, leg: Leg, now: float) -> None:
        """It is over at this replica."""

    @abstractmethod
    def judge(self, course: Course, leg: Leg, last: Outcome) -> tuple[str, int] | None:
        """What follows from how it ended at a replica. None: another one may be asked; else how the request ended."""

    @abstractmethod
    def finish(self, passage: Passage, now: float) -> None:
        """It is over: count it, and tell of it."""


class Passage(Task):
    """Most requests are read and sent on where they came, and over with their answer. What takes more than that (a
    prompt that is read aside, a question to the shared store, a connection, another try) is done by an errand, which
    goes on from where this stands."""

    __slots__ = (
        "_ended",
        "_errand",
        "_loop",
        "_outcome",
        "_over",
        "_steps",
        "_turn",
        "ask",
        "began",
        "came",
        "client",
        "course",
        "leg",
        "legs",
        "looked",
        "prompt",
        "request",
        "span",
        "told",
    )

    def __init__(
        self, steps: Steps, turn: Turn, request: Request, client: Front, ended: Callable[[Task], None]
    ) -> None:
        super().__init__()
        self._steps = steps
        self._turn = turn
        self._loop = client.loop
        self._ended = ended
        self._errand: Errand | None = None
        self._outcome: Outcome | None = None
        self._over = False
        self.request = request
        self.client = client
        self.span: Span | None = None
        self.began = self._loop.time()
        """When it had come whole, by the loop's clock."""
        self.came = perf_counter()
        """Likewise, by the performance counter."""
        self.looked: Looked | None = None
        """What was found of its body's beginning, until it is read."""
        self.ask: Ask | None = None
        """Likewise."""
        self.prompt: Prompt | None = None
        """Until it is hashed."""
        self.course: Course | None = None
        """Once it is read."""
        self.leg: Leg | None = None
        """What is at work for it now."""
        self.legs: list[Leg] = []
        """What was begun for it, in order; the last one is who answered."""
        self.told: tuple[str, int] | None = None
        """How it ended, and the status that the client was told."""

    def begin(self) -> None:
        """Together with what came at the same time."""
        try:
            self._steps.prepare(self)
        except Exception as error:
            self._fail(error)
        self._turn.came(self)

    def look(self) -> bool:
        try:
            return not self._over and (self._steps.look(self) or self._go_on())
        except Exception as error:
            return self._fail(error)

    @property
    def new_bytes(self) -> int:
        """So much of its body is to be read, once it was looked at."""
        return self.looked[1] if self.looked is not None else 0

    def read(self) -> bool:
        try:
            return self._steps.read(self) or self._go_on()
        except Exception as error:
            return self._fail(error)

    def hash(self) -> bool:
        try:
            return self._steps.hash(self) or self._go_on()
        except Exception as error:
            return self._fail(error)

    def choose(self) -> bool:
        try:
            return self._steps.choose(self) or self._go_on()
        except Exception as error:
            return self._fail(error)

    def send(self) -> None:
        try:
            if not self._steps.send(self):
                self._go_on()
        except Exception as error:
            self._fail(error)

    def _go_on(self) -> bool:
        self._errand = Errand(self._loop, self._steps.go_on(self), self._gone)
        self._errand.begin()
        return False

    def _fail(self, error: Exception) -> bool:
        self.error = error
        self._leave()
        self._end_soon()
        return False

    def _leave(self) -> None:
        """Where it was booked."""
        if self.leg is None:
            return
        try:
            self._steps.left(self)
        except Exception:
            # It is to be ended all the same, and others of its turn are to be begun after it.
            log.exception("a request could not be called off")

    def _end_soon(self) -> None:
        self._over = True
        self._loop.call_soon(self.end)

    def cancel(self, _message: object = None) -> bool:
        if self._errand is not None:
            return self._errand.cancel()
        if self._over:
            return False
        self.cancelled = True
        self._leave()
        self._end_soon()
        return True

    def answered(self) -> None:
        leg = self.leg
        if self._over or leg is None or leg.attempt is None:
            return
        outcome = leg.attempt.outcome
        if outcome is None or outcome.ending not in _LAST:
            self._go_on()
            return
        leg.attempt.leave()
        self._outcome, self._over = outcome, True
        self._turn.answered(self)

    def hear(self) -> None:
        leg, outcome = self.leg, self._outcome
        assert leg is not None
        assert outcome is not None
        try:
            self._steps.over(leg, self._loop.time())
            if outcome.ending is Ending.COMPLETE:
                leg.answer()
        except Exception as error:
            self.error = error

    def learn(self) -> None:
        course, leg, outcome = self.course, self.leg, self._outcome
        assert course is not None
        assert leg is not None
        assert outcome is not None
        try:
            self.told = self._steps.judge(course, leg, outcome)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.leg = None
        self._turn.ended()
        try:
            self._steps.finish(self, self._loop.time())
        except Exception as error:
            self.error = self.error or error
        try:
            self._ended(self)
        except Exception:
            # Others are to be ended after it.
            log.exception("a connection failed inside the router")
            self.client.abort()
        self.error = None  # its traceback leads back here: not to wait for the garbage collector

    def _gone(self, errand: Task) -> None:
        self.cancelled, self.error = errand.cancelled, errand.error
        self._errand = None  # each knows the other
        self._over = True
        self._leave()  # where it was booked, and nobody set out with it
        self.end()
