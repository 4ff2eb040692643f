"""Whatever bytes a replica answers: the client gets the one answer that a strict second reader finds, or is told."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, note

from tests.fuzz import oracle
from tests.fuzz.conftest import FUZZ, Stagehand
from tests.fuzz.stage import Stage, Wire, pieces
from tests.fuzz.strategies import DRAWN, answer, cuts, each, repeats, sequence

REQUESTS = [
    b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"HEAD /v1/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /v1/x HTTP/1.0\r\n\r\n",
    b"GET /v1/x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]


class Replica:
    """Answers with these bytes, piece by piece, and then ends the connection, or does not."""

    def __init__(self, data: bytes, cuts: list[int], ending: str) -> None:
        self.then(data, cuts, ending)

    def then(self, data: bytes, cuts: list[int], ending: str) -> None:
        """The same for the next request."""
        self._pieces = pieces(data, cuts)
        self._ending = ending

    def __call__(self, wire: Wire) -> None:
        while self._pieces and not wire.closing:
            wire.protocol.data_received(self._pieces.pop(0))
        if wire.closing:
            return
        if self._ending == "end":
            wire.protocol.eof_received()
            wire.end()
        elif self._ending == "reset":
            wire.end(ConnectionResetError())


def read(data: bytes, *, head: bool, ending: str) -> oracle.Message | None:
    """What the answer is; None where it is none, or is cut short."""
    try:
        return oracle.response(data, to_head=head, whole=ending == "end")
    except (oracle.WrongError, oracle.ShortError):
        return None


def check(said: bytes, message: oracle.Message | None, *, head: bool, gone: bool, aborted: bool) -> None:
    """What the client was told, against what the replica said."""
    if message is not None:
        told = oracle.response(said, to_head=head, whole=gone)
        assert (told.first[1], told.body, told.ends) == (message.first[1], message.body, len(said))
        assert not {b"upgrade", b"keep-alive", b"proxy-authenticate"} & {name.lower() for name, _ in told.fields}
        return
    try:
        told = oracle.response(said, to_head=head, whole=gone)
    except oracle.ShortError:
        assert gone, "neither an end nor a break"
        return
    assert told.ends == len(said)
    own = told.first[1] == b"502" and (head or told.body.startswith(b'{"error":'))
    assert own or aborted or b'data: {"error":' in told.body


@pytest.mark.fault("answers that are no HTTP", "silent truncation")
def test_a_client_gets_the_one_answer_or_is_told(stagehand: Stagehand) -> None:
    @FUZZ
    @given(DRAWN)
    def attempt(drawn: bytes) -> None:
        for choices in each(drawn):
            asked, ending = choices.of(REQUESTS), choices.of(("end", "end", "reset", "stay"))
            where = cuts(choices)
            data = sequence(choices, answer)
            note(f"{asked!r} is answered {data!r}, cut at {where}, then: {ending}")
            stagehand.run(functools.partial(_play, data, where, asked, ending))

    attempt()


@pytest.mark.fault("answers that are no HTTP", "silent truncation")
def test_behind_a_head_that_is_known_it_gets_the_same(stagehand: Stagehand) -> None:
    @FUZZ
    @given(DRAWN)
    def attempt(drawn: bytes) -> None:
        for choices in each(drawn):
            ending = choices.of(("end", "end", "reset", "stay"))
            first, *_, data = repeats(choices, b"HTTP/1.1 200 OK", b"Content-Type: application/json", 1)
            where = cuts(choices) if choices.below(3) == 2 else []
            note(f"{first!r}, and then {data!r}, cut at {where}, then: {ending}")
            stagehand.run(functools.partial(_play, data, where, choices.of(REQUESTS), ending, first))

    attempt()


async def _play(data: bytes, where: list[int], asked: bytes, ending: str, first: bytes = b"") -> None:
    """`first`: another request is answered with this before."""
    head = asked.startswith(b"HEAD")
    replica = Replica(first or data, [] if first else where, "stay" if first else ending)
    stage = Stage(replica)
    if first:
        await stage.play(REQUESTS[1], [])
        if stage.busy or stage.client.closing or not stage.pool._idle:
            await stage.leave()
            return
        stage.client.written.clear()
        replica.then(data, where, ending)
    await stage.play(asked, [])
    message = read(data, head=head, ending=ending)
    if ending == "stay" and stage.busy:
        assert message is None
    else:
        assert not stage.busy, "it hangs"
        said = bytes(stage.client.written)
        check(said, message, head=head, gone=stage.client.closing, aborted=stage.client.aborted)
    if stage.pool._idle:
        assert message is not None, "a connection with no whole answer is kept"
        assert not data[message.ends :].strip(b"\r\n"), "a connection with surplus bytes is kept"
    await stage.leave()


async def test_an_answer_with_framing_in_its_trailers_is_none() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: y\r\n%s\r\n\r\n"
    for trailer in (b"Transfer-Encoding: chunked", b"Content-Length: 5"):
        await _play(data % trailer, [], REQUESTS[0], "end")
