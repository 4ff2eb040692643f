"""Byte sequences near HTTP: whole messages, wounded ones, and soup of what parsers stumble over.

Hypothesis draws one string of bytes, and each of these is a choice: hundreds of draws for every message would cost a
hundred times what the message costs to play.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

# So many choices make a sequence, and so many sequences an example.
CHOICES = 64
SEQUENCES = 5

LINE_ENDS = (b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r\n")
SPOILERS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"\xff", b"\x0b", b"\x7f", b"\xef\xbb\xbf"),
    *(b"\r\n\r\n", b"\r\n folded", b"0\r\n\r\n", b"f" * 17, b"-1", b"+5", b"0x5", b"5, 5", b"_", b"#", b"\x85", b'"'),
    b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /smuggled HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n"),
    *(b"Content-Length : 5\r\n", b"Content-Length\t: 5\r\n", b" Transfer-Encoding: chunked\r\n", b"X\r\n", b": x\r\n"),
)
METHODS = (*[b"POST"] * 3, b"GET", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE", b"CONNECT", b"BREW", b"get")
TARGETS = (
    *(b"/", b"/v1/completions", b"/a?b=c%20d", b"*", b"http://x/abs?q", b"https://x", b"http://x?q", b"x:443", b"//a"),
    *(b"/\xc3", b"/a#b", b"/\x7f", b"http:///a"),
)
VERSIONS = (*[b"HTTP/1.1"] * 7, b"HTTP/1.0", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 ")
FIELDS = (
    *(b"Host: x", b"Accept: */*", b"X-A: b", b"X-A:", b"X-Empty: \t ", b"X-High: caf\xe9", b"Expect: 100-continue"),
    *(b"Connection: close", b"Connection: keep-alive", b"Connection: X-A, te", b"Connection: Upgrade", b"Upgrade: h2c"),
    *(b"Content-Length: 0", b"Content-Length: 3", b"Content-Length: 03", b"Content-Length: 3, 3", b"Content-Length:"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"),
    *(b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding:chunked", b"transfer-encoding: CHUNKED", b"TE: trailers"),
    *(b"Trailer: X-T", b"Proxy-Authorization: b", b"X-Warmroute-Replica: me", b"Keep-Alive: timeout=5", b"Te : x"),
    *(b"Content_Length: 5", b"X:y:z", b"(bad): x", b"Host : y", b" folded", b"", b"X-A\0: b", b"X-A: b\0c"),
)
BODIES = (b"", b"abc", b'{"model":"m","prompt":"x"}', b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n")
EVENTS = (b'data: {"choices":[]}\n\n', b": c\n\n", b"data: [DONE]\n\n", b"da")
EXTENSIONS = (*[b""] * 6, b";a=b", b';a="\\""', b" ;a", b";", b";\n", b" ", b";a\r\nb")
TRAILERS = (*[b""] * 5, b"X-T: 1\r\n", b"Content-Length: 5\r\n", b"bad\r\n", b"X: \n\r\n", b"X: a\r\n b\r\n")
STATUS_LINES = (
    *[b"HTTP/1.1 200 OK"] * 8,
    *(
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 ",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 204 No",
        b"HTTP/1.1 304 Not",
        b"HTTP/1.1 500 E",
    ),
    *(b"HTTP/1.1 101 S", b"HTTP/1.1 999 X", b"HTTP/1.1 42 X", b"HTTP/2 200 OK", b"HTTP/1.1 200 caf\xe9", b"ICY 200 OK"),
)
INTERIM = (*[b""] * 8, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n")


class Choices:
    """Reads choices from bytes; after their end each is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value % limit

    def wide(self) -> int:
        """A number of two bytes."""
        return self.below(256) * 256 + self.below(256)

    def of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], most: int) -> list[T]:
        return [self.of(values) for _ in range(self.below(most + 1))]

    def body(self) -> bytes:
        return self.of(BODIES) if self.below(4) else bytes(self.below(256) for _ in range(self.below(12)))


def chunked(choices: Choices, bodies: Sequence[bytes]) -> bytes:
    """A body in chunks."""
    parts = [part for part in choices.some(bodies, 3) if part]
    said = [b"%x%s\r\n%s\r\n" % (len(part), choices.of(EXTENSIONS), part) for part in parts]
    return b"".join(said) + choices.of((b"0", b"0", b"000", b"0;x")) + b"\r\n" + choices.of(TRAILERS) + b"\r\n"


def request(choices: Choices) -> bytes:
    """A request, most often a valid one."""
    lines = [b" ".join((choices.of(METHODS), choices.of(TARGETS), choices.of(VERSIONS)))]
    return _framed(choices, lines, [b"Host: x"] if choices.below(8) else [], BODIES)


def answer(choices: Choices) -> bytes:
    """An answer, most often a valid one."""
    kind = choices.of((b"Content-Type: application/json", b"Content-Type: text/event-stream"))
    return choices.of(INTERIM) + _framed(choices, [choices.of(STATUS_LINES)], [kind], EVENTS)


def _framed(choices: Choices, lines: list[bytes], fields: list[bytes], parts: Sequence[bytes]) -> bytes:
    fields += choices.some(FIELDS, 3)
    body = b""
    match choices.below(4):
        case 0:
            body = chunked(choices, parts)
            fields.append(b"Transfer-Encoding: chunked")
        case 1:
            body = choices.body() if lines[0].startswith(b"HTTP") else b""
        case _:
            body = choices.body()
            fields.append(b"Content-Length: %d" % len(body))
    end = choices.of(LINE_ENDS) if choices.below(10) == 9 else b"\r\n"
    return end.join([*lines, *fields, b"", b""]) + body


def sequence(choices: Choices, message: Callable[[Choices], bytes]) -> bytes:
    """Up to three messages in a row, as they are or wounded in up to three places; or soup."""
    kind = choices.below(5)
    if kind == 4:
        return b"".join(choices.of(SPOILERS) if choices.below(3) else message(choices) for _ in range(choices.below(6)))
    data = b"".join(message(choices) for _ in range(choices.of((1, 1, 2, 3))))
    return wounded(choices, data, choices.below(4) if kind > 1 else 0)


def wounded(choices: Choices, data: bytes, times: int) -> bytes:
    for _ in range(times):
        at, value = choices.wide() % (len(data) + 1), choices.below(256)
        match choices.below(4):
            case 0:
                data = data[:at] + choices.of(SPOILERS) + data[at:]
            case 1:
                data = data[:at] + bytes([value]) + data[at + 1 :]
            case 2:
                data = data[:at] + data[at + 1 + value % 6 :]
            case _:
                data = data[:at] + data[at : at + value % 30] + data[at:]
    return data


def repeats(choices: Choices, first: bytes, field: bytes, least: int) -> list[bytes]:
    """Messages whose heads are alike but for the length, as kept connections carry them: at least so many as they are,
    then one that may be wounded. `first`: their first line, `field`: one that they all have."""
    fields = [field, *choices.some(FIELDS, 2)]
    fields.insert(choices.below(len(fields) + 1), choices.of((*[b"Content-Length: %d"] * 4, b"content-length: %d")))
    head = b"\r\n".join([first, *fields, b"", b""])
    bodies = [choices.body() for _ in range(least + 1 + choices.below(2))]
    messages = [head % len(body) + body for body in bodies]
    messages[-1] = wounded(choices, messages[-1], choices.below(3))
    return messages


def cuts(choices: Choices) -> list[int]:
    """Where a sequence is cut into packets."""
    return [choices.wide() for _ in range(choices.below(4))]


DRAWN = st.binary(min_size=CHOICES * SEQUENCES, max_size=CHOICES * SEQUENCES)


def each(drawn: bytes) -> list[Choices]:
    """The choices of an example's sequences."""
    return [Choices(drawn[at : at + CHOICES]) for at in range(0, len(drawn), CHOICES)]
