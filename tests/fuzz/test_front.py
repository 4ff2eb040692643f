"""Whatever bytes a client sends: a replica sees exactly the requests that a strict second reader finds in them."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from hypothesis import given, note

from tests.fuzz import oracle
from tests.fuzz.conftest import FUZZ, Stagehand
from tests.fuzz.stage import Stage, Wire
from tests.fuzz.strategies import DRAWN, cuts, each, repeats, request, sequence

SERVED = {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"}
# RFC 9112 3.2, RFC 3986 3.2: what an authority may consist of.
TARGET = re.compile(rb"/|\*$|https?://[A-Za-z0-9._~!$&'()*+,;=:@%\[\]-]+([/?]|$)")
ONE_HOP = {
    *(b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}

Seen = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]


def crossing(message: oracle.Message) -> Seen:
    """What of a request is for the replica."""
    method, target, _ = message.first
    if not target.startswith((b"/", b"*")):
        # Of an absolute target, what stands behind the authority.
        path = re.sub(rb"^https?://[^/?]*", b"", target)
        target = path if path.startswith(b"/") else b"/" + path
    named = message.tokens(b"connection")
    fields = [
        (name, value)
        for name, value in message.fields
        if (low := name.lower()) not in ONE_HOP | named | {b"host", b"content-length"}
        and not low.startswith(b"x-warmroute-")
    ]
    return method, target, fields, message.body


def expected(data: bytes) -> tuple[list[Seen], bool]:
    """The requests in these bytes; and whether what follows them must be refused."""
    found: list[Seen] = []
    at = 0
    while True:
        try:
            message = oracle.request(data, at)
        except oracle.ShortError:
            return found, False
        except oracle.WrongError:
            return found, True
        method, target, minor = message.first
        hosts = len(message.values(b"host"))
        if method not in SERVED or hosts > 1 or (hosts == 0 and minor == b"1") or not TARGET.match(target):
            return found, True
        found.append(crossing(message))
        tokens = message.tokens(b"connection")
        stays = (b"close" not in tokens) if minor == b"1" else (b"keep-alive" in tokens and b"close" not in tokens)
        # Of a request with a body, the offer of another protocol is passed over, and the next one may follow.
        offers = b"upgrade" in tokens and message.values(b"upgrade") and not (message.chunked or message.body)
        if not stays or offers:
            return found, False
        at = message.ends


class Replica:
    """Reads what it gets with the strict reader, and answers each whole request."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._read: dict[Wire, int] = {}

    def __call__(self, wire: Wire) -> None:
        at = self._read.get(wire, 0)
        if wire.closing or at == len(wire.written):
            return
        message = oracle.request(bytes(wire.written), at)
        assert not message.chunked
        assert len(message.values(b"host")) == 1
        self._read[wire] = message.ends
        assert message.ends == len(wire.written), "nothing is sent ahead"
        self.seen.append(crossing(message))
        head = message.first[0] == b"HEAD"
        wire.protocol.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + (b"" if head else b"ok"))


def check_answers(said: bytes, seen: list[Seen]) -> int:
    """One answer for each request, in order, and at most one refusal after them; returns its status, or 0."""
    at = 0
    for method, *_ in seen:
        message = oracle.response(said, at, to_head=method == b"HEAD")
        assert message.first[1] == b"200"
        at = message.ends
    if at == len(said):
        return 0
    message = oracle.response(said, at)
    assert message.ends == len(said)
    assert b"close" in message.tokens(b"connection")
    return int(message.first[1])


@pytest.mark.fault("smuggling")
def test_a_replica_sees_what_was_sent_and_nothing_else(stagehand: Stagehand) -> None:
    @FUZZ
    @given(DRAWN)
    def attempt(drawn: bytes) -> None:
        for choices in each(drawn):
            where = cuts(choices)
            data = sequence(choices, request)
            note(f"{data!r}, cut at {where}")
            stagehand.run(functools.partial(_play, data, where))

    attempt()


@pytest.mark.fault("smuggling")
def test_behind_a_head_that_is_known_it_sees_the_same(stagehand: Stagehand) -> None:
    @FUZZ
    @given(DRAWN)
    def attempt(drawn: bytes) -> None:
        for choices in each(drawn):
            first = choices.of((b"POST /v1/x HTTP/1.1", b"POST /v1/x HTTP/1.1", b"PUT * HTTP/1.1", b"GET / HTTP/1.0"))
            messages = repeats(choices, first, b"Host: x", 1)
            where = list(itertools.accumulate(map(len, messages)))
            where += cuts(choices) if choices.below(3) == 2 else []
            data = b"".join(messages)
            note(f"{data!r}, cut at {where}")
            stagehand.run(functools.partial(_play, data, where))

    attempt()


async def _play(data: bytes, where: list[int]) -> None:
    replica = Replica()
    stage = Stage(replica)
    await stage.play(data, where)
    wanted, refused = expected(data)
    assert replica.seen == wanted
    assert not stage.busy, "it hangs"
    status = check_answers(_without_continues(bytes(stage.client.written)), wanted)
    assert status in (400, 431) if refused else status in (0, 400, 431)
    await stage.leave()


def _without_continues(said: bytes) -> bytes:
    """`100 Continue` may come before the body that it is for was seen to be none."""
    return said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


async def test_behind_a_body_an_offer_of_another_protocol_is_passed_over() -> None:
    lines = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    await _play((lines + b"0\r\n\r\n") * 2, [0, 0])
