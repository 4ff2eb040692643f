"""A coroutine that is run as a task is, but from the moment it is begun."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from router.wire.errand import Errand

if TYPE_CHECKING:
    from collections.abc import Coroutine

TURNS = 10


class Ends:
    """What errands told of their ends."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, Exception | None]] = []

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> Errand:
        errand = Errand(asyncio.get_running_loop(), coroutine, self.ended)
        asyncio.get_running_loop().call_soon(errand.begin)  # as from a callback of the loop
        return errand

    def ended(self, errand: Errand) -> None:
        self.seen.append((errand.cancelled, errand.error))


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_it_runs_to_where_it_has_to_wait() -> None:
    ends, done = Ends(), []
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        done.append("begun")
        done.append(str(await future))

    def begin() -> None:
        Errand(asyncio.get_running_loop(), work(), ends.ended).begin()
        assert done == ["begun"]
        assert asyncio.current_task() is None

    asyncio.get_running_loop().call_soon(begin)
    await turns()
    assert ends.seen == []
    future.set_result(1)
    await turns()
    assert done == ["begun", "1"]
    assert ends.seen == [(False, None)]


async def test_many_that_need_not_wait_do_not_pile_up() -> None:
    left = 5000

    async def nothing() -> None:
        pass

    def next_one(_: Errand) -> None:
        nonlocal left
        left -= 1
        if left:
            Errand(asyncio.get_running_loop(), nothing(), next_one).begin()

    asyncio.get_running_loop().call_soon(Errand(asyncio.get_running_loop(), nothing(), next_one).begin)
    for _ in range(2 * left):
        await asyncio.sleep(0)
    assert left == 0


async def test_inside_a_task_it_begins_in_the_next_turn() -> None:
    ends, tasks = Ends(), []

    async def work() -> None:
        tasks.append(asyncio.current_task())

    errand = Errand(asyncio.get_running_loop(), work(), ends.ended)
    errand.begin()
    assert tasks == []
    await turns()
    assert tasks == [errand]
    assert ends.seen == [(False, None)]


async def test_a_cancelled_one_ends_where_it_waits() -> None:
    ends, left = Ends(), []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append("left")

    errand = ends.begin(work())
    await turns()
    assert errand.cancel()
    await turns()
    assert left == ["left"]
    assert ends.seen == [(True, None)]
    assert not errand.cancel()


@pytest.mark.parametrize("error", [None, OSError()], ids=["result", "error"])
async def test_one_is_cancelled_though_what_it_waits_for_has_come_in_the_same_turn(error: Exception | None) -> None:
    ends, told = Ends(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work(future: asyncio.Future[None]) -> None:
        await future
        told.append({})

    errand = ends.begin(work(future))
    await turns()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    errand.cancel()
    del future
    await turns()
    assert ends.seen == [(True, None)]
    assert told == []


async def test_one_that_is_cancelled_before_it_begins_does_nothing() -> None:
    ends, done = Ends(), []

    async def work() -> None:
        done.append("begun")

    errand = ends.begin(work())
    errand.cancel()
    await turns()
    assert done == []
    assert ends.seen == [(True, None)]


async def test_it_may_set_itself_a_time() -> None:
    ends, seen = Ends(), []

    async def work() -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            seen.append("late")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))

    ends.begin(work())
    await turns()
    assert seen == ["late"]
    assert ends.seen == [(False, None)]


@pytest.mark.parametrize("how", ["whole", "failed", "cancelled"])
async def test_nothing_of_it_waits_for_the_garbage_collector(how: str) -> None:
    ends, held = Ends(), []

    class Body:
        pass

    async def work() -> None:
        body = Body()
        held.append(weakref.ref(body))
        await asyncio.sleep(0)
        if how == "failed":
            raise ValueError
        if how == "cancelled":
            await asyncio.get_running_loop().create_future()

    gc.collect()
    gc.disable()
    try:
        errand = ends.begin(work())
        await turns()
        errand.cancel()
        await turns()
        assert len(ends.seen) == 1
        ends.seen.clear()
        del errand
        assert held[0]() is None
    finally:
        gc.enable()
