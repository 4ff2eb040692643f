"""Byte sequences near HTTP: whole messages, wounded ones, and soup of what parsers stumble over."""

from __future__ import annotations

from hypothesis import strategies as st

LINE_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r\n")
SPOILERS = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b",",
        b";",
        b"\xff",
        b"\x0b",
        b"\x7f",
        b"\xef\xbb\xbf",
        b"\r\n\r\n",
    ),
    *(b"\r\n folded", b"0\r\n\r\n", b"f" * 17, b"-1", b"+5", b"0x5", b"5, 5", b"_", b"#", b"\x85", b"%00", b'"', b"{}"),
    b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /smuggled HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n"),
    *(b"Content-Length : 5\r\n", b"Content-Length\t: 5\r\n", b" Transfer-Encoding: chunked\r\n", b"X\r\n", b": x\r\n"),
)
METHODS = st.sampled_from([b"GET", b"POST", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE", b"BREW", b"get"])
TARGETS = st.sampled_from(
    [
        b"/",
        b"/v1/completions",
        b"/a?b=c%20d",
        b"*",
        b"http://x/abs?q",
        b"https://x",
        b"http://x?q",
        b"x:443",
        b"//a",
        b"/\xc3",
    ]
)
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 "])
FIELDS = st.sampled_from(
    [
        *(b"Host: x", b"Accept: */*", b"X-A: b", b"X-A:", b"X-Empty: \t ", b"X-High: caf\xe9", b"Expect: 100-continue"),
        *(
            b"Connection: close",
            b"Connection: keep-alive",
            b"Connection: X-A, te",
            b"Connection: Upgrade",
            b"Upgrade: h2c",
        ),
        *(
            b"Content-Length: 0",
            b"Content-Length: 3",
            b"Content-Length: 03",
            b"Content-Length: 3, 3",
            b"Content-Length:",
        ),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"),
        *(
            b"Transfer-Encoding: \x0bchunked",
            b"Transfer-Encoding:chunked",
            b"transfer-encoding: CHUNKED",
            b"TE: trailers",
        ),
        *(b"Trailer: X-T", b"Proxy-Authorization: b", b"X-Warmroute-Replica: me", b"Keep-Alive: timeout=5", b"Te : x"),
        *(b"Content_Length: 5", b"X:y:z", b"(bad): x", b"Host : y", b" folded", b"", b"X-A\0: b", b"X-A: b\0c"),
    ]
)
BODIES = st.one_of(st.sampled_from([b"", b"abc", b'{"model":"m","prompt":"x"}']), st.binary(max_size=40))
EXTENSIONS = st.sampled_from([b"", b"", b"", b";a=b", b';a="\\""', b" ;a", b";", b";\n", b" "])
TRAILERS = st.sampled_from([b"", b"", b"X-T: 1\r\n", b"Content-Length: 5\r\n", b"bad\r\n", b"X: \n\r\n"])


@st.composite
def chunked(draw: st.DrawFn, bodies: st.SearchStrategy[bytes] = BODIES) -> bytes:
    """A body in chunks."""
    parts = [part for part in draw(st.lists(bodies, max_size=3)) if part]
    said = [b"%x%s\r\n%s\r\n" % (len(part), draw(EXTENSIONS), part) for part in parts]
    return b"".join(said) + draw(st.sampled_from([b"0", b"0", b"000", b"0;x"])) + b"\r\n" + draw(TRAILERS) + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request, most often a valid one."""
    end = draw(st.sampled_from(LINE_ENDS)) if draw(st.integers(0, 9)) == 0 else b"\r\n"
    method, target, version = draw(METHODS), draw(TARGETS), draw(VERSIONS)
    fields = draw(st.lists(FIELDS, max_size=3))
    if draw(st.integers(0, 7)):
        fields.append(b"Host: x")
    match draw(st.integers(0, 3)):
        case 0:
            body = b""
        case 1:
            body = draw(chunked())
            fields.append(b"Transfer-Encoding: chunked")
        case _:
            body = draw(BODIES)
            fields.append(b"Content-Length: %d" % len(body))
    return end.join([b" ".join((method, target, version)), *fields, b"", b""]) + body


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """An answer, most often a valid one."""
    end = draw(st.sampled_from(LINE_ENDS)) if draw(st.integers(0, 9)) == 0 else b"\r\n"
    interim = draw(
        st.sampled_from([b""] * 8 + [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"])
    )
    line = draw(
        st.sampled_from(
            [b"HTTP/1.1 200 OK"] * 8
            + [
                b"HTTP/1.1 200",
                b"HTTP/1.1 200 ",
                b"HTTP/1.0 200 OK",
                b"HTTP/1.1 204 No",
                b"HTTP/1.1 304 Not",
                b"HTTP/1.1 500 E",
            ]
            + [
                b"HTTP/1.1 101 S",
                b"HTTP/1.1 999 X",
                b"HTTP/1.1 42 X",
                b"HTTP/2 200 OK",
                b"HTTP/1.1 200 caf\xe9",
                b"ICY 200 OK",
            ]
        )
    )
    fields = draw(st.lists(FIELDS, max_size=3))
    fields.append(draw(st.sampled_from([b"Content-Type: application/json", b"Content-Type: text/event-stream"])))
    events = st.sampled_from([b'data: {"choices":[]}\n\n', b": c\n\n", b"data: [DONE]\n\n", b"da"])
    match draw(st.integers(0, 3)):
        case 0:
            body = draw(BODIES)
        case 1:
            body = draw(chunked(events))
            fields.append(b"Transfer-Encoding: chunked")
        case _:
            body = draw(BODIES)
            fields.append(b"Content-Length: %d" % len(body))
    return interim + end.join([line, *fields, b"", b""]) + body


def sequences(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Up to three messages in a row, wounded in up to three places; or soup."""
    wounds = st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 3), st.sampled_from(SPOILERS), st.integers(0, 255)), max_size=3
    )
    whole = st.lists(messages, min_size=1, max_size=3).map(b"".join)
    soup = st.lists(st.one_of(st.sampled_from(SPOILERS), messages, st.binary(max_size=8)), max_size=6).map(b"".join)
    return st.one_of(whole, st.builds(_wounded, whole, wounds), st.builds(_wounded, whole, wounds), soup)


def _wounded(data: bytes, wounds: list[tuple[int, int, bytes, int]]) -> bytes:
    for place, kind, spoiler, value in wounds:
        at = place % (len(data) + 1)
        match kind:
            case 0:
                data = data[:at] + spoiler + data[at:]
            case 1:
                data = data[:at] + bytes([value]) + data[at + 1 :]
            case 2:
                data = data[:at] + data[at + 1 + value % 6 :]
            case _:
                data = data[:at] + data[at : at + value % 30] + data[at:]
    return data


CUTS = st.lists(st.integers(0, 2000), max_size=3)
