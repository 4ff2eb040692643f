"""A coroutine that runs from the moment it is begun: what it does before it has to wait is done at once.

asyncio's own task makes its first step in the loop's next turn and tells of its end in yet another, while most requests
wait but once, for their answer. To what runs inside it this is a task (asyncio's docs, "Extending"): it can be
cancelled, and `asyncio.timeout` works.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from asyncio.tasks import _enter_task, _leave_task
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Task:
    """Work for one client, that ends by itself or is called off. Whoever began it is told in a later turn of the loop
    than that, never at once: else one after the other would pile up on the stack."""

    __slots__ = ("cancelled", "error")

    def __init__(self) -> None:
        self.cancelled = False
        """It ended by being called off."""
        self.error: Exception | None = None
        """What it ended with, if that was an error. Gone once its end was told."""

    def cancel(self, _message: object = None) -> bool:
        """Call it off. False where it has ended."""
        raise NotImplementedError

    def answered(self) -> None:
        """The answer that it waits for, without being a coroutine, is there, or what became of it."""


class Errand(Task):
    """Runs one coroutine to its end, and tells `ended` of it. Use once."""

    __slots__ = ("_cancels", "_coroutine", "_ended", "_loop", "_to_cancel", "_waits_for")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, None],
        ended: Callable[[Errand], None],
    ) -> None:
        super().__init__()
        self._loop = loop
        self._coroutine: Coroutine[Any, Any, None] | None = coroutine
        self._ended = ended
        self._waits_for: asyncio.Future[Any] | None = None
        self._to_cancel = False
        self._cancels = 0

    def begin(self) -> None:
        """Run as far as there is nothing to wait for."""
        try:
            _enter_task(self._loop, self._task)
        except RuntimeError:
            self._loop.call_soon(self._go_on)  # no task runs inside another
            return
        self._run()
        if self._coroutine is None:
            self._loop.call_soon(self._tell)

    def cancel(self, _message: object = None) -> bool:
        """Raise CancelledError where it waits. False where it has ended."""
        if self._coroutine is None:
            return False
        self._cancels += 1
        if self._waits_for is None or not self._waits_for.cancel():
            self._to_cancel = True
        return True

    def cancelling(self) -> int:
        """How often it was cancelled and has not taken that back."""
        return self._cancels

    def uncancel(self) -> int:
        """Take a cancellation back; as `cancelling`."""
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def _go_on(self, _awaited: object = None) -> None:
        self._waits_for = None
        _enter_task(self._loop, self._task)
        self._run()
        if self._coroutine is None:
            self._tell()

    def _tell(self) -> None:
        self._ended(self)
        self.error = None  # its traceback leads back here: not to wait for the garbage collector

    @property
    def _task(self) -> asyncio.Task[None]:
        return cast("asyncio.Task[None]", self)

    def _run(self) -> None:
        """As the task that was entered, up to where it has to wait."""
        coroutine = self._coroutine
        assert coroutine is not None
        try:
            if self._to_cancel:
                self._to_cancel = False
                awaited = coroutine.throw(CancelledError())
            else:
                # What is waited for raises its own error, if it has one, as soon as it is asked for its result.
                awaited = coroutine.send(None)
        except StopIteration:
            self._coroutine = None
        except CancelledError:
            self._coroutine, self.cancelled = None, True
        except Exception as error:
            self._coroutine, self.error = None, error
        else:
            self._wait_for(awaited)
        finally:
            _leave_task(self._loop, self._task)

    def _wait_for(self, awaited: Any) -> None:
        if awaited is None:
            self._loop.call_soon(self._go_on)  # it gave way to others
            return
        awaited._asyncio_future_blocking = False
        self._waits_for = awaited
        awaited.add_done_callback(self._go_on)
        if self._to_cancel and awaited.cancel():
            self._to_cancel = False
