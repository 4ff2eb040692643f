"""Many that want to be called at about the same time have one timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from router.wire.alarms import MOST_SECONDS, TICK_SECONDS, Alarms


class Loop:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((when, call, arguments))

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self.call_at(self.now, call, *arguments)

    def pass_until(self, end: float) -> None:
        while self.timers and min(when for when, _, _ in self.timers) <= end:
            first = min(range(len(self.timers)), key=lambda i: self.timers[i][0])
            when, call, arguments = self.timers.pop(first)
            self.now = max(self.now, when)
            call(*arguments)
        self.now = end


class Caller:
    def __init__(self, loop: Loop, then: Callable[[], object] = lambda: None) -> None:
        self.called: list[float] = []
        self._loop = loop
        self._then = then

    def check_time(self) -> None:
        self.called.append(self._loop.now)
        self._then()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def alarms(loop: Loop) -> Alarms:
    return Alarms(cast("Any", loop))


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.05, 1.0, 4.99])
def test_it_is_called_once_at_its_time_or_a_little_later(loop: Loop, alarms: Alarms, seconds: float) -> None:
    caller = Caller(loop)
    alarms.after(seconds, caller)
    loop.pass_until(200.0)
    (called,) = caller.called
    assert 100.0 + seconds <= called <= 100.0 + seconds + TICK_SECONDS


def test_those_of_one_moment_share_a_timer(loop: Loop, alarms: Alarms) -> None:
    callers = [Caller(loop) for _ in range(100)]
    for caller in callers:
        alarms.after(1.0, caller)
    assert len(loop.timers) == 1
    loop.pass_until(102.0)
    assert all(len(caller.called) == 1 for caller in callers)


def test_whoever_left_is_not_called_not_even_by_one_that_is_called_with_it(loop: Loop, alarms: Alarms) -> None:
    callers: list[Caller] = []

    def leave() -> None:
        for caller in callers:
            alarm.discard(caller)

    callers += [Caller(loop, leave) for _ in range(3)]
    for caller in callers:
        alarm = alarms.after(1.0, caller)
    loop.pass_until(102.0)
    assert sum(len(caller.called) for caller in callers) == 1


def test_a_far_time_is_asked_for_again_and_again(loop: Loop, alarms: Alarms) -> None:
    caller = Caller(loop)
    alarms.after(3600.0, caller)
    loop.pass_until(200.0)
    (called,) = caller.called
    assert called <= 100.0 + MOST_SECONDS + TICK_SECONDS


def test_whoever_is_called_may_ask_for_the_same_moment(loop: Loop, alarms: Alarms) -> None:
    caller = Caller(loop, lambda: len(caller.called) < 3 and alarms.after(0.0, caller))
    alarms.after(1.0, caller)
    loop.pass_until(102.0)
    assert len(caller.called) == 3


def test_one_that_fails_takes_nobody_with_it(loop: Loop, alarms: Alarms) -> None:
    def fail() -> None:
        raise ValueError("it failed")

    callers = [Caller(loop, fail) for _ in range(3)]
    for caller in callers:
        alarms.after(1.0, caller)
    for _ in callers:
        with pytest.raises(ValueError, match="it failed"):
            loop.pass_until(102.0)
    assert [len(caller.called) for caller in callers] == [1, 1, 1]
