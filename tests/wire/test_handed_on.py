"""A connection to a replica that has gone from one exchange to the next."""

from __future__ import annotations

import asyncio
import gc

from httptools import HttpRequestParser, HttpResponseParser

from router.wire.attempts import Attempt, Observer, Patience
from router.wire.front import Door, Front
from router.wire.http import Request
from tests.fuzz.stage import LIMITS, TURNS, Stage, Wire, errands, stage_pool

ASKED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def test_who_leaves_as_its_answer_ends_does_not_take_the_next_ones_connection_along() -> None:
    pool, wires = stage_pool(lambda _: None)

    async def serve(request: Request, client: Front) -> None:
        await Attempt(client, request, Observer(), Patience(60.0, 60.0)).run(pool, request.body)

    door = Door(errands(serve), LIMITS)

    def client() -> tuple[Front, Wire]:
        front = Front(door)
        wire = Wire(front)
        front.connection_made(wire)  # type: ignore[arg-type]
        return front, wire

    async def settle() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    (first, _), (second, seen) = client(), client()
    first.data_received(ASKED)
    await settle()
    (replica,) = wires
    # All of this in one turn of the loop: another client asks, the first one leaves, its answer ends.
    second.data_received(ASKED)
    first.connection_lost(None)
    replica.protocol.data_received(ANSWER)
    await settle()
    assert wires == [replica]
    assert not replica.closing
    replica.protocol.data_received(ANSWER)
    await settle()
    assert bytes(seen.written) == ANSWER


async def test_an_answer_that_comes_as_its_client_is_cut_is_not_passed_on() -> None:
    stage = Stage(lambda _: None)
    stage.front.data_received(ASKED)
    await asyncio.sleep(0)
    (replica,) = stage.wires
    # Both in one turn of the loop.
    stage.door.cut()
    replica.protocol.data_received(ANSWER)
    await stage.settle()
    assert bytes(stage.client.written).startswith(b"HTTP/1.1 503 ")
    assert ANSWER not in stage.client.written
    assert replica.aborted
    await stage.leave()


async def test_what_is_over_does_not_wait_for_the_garbage_collector() -> None:
    pool, wires = stage_pool(lambda wire: wire.protocol.data_received(ANSWER))

    async def serve(request: Request, client: Front) -> None:
        await Attempt(client, request, Observer(), Patience(60.0, 60.0)).run(pool, request.body)

    front = Front(Door(errands(serve), LIMITS))
    client = Wire(front)
    front.connection_made(client)  # type: ignore[arg-type]
    front.data_received(ASKED)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert bytes(client.written) == ANSWER
    (replica,) = wires
    for protocol in (front, replica.protocol):
        protocol.connection_lost(None)
        assert not any(isinstance(each, HttpRequestParser | HttpResponseParser) for each in gc.get_referents(protocol))
