"""An answer that breaks off and goes on, step by step: what the second replica is sent, what the client is told, and
who stops working when the client leaves."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from fake_backend.settings import TINY
from router.app import Router
from router.course import Course
from tests.wire.conftest import Bench
from tests.wire.scripted import (
    STREAM_HEAD,
    Raw,
    Received,
    Reply,
    Script,
    Scripted,
    answer,
    chunk,
    delta,
    until,
    until_closed,
    within,
)

BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
PATH = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}\n\n'


pytestmark = pytest.mark.usefixtures("one_tokenizer")


def says(*pieces: bytes, then: str = "reset") -> Script:
    """Streams these pieces, and then dies (reset), ends whole (end) or waits to be left (stay)."""

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.01)  # or a reset overtakes it
        if then == "end":
            writer.write(b"0\r\n\r\n")
        elif then == "stay":
            await until_closed(request, reader)
        else:
            writer.transport.abort()

    return script


def refuses(status: bytes) -> Script:
    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"error":{}}', status=status))

    return script


async def hang(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await until_closed(request, reader)


class Order:
    """Replicas of which the first asked follows the first script, the second the second, and so on."""

    def __init__(self, scripts: list[Script]) -> None:
        self._scripts = iter(scripts)
        self.asked: list[Received] = []

    async def __call__(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(request)
        await next(self._scripts)(request, reader, writer)


async def scene(bench: Bench, *scripts: Script, **changes: Any) -> tuple[Order, Router, Raw]:
    """One replica for each script, and a client that has asked."""
    order = Order(list(scripts))
    replicas: list[Scripted] = [await bench.replica(order) for _ in scripts]
    router = await bench.router(*replicas, tokenizer=TINY, probe_seconds=60, **changes)
    client = await bench.client(router)
    client.post(PATH, BODY)
    return order, router, client


def at_rest(router: Router) -> bool:
    return all(not replica.load.in_flight for replica in router.fleet)


def shown(reply: Reply) -> list[bytes]:
    return [piece + b"\n\n" for piece in reply.body.split(b"\n\n") if piece]


def why(router: Router) -> list[str]:
    return [labels[0] for labels, count in router.telemetry.unresumed._series.items() if count.value]


async def test_the_second_replica_gets_the_text_and_the_client_the_rest(bench: Bench) -> None:
    order, router, client = await scene(
        bench, says(delta(" I"), delta(" am")), says(delta(" a"), delta(" keeper"), DONE, then="end")
    )
    reply = await client.reply()
    assert shown(reply)[:2] == [delta(" I"), delta(" am")]
    assert [json.loads(piece[6:])["choices"][0]["delta"]["content"] for piece in shown(reply)[2:-1]] == [
        " a",
        " keeper",
    ]
    assert (shown(reply)[-1], reply.clean) == (DONE, True)
    assert [request.json for request in order.asked] == [
        json.loads(BODY),
        {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " I am"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ]
    assert router.telemetry.resumed.value == 1
    # The connection takes the next request.
    client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.reply()).status == 200


async def test_nothing_of_a_resumed_request_waits_for_the_garbage_collector(bench: Bench) -> None:
    gc.collect()
    gc.disable()
    try:
        _, router, client = await scene(bench, says(delta(" I")), says(delta(" am"), DONE, then="end"))
        assert delta(" I") in (await client.reply()).body
        await until(lambda: at_rest(router), "nothing in flight")
        await until(lambda: not any(isinstance(each, Course) for each in gc.get_objects()), "all of it to be freed")
    finally:
        gc.enable()


async def test_an_engine_that_says_that_it_failed_is_as_good_as_dead(bench: Bench) -> None:
    order, _, client = await scene(
        bench, says(delta(" I") + FAILED + DONE, then="end"), says(delta(" am"), DONE, then="end")
    )
    reply = await client.reply()
    assert [json.loads(piece[6:])["choices"][0]["delta"]["content"] for piece in shown(reply)[:-1]] == [" I", " am"]
    assert b"error" not in reply.body
    assert shown(reply)[-1] == DONE
    assert len(order.asked) == 2


async def test_what_the_engine_said_of_its_failure_is_told_where_nobody_goes_on(bench: Bench) -> None:
    _, router, client = await scene(bench, says(delta(" I") + FAILED + DONE, then="end"))
    assert (await client.reply()).body == delta(" I") + FAILED + DONE
    assert why(router) == ["no other replica"]


async def test_an_answer_of_which_only_the_role_was_given_is_asked_for_again(bench: Bench) -> None:
    role = b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    order, _, client = await scene(bench, says(role + FAILED + DONE), says(role, delta(" I"), DONE, then="end"))
    reply = await client.reply()
    assert reply.body.count(b'"role"') == 1
    assert json.loads(shown(reply)[1][6:])["choices"][0]["delta"] == {"content": " I"}
    assert [request.body for request in order.asked] == [BODY, BODY]


async def test_one_that_ends_its_stream_too_soon_is_as_good_as_dead(bench: Bench) -> None:
    order, router, client = await scene(bench, says(delta(" I"), then="end"), says(delta(" am"), DONE, then="end"))
    reply = await client.reply()
    assert [json.loads(piece[6:])["choices"][0]["delta"]["content"] for piece in shown(reply)[:-1]] == [" I", " am"]
    assert shown(reply)[-1] == DONE
    assert len(order.asked) == 2
    # Its connection was whole, and takes the next request.
    assert sum(len(pool.open) for pool in router._pools.values()) == 2


async def test_a_cut_within_an_event_is_told(bench: Bench) -> None:
    order, router, client = await scene(bench, says(delta(" I"), b'data: {"cho'), says(DONE, then="end"))
    reply = await client.reply()
    assert json.loads(reply.body.rstrip().rpartition(b"\n")[2].removeprefix(b"data: "))["error"]["code"] == 502
    assert len(order.asked) == 1
    assert why(router) == ["within an event"]


@pytest.mark.parametrize(
    "second",
    [
        refuses(b"503 Busy"),
        refuses(b"400 Bad Request"),
        says(),
        says(b'data: {"cho'),
        says(b": a comment\n\n"),
    ],
    ids=["busy", "refused", "reset at once", "within an event", "after a comment"],
)
async def test_a_second_replica_that_fails_is_seen_by_nobody(bench: Bench, second: Script) -> None:
    order, router, client = await scene(
        bench, says(delta(" I"), delta(" am")), second, says(delta(" here"), DONE, then="end")
    )
    reply = await client.reply()
    assert shown(reply)[:2] == [delta(" I"), delta(" am")]
    assert json.loads(shown(reply)[-2][6:])["choices"][0]["delta"]["content"] == " here"
    assert shown(reply)[-1] == DONE
    assert order.asked[1].body == order.asked[2].body
    await until(lambda: at_rest(router), "nothing is in flight")


async def test_a_second_replica_that_takes_it_for_something_else_is_not_believed(bench: Bench) -> None:
    thought = b'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}\n\n'
    order, router, client = await scene(bench, says(delta(" I")), says(thought, delta(" am"), then="stay"))
    reply = await client.reply()
    assert shown(reply)[0] == delta(" I")
    assert json.loads(shown(reply)[1][6:])["error"]["code"] == 502
    assert why(router) == ["not plain text"]
    await within(order.asked[1].aborted.wait())


async def test_two_that_fail_without_a_word_are_enough(bench: Bench) -> None:
    """It may be what fails them: no tour of the fleet."""
    order, router, client = await scene(bench, says(delta(" I")), *[refuses(b"500 E")] * 3, max_attempts=4)
    reply = await client.reply()
    assert json.loads(shown(reply)[-1][6:])["error"]["code"] == 502
    assert len(order.asked) == 3
    assert why(router) == ["others failed"]


async def test_a_second_half_that_never_begins_is_bounded_as_a_pause_is(bench: Bench) -> None:
    order, router, client = await scene(bench, says(delta(" I")), hang, idle_timeout_seconds=1)
    reply = await client.reply()
    assert json.loads(shown(reply)[-1][6:])["error"]["code"] == 502
    await within(order.asked[1].aborted.wait())
    await until(lambda: at_rest(router), "nothing is in flight")


async def test_the_pause_between_the_halves_is_kept_alive(bench: Bench) -> None:
    go_on = asyncio.Event()

    async def late(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await says(delta(" am"), DONE, then="end")(request, reader, writer)

    _, _, client = await scene(bench, says(delta(" I")), late, sse_keep_alive_seconds=0.05)
    await client.head()
    assert await client.chunk() == delta(" I")
    for _ in range(3):
        assert (await client.chunk() or b"").startswith(b":")
    go_on.set()
    rest = b""
    while (piece := await client.chunk()) is not None:
        rest += b"" if piece.startswith(b":") else piece
    assert b" am" in rest
    assert rest.endswith(DONE)


@pytest.mark.parametrize(
    "scripts",
    [
        [refuses(b"503 Busy"), hang],
        [refuses(b"500 E"), says(delta(" I"), then="stay")],
        [says(delta(" I")), hang],
        [says(delta(" I")), says(delta(" am"), then="stay")],
        [says(delta(" I")), refuses(b"503 Busy"), hang],
    ],
    ids=["in a retry", "in a retry's answer", "before the second half", "in the second half", "in its retry"],
)
async def test_a_client_that_leaves_is_followed_in_every_phase(bench: Bench, scripts: list[Script]) -> None:
    order, router, client = await scene(bench, *scripts)
    await until(lambda: len(order.asked) == len(scripts), "the last replica has the request")
    client.leave()
    await within(order.asked[-1].aborted.wait())
    await until(lambda: at_rest(router), "nothing is in flight")
    assert router.telemetry.resumed.value == 0
    assert router.door is not None
    await until(lambda: router.door.held_bytes == 0, "no body is held")  # type: ignore[union-attr]


async def test_a_client_that_does_not_read_stops_the_second_replica_too(bench: Bench) -> None:
    sent = 0

    async def flood(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        piece = chunk(delta("x" * 65_536))
        try:
            for _ in range(3200):  # 200 MB
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        finally:
            request.aborted.set()

    order = Order([says(delta(" I")), flood])
    replicas = [await bench.replica(order) for _ in range(2)]
    router = await bench.router(*replicas, tokenizer=TINY, probe_seconds=60)
    client = await bench.client(router)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.post(PATH, BODY)
    assert router.door is not None
    await until(lambda: any(front.stalled for front in router.door.connections), "it stalls")  # type: ignore[union-attr]
    (front,) = router.door.connections
    assert front._transport is not None
    assert front._transport.get_write_buffer_size() < 2_000_000
    assert sent < 100_000_000
    client.writer.transport.abort()
    await within(order.asked[1].aborted.wait())
    await until(lambda: at_rest(router), "nothing is in flight")
