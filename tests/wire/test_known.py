"""Heads that were met before: what is taken for one of them, and what is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.wire.front import Door, Front
from router.wire.http import Head, Request
from router.wire.keys import Keys
from router.wire.known import LONGEST, SELDOM, TRIES, Known, known_answer, known_request
from tests.fuzz.stage import LIMITS, Stage, Wire, errands
from tests.wire.scripted import until

ASKED = b"POST /v1/x?q HTTP/1.1\r\nHost: x\r\nX-A: b\r\nContent-Length: %d\r\nX-C: d\r\n\r\n%b"


def test_a_head_is_told_by_all_but_the_digits_of_its_length() -> None:
    known = Known(b"a: ", b"\r\n\r\n")
    for size in (*range(120), 998, 999, 1000, 1001, 9_999, 10_000, 99_998, 99_999, 100_000):
        for said in (size - 1, size, size + 1):
            data = b"a: %d\r\n\r\n%b" % (said, b"x" * size)
            assert known.body_at(data) == (len(data) - size if said == size else -1)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"a: ", b"a: \r\n\r\n", b"a: 00\r\n\r\n", b"a: 01\r\n\r\nx", b"a: +1\r\n\r\nx", b"a: 1 \r\n\r\nx"),
        *(b"a: -1\r\n\r\n", b"A: 1\r\n\r\nx", b"a: 1\n\nx", b"a: 1\r\nb: c\r\n\r\nx", b"a: 1\r\n\r\nxa: 1\r\n\r\nx"),
    ],
)
def test_anything_else_is_for_the_parser(data: bytes) -> None:
    assert Known(b"a: ", b"\r\n\r\n").body_at(data) == -1


def test_only_heads_with_one_plain_length_are_remembered() -> None:
    request = Request(b"POST", b"/", "/", b"X: y\r\n", b"", http11=True, keep_alive=True)

    def remembered(data: bytes) -> bool:
        return known_request(data, request, LIMITS, None) is not None

    assert remembered(b"POST / HTTP/1.1\r\ncontent-LENGTH: 2\r\nX: y\r\n\r\n{}")
    assert not remembered(b"POST / HTTP/1.1\r\nX: y\r\n\r\n{}")
    assert not remembered(b"POST / HTTP/1.1\r\nContent-Length: 02\r\nX: y\r\n\r\n{}")
    assert not remembered(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nX: y\r\n\r\n{}")
    assert not remembered(b"POST / HTTP/1.1\r\nX: %b\r\nContent-Length: 2\r\n\r\n{}" % (b"y" * LONGEST))
    head = Head(200, b"OK", [(b"Content-Length", b"2")])
    again = known_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", head)
    assert again is not None
    assert again.head(12).headers == [(b"Content-Length", b"12")]


FACTS = ("method", "target", "path", "lines", "http11", "keep_alive", "upgrade", "key", "id", "rank")


class Seen:
    """What a door's requests were."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.door = Door(errands(self._serve), LIMITS)
        self.front = Front(self.door)
        self.client = Wire(self.front)
        self.front.connection_made(self.client)  # type: ignore[arg-type]

    async def _serve(self, request: Request, client: Front) -> None:
        self.requests.append(request)
        client.begin()
        client.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        client.finish()

    async def ask(self, data: bytes) -> None:
        self.front.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)


def facts(request: Request) -> list[Any]:
    return [getattr(request, name) for name in FACTS]


async def test_a_request_with_a_known_head_is_as_the_first_one_was() -> None:
    seen = Seen()
    for body in (b"one", b"two", b"another length", b""):
        await seen.ask(ASKED % (len(body), body))
    first, *others = seen.requests
    assert [request.body for request in seen.requests] == [b"one", b"two", b"another length", b""]
    assert [facts(request) for request in others] == [facts(first)] * 3
    assert seen.door.held_bytes == 0


async def test_what_is_done_to_one_request_is_not_done_to_the_next() -> None:
    seen = Seen()
    await seen.ask(ASKED % (2, b"{}"))
    for _ in range(2):
        await seen.ask(ASKED % (2, b"[]"))
        request = seen.requests[-1]
        assert (request.id, request.lines) == (b"", b"X-A: b\r\nX-C: d\r\n")
        request.id = b"mine"
        request.add([(b"X-Request-Id", b"mine")])


async def test_it_is_judged_anew_by_other_limits_and_keys() -> None:
    seen = Seen()
    for _ in range(2):
        await seen.ask(ASKED % (2, b"{}"))
    seen.door.limits = replace(LIMITS, header_count=3)
    await seen.ask(ASKED % (2, b"{}"))
    assert len(seen.requests) == 2
    assert b"HTTP/1.1 431 " in seen.client.written
    seen = Seen()
    for _ in range(2):
        await seen.ask(ASKED % (2, b"{}"))
    seen.door.keys = Keys(["secret"])
    await seen.ask(ASKED % (2, b"{}"))
    assert len(seen.requests) == 2
    assert b"HTTP/1.1 401 " in seen.client.written


@pytest.mark.parametrize(("limit", "status"), [("body_bytes", 413), ("buffered_bytes", 503)])
async def test_its_body_is_held_to_the_limits(limit: str, status: int) -> None:
    seen = Seen()
    seen.door.limits = replace(LIMITS, **{limit: 100})
    await seen.ask(ASKED % (2, b"{}"))
    await seen.ask(ASKED % (101, b" " * 101))
    assert len(seen.requests) == 1
    assert b"HTTP/1.1 %d " % status in seen.client.written
    assert seen.door.held_bytes == 0


async def test_a_request_that_waits_for_leave_to_send_its_body_gets_it_each_time() -> None:
    seen = Seen()
    asked = ASKED.replace(b"X-A: b", b"Expect: 100-continue") % (2, b"{}")
    for _ in range(3):
        await seen.ask(asked)
    assert seen.client.written.count(b"HTTP/1.1 100 Continue\r\n\r\n") == 3


ANSWER = b"HTTP/1.1 200 OK\r\nX-A: b\r\ncontent-length: %d\r\nX-C: d\r\n\r\n%b"


async def test_an_answer_with_a_known_head_is_passed_on_as_the_first_one_was() -> None:
    bodies = [b"one", b"two", b"another length", b""]
    left = list(bodies)

    def replica(wire: Wire) -> None:
        body = left.pop(0)
        wire.protocol.data_received(ANSWER % (len(body), body))

    stage = Stage(replica)
    for body in bodies:
        stage.client.written.clear()
        await stage.play(ASKED % (2, b"{}"), [])
        assert bytes(stage.client.written) == ANSWER % (len(body), body)
    assert len(stage.wires) == 1
    await stage.leave()


async def test_heads_that_never_come_again_are_hardly_remembered_until_they_do() -> None:
    seen = Seen()
    asked = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nX-Trace: %d\r\nContent-Length: 3\r\n\r\n%03d"
    kept = []
    for number in range(3 * SELDOM):
        await seen.ask(asked % (number, number))
        kept.append(seen.front._known is not None)
    assert kept == [parsed <= TRIES or parsed % SELDOM == 0 for parsed in range(1, 3 * SELDOM + 1)]
    # From here on they are all alike, and as right as before.
    for number in range(3 * SELDOM, 5 * SELDOM):
        await seen.ask(asked % (7, number))
    assert seen.front._known is not None
    await seen.ask(asked % (7, 998))
    await seen.ask(asked % (8, 999))
    assert [request.body for request in seen.requests] == [
        b"%03d" % number for number in (*range(5 * SELDOM), 998, 999)
    ]
    told = [*range(3 * SELDOM), *[7] * (2 * SELDOM + 1), 8]
    assert [request.lines for request in seen.requests] == [b"X-Trace: %d\r\n" % number for number in told]
    assert seen.front._known is not None  # the one that differs is no habit
    assert seen.door.held_bytes == 0


async def test_a_replica_whose_answers_all_have_another_head_is_passed_on_the_same() -> None:
    answer = b"HTTP/1.1 200 OK\r\nX-Trace: %d\r\ncontent-length: 2\r\n\r\n{}"
    traces = [*range(2 * TRIES), *[7] * (2 * SELDOM), 8]
    left = [answer % trace for trace in traces]
    stage = Stage(lambda wire: wire.protocol.data_received(left.pop(0)))
    kept = []
    for trace in traces:
        stage.client.written.clear()
        await stage.play(ASKED % (2, b"{}"), [])
        assert bytes(stage.client.written) == answer % trace
        kept.append(stage.pool.known is not None)
    assert kept[TRIES : 2 * TRIES] == [False] * TRIES
    assert kept[-1]
    assert stage.pool.unknown == 1
    assert len(stage.wires) == 1
    await stage.leave()


async def test_the_answer_to_head_has_no_body_whatever_was_known() -> None:
    def replica(wire: Wire) -> None:
        wire.protocol.data_received(ANSWER % (2, b"{}" if b"POST" in wire.written else b""))

    stage = Stage(replica)
    await stage.play(ASKED % (2, b"{}"), [])
    stage.client.written.clear()
    stage.wires[0].written.clear()
    await stage.play(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", [])
    assert bytes(stage.client.written) == ANSWER % (2, b"")
    await stage.leave()


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"5\r\ndata:\r\n", b"1\r\n\n\r\n", b"10\r\n0123456789abcdef\r\n", b"2\r\n\r\n\r\n"]


@pytest.mark.parametrize("cut", range(12))
async def test_chunks_are_passed_on_as_they_come_wherever_packets_end(cut: int) -> None:
    """A packet that is a chunk is one only where a chunk may begin."""
    told = b"".join(EVENTS)
    parts = [CHUNKED, told[:cut], *_split(told[cut:]), b"0\r\n\r\n"]
    stage = Stage(lambda _: None)
    stage.front.data_received(ASKED % (2, b"{}"))
    await until(lambda: bool(stage.wires), "it is sent")
    for part in parts:
        stage.wires[0].protocol.data_received(part)
    await stage.settle()
    said = bytes(stage.client.written).partition(b"\r\n\r\n")[2]
    assert _joined(said) == b"data:\n0123456789abcdef\r\n"
    await stage.leave()


def _split(data: bytes) -> list[bytes]:
    """Into what looks like chunks, whatever it is."""
    found = []
    while data:
        size = data.find(b"\r\n", data.find(b"\r\n") + 2) + 2
        found.append(data[: size or len(data)])
        data = data[size or len(data) :]
    return found


def _joined(chunked: bytes) -> bytes:
    body = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        body += rest[: int(size, 16)]
        chunked = rest[int(size, 16) + 2 :]
        if not int(size, 16):
            break
    return body


async def test_what_comes_before_a_final_answer_is_not_taken_for_its_head() -> None:
    final = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in (b"AAAA", b"BBBBBBB")]
    left = [b"HTTP/1.1 103 Early Hints\r\nContent-Length: %d\r\n\r\n%b" % (len(each), each) for each in final]
    stage = Stage(lambda wire: wire.protocol.data_received(left.pop(0)))
    for each in final:
        stage.client.written.clear()
        await stage.play(ASKED % (2, b"{}"), [])
        assert bytes(stage.client.written) == each
    await stage.leave()


async def test_a_longer_length_makes_no_head_longer_than_it_may_be() -> None:
    asked = b"POST / HTTP/1.1\r\nHost: x\r\nX: %b\r\nContent-Length: %d\r\n\r\n%b"
    seen = Seen()
    short = len(b"/HostxXContent-Length1")
    seen.door.limits = replace(LIMITS, header_bytes=1024)
    pad = b"y" * (1024 - short)
    await seen.ask(asked % (pad, 1, b"1"))
    await seen.ask(asked % (pad, 10, b"1" * 10))
    assert len(seen.requests) == 1
    assert b"HTTP/1.1 431 " in seen.client.written
