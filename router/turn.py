"""What one turn of the event loop has brought, done together: each step for all of it, and only then the next.

A request passes more code and data than the processor's caches hold. Served one by one, with other connections' bytes
and the kernel's work in between, each finds little of it there: a short chat then costs nearly twice as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from router.passage import Passage

MOST: Final = 16
"""No more are done together: the first one waits for the last one's steps."""
LONG_BYTES: Final = 8 * 1024
"""Nobody waits for the steps of a request with more than this to be read, which takes milliseconds in any company."""


class Turn:
    """Collects what is to be begun and ended until the loop has handed over all that it had. What is alone has nothing
    to wait for, and is done at once."""

    __slots__ = ("_answered", "_came", "_loop", "_open", "_set")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open = 0
        self._came: list[Passage] = []
        self._answered: list[Passage] = []
        self._set = False

    def came(self, one: Passage) -> None:
        """Begin it."""
        self._open += 1
        if self._open == 1:
            _begin([one])
        else:
            self._came.append(one)
            self._go_soon()

    def answered(self, one: Passage) -> None:
        """End it."""
        if self._open == 1:
            _end([one])
        else:
            self._answered.append(one)
            self._go_soon()

    def ended(self) -> None:
        """One of those that came is over."""
        self._open -= 1

    def _go_soon(self) -> None:
        if not self._set:
            self._set = True
            self._loop.call_soon(self._go)

    def _go(self) -> None:
        self._set = False
        # What has ended first: it makes room, and teaches what the next choice should know.
        answered, self._answered = self._answered, []
        for at in range(0, len(answered), MOST):
            _end(answered[at : at + MOST])
        came, self._came = self._came, []
        for at in range(0, len(came), MOST):
            _begin(came[at : at + MOST])


def _begin(some: list[Passage]) -> None:
    some = [each for each in some if each.look()]
    _send([each for each in some if each.new_bytes <= LONG_BYTES])
    for each in some:
        if each.new_bytes > LONG_BYTES:
            _send([each])


def _send(some: list[Passage]) -> None:
    some = [each for each in some if each.read()]
    some = [each for each in some if each.hash()]
    some = [each for each in some if each.choose()]
    for each in some:
        each.send()


def _end(some: list[Passage]) -> None:
    for each in some:
        each.hear()
    for each in some:
        each.learn()
    for each in some:
        each.end()
