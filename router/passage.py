"""One request being served: without a coroutine for as long as nothing has to be waited for but its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from router.wire.attempts import Ending
from router.wire.errand import Errand, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from router.course import Course
    from router.leg import Leg
    from router.reading import Looked
    from router.tracing import Span
    from router.wire.attempts import Outcome
    from router.wire.front import Front
    from router.wire.http import Request

# Endings after which nothing is left to be tried.
_LAST: Final = frozenset({Ending.COMPLETE, Ending.BROKEN, Ending.STALLED})


class Steps(ABC):
    """What a request's way consists of."""

    __slots__ = ()

    @abstractmethod
    def begin(self, passage: Passage) -> bool:
        """Go as far as nothing has to be waited for. Whether it is on its way: then its `answered` is told of its
        answer. Else `go_on` does the rest."""

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
        "_steps",
        "began",
        "came",
        "client",
        "course",
        "leg",
        "legs",
        "looked",
        "request",
        "span",
        "told",
    )

    def __init__(self, steps: Steps, request: Request, client: Front, ended: Callable[[Task], None]) -> None:
        super().__init__()
        self._steps = steps
        self._loop = client.loop
        self._ended = ended
        self._errand: Errand | None = None
        self.request = request
        self.client = client
        self.span: Span | None = None
        self.began = self._loop.time()
        """When it had come whole, by the loop's clock."""
        self.came = perf_counter()
        """Likewise, by the performance counter."""
        self.looked: Looked | None = None
        """What was found of its body's beginning, until it is read."""
        self.course: Course | None = None
        """Once it is read."""
        self.leg: Leg | None = None
        """What is at work for it now."""
        self.legs: list[Leg] = []
        """What was begun for it, in order; the last one is who answered."""
        self.told: tuple[str, int] | None = None
        """How it ended, and the status that the client was told."""

    def begin(self) -> None:
        try:
            on_its_way = self._steps.begin(self)
        except Exception as error:
            self.error = error
            if self.leg is not None:
                self._steps.left(self)
                self.leg = None
            self._loop.call_soon(self._finish)
            return
        if not on_its_way:
            self._go_on()

    def cancel(self, _message: object = None) -> bool:
        if self._errand is not None:
            return self._errand.cancel()
        if self.cancelled or self.leg is None:
            return False
        self.cancelled = True
        self._steps.left(self)
        self._loop.call_soon(self._finish)
        return True

    def answered(self) -> None:
        course, leg = self.course, self.leg
        if self.cancelled or course is None or leg is None or leg.attempt is None:
            return
        outcome = leg.attempt.outcome
        if outcome is None or outcome.ending not in _LAST:
            self._go_on()
            return
        leg.attempt.leave()
        now = self._loop.time()
        try:
            self._steps.over(leg, now)
            self.told = self._steps.judge(course, leg, outcome)
        except Exception as error:
            self.error = error
        self._end(now)

    def _go_on(self) -> None:
        self._errand = Errand(self._loop, self._steps.go_on(self), self._gone)
        self._errand.begin()

    def _gone(self, errand: Task) -> None:
        self.cancelled, self.error = errand.cancelled, errand.error
        self._errand = None  # each knows the other
        if self.leg is not None:
            self._steps.left(self)  # it was booked, and nobody set out with it
        self._finish()

    def _finish(self) -> None:
        self._end(self._loop.time())

    def _end(self, now: float) -> None:
        self.leg = None
        try:
            self._steps.finish(self, now)
        except Exception as error:
            self.error = self.error or error
        self._ended(self)
        self.error = None  # its traceback leads back here: not to wait for the garbage collector
