"""HTTP/1.1 messages as this router sees them, and what may cross it (RFC 9110, RFC 9112)."""

from __future__ import annotations

from typing import Final, TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in the spelling they arrived in, in order, repeats kept."""

OWN_PREFIX: Final = b"x-warmroute-"
"""Headers that only the router writes: a client's are dropped, a replica's too."""

# RFC 9110 7.6.1: these speak of one connection, not of the message. Expect is answered by the front itself.
HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


# What a header's name makes of it. Those up to ENCODING cross; HOST and LENGTH are the message's own, and written anew
# by this hop; no hop passes those from CONNECTION on. Plain numbers, since each header of each message is judged.
CROSSES: Final = 0
REQUEST_ID: Final = 1
RANK: Final = 2
TYPE: Final = 3
ENCODING: Final = 4
HOST: Final = 5
LENGTH: Final = 6
CONNECTION: Final = 7
EXPECT: Final = 8
CODING: Final = 9
STAYS: Final = 10

_NAMED: Final = {
    b"x-request-id": REQUEST_ID,
    b"x-data-parallel-rank": RANK,
    b"content-type": TYPE,
    b"content-encoding": ENCODING,
    b"host": HOST,
    b"content-length": LENGTH,
    b"connection": CONNECTION,
    b"expect": EXPECT,
    b"transfer-encoding": CODING,
}
# By names as they are spelled: peers spell few, and looking one up is cheaper than lowering it.
_FATES: Final[dict[bytes, int]] = {}
_MOST_NAMES: Final = 1024
_LONGEST_NAME: Final = 64
# What Connection mostly says, and what it cannot take away.
_NAMES_NONE: Final = (b"keep-alive", b"close", b"Keep-Alive", b"Close")
_NEVER_NAMED: Final = frozenset({b"close", b"content-length", b"host"})
_NO_HEADERS: Final[Headers] = []


def fate(name: bytes) -> int:
    """What becomes of a header of this name, in any spelling: one of the numbers above."""
    known = _FATES.get(name)
    if known is not None:
        return known
    lower = name.lower()
    stays = lower in HOP_BY_HOP or lower.startswith(OWN_PREFIX)
    found = _NAMED.get(lower, STAYS if stays else CROSSES)
    if len(name) <= _LONGEST_NAME:
        if len(_FATES) >= _MOST_NAMES:
            _FATES.clear()
        _FATES[name] = found
    return found


def crossing(headers: Headers, last: int = ENCODING) -> bytes:
    """The lines of the headers that may cross the router: neither hop-by-hop, nor named by Connection, nor our own.
    `last`: the last fate that crosses here."""
    lines, names = [], False
    for name, value in headers:
        what = fate(name)
        if what <= last:
            lines.append(name)
            lines.append(b": ")
            lines.append(value)
            lines.append(b"\r\n")
        elif what == CONNECTION and value not in _NAMES_NONE:
            names = True
    return crossing(_without_named(headers), last) if names else b"".join(lines)


def closes(headers: Headers) -> bool:
    """Whether Connection says that the connection ends with this message."""
    return b"close" in _named(headers)


def _without_named(headers: Headers) -> Headers:
    """The headers less Connection and what it takes away."""
    named = (_named(headers) | {b"connection"}) - _NEVER_NAMED
    return [pair for pair in headers if pair[0].lower() not in named]


def _named(headers: Headers) -> set[bytes]:
    """What Connection says, in lower case."""
    named: set[bytes] = set()
    for name, value in headers:
        if fate(name) == CONNECTION:
            named.update([token.strip().lower() for token in value.split(b",")])
    return named


def as_lines(headers: Headers) -> bytes:
    """Headers of our own, as lines."""
    lines = b""
    for name, value in headers:
        lines = b"%b%b: %b\r\n" % (lines, name, value)
    return lines


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    for name, value in headers:
        if name.lower() == wanted:
            return value
    return None


def _pairs(lines: bytes) -> Headers:
    found = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
    return [(name, value) for name, _, value in found]


def path_of(target: bytes) -> str:
    """A target without its query."""
    return target.partition(b"?")[0].decode("latin-1")


class Request:
    """A whole request: the body has arrived and its framing is gone."""

    __slots__ = (
        "body",
        "http11",
        "id",
        "keep_alive",
        "key",
        "lines",
        "method",
        "path",
        "rank",
        "target",
        "upgrade",
    )

    def __init__(
        self,
        method: bytes,
        target: bytes,
        path: str,
        lines: bytes,
        body: bytes,
        http11: bool,
        keep_alive: bool,
        upgrade: bytes = b"",
        key: str = "",
        id: bytes = b"",
        rank: bytes = b"",
    ) -> None:
        self.method = method
        self.target = target
        self.path = path
        """Of the target, without the query."""
        self.lines = lines
        """Those headers that cross the router, as lines: a long answer's are held in one piece."""
        self.body = body
        self.http11 = http11
        self.keep_alive = keep_alive
        self.upgrade = upgrade
        """The protocol that the client would rather speak, where that is one that can be passed on."""
        self.key = key
        """The name of the client's API key, where keys are asked for."""
        self.id = id
        """The client's X-Request-Id, or one that was made for it."""
        self.rank = rank
        """What its X-data-parallel-rank says."""

    @property
    def headers(self) -> Headers:
        """Those that cross the router."""
        return _pairs(self.lines)

    @headers.setter
    def headers(self, headers: Headers) -> None:
        self.lines = crossing(headers)

    def add(self, more: Headers) -> None:
        """Further headers, for the replica."""
        self.lines += as_lines(more)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header that crosses; `name` in lower case."""
        return _first(self.headers, name)

    def like(
        self,
        *,
        method: bytes | None = None,
        target: bytes | None = None,
        lines: bytes | None = None,
        body: bytes | None = None,
    ) -> Request:
        """Another one of the same client, that differs in this."""
        return Request(
            self.method if method is None else method,
            self.target if target is None else target,
            self.path if target is None else path_of(target),
            self.lines if lines is None else lines,
            self.body if body is None else body,
            self.http11,
            self.keep_alive,
            self.upgrade,
            self.key,
            self.id,
            self.rank,
        )


class Head:
    """Status line and headers of a replica's answer."""

    __slots__ = ("_headers", "codings", "encoded", "kind", "length", "lines", "reason", "status", "tells_id")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        self.status = status
        self.reason = reason
        self._headers: Headers | None = headers
        self.lines = crossing(headers, LENGTH) if headers else b""
        """Those headers that cross the router, as lines."""
        self.length = False
        """Whether its Content-Length was told."""
        self.codings: list[bytes] | None = None
        """Its Transfer-Encodings, in lower case."""
        self.kind = b""
        """Its Content-Type, in lower case."""
        self.encoded = False
        """Whether its body is compressed, or the like."""
        self.tells_id = False
        """Whether it has an X-Request-Id."""
        for name, value in headers:
            what = fate(name)
            if what == CROSSES:
                continue
            if what == LENGTH:
                self.length = True
            elif what == TYPE:
                if not self.kind:
                    self.kind = value.lower()
            elif what == ENCODING:
                self.encoded = True
            elif what == REQUEST_ID:
                self.tells_id = True
            elif what == CODING:
                codings = self.codings
                if codings is None:
                    codings = self.codings = []
                codings.append(value.strip().lower())

    def like(self, lines: bytes) -> Head:
        """One that differs in the value of headers that nothing but a client reads."""
        head = Head(self.status, self.reason, _NO_HEADERS)
        head._headers, head.lines = None, lines
        head.length, head.kind, head.encoded, head.tells_id = self.length, self.kind, self.encoded, self.tells_id
        return head

    @property
    def headers(self) -> Headers:
        return self._headers if self._headers is not None else _pairs(self.lines)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        return _first(self.headers, name)

    def drop_id(self) -> None:
        """Take its X-Request-Id out, wherever it stands."""
        self._headers = [pair for pair in self.headers if fate(pair[0]) != REQUEST_ID]
        self.lines = crossing(self._headers, LENGTH)
        self.tells_id = False

    @property
    def measured(self) -> bool:
        """Whether it tells the length of its body."""
        return self.length and self.codings is None

    @property
    def bodiless(self) -> bool:
        """RFC 9112 6.3: these statuses end with their headers whatever the headers say."""
        return self.status < 200 or self.status in (204, 304)


def request_head(
    request: Request, length: int, authority: bytes, base_path: bytes, added: Headers | None = None
) -> bytes:
    """The request's head for a replica: same method, target and headers and those `added`, this hop's own framing of
    `length` bytes."""
    method = request.method
    lines = request.lines + as_lines(added) if added else request.lines
    if length or method in (b"POST", b"PUT", b"PATCH"):
        return b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%bContent-Length: %d\r\n\r\n" % (
            method,
            base_path,
            request.target,
            authority,
            lines,
            length,
        )
    return b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (method, base_path, request.target, authority, lines)


def response_head(head: Head, extra: bytes, *, chunked: bool, close: bool) -> bytes:
    """An answer's head for the client. `extra`: further lines; `chunked`: the body that follows is framed in chunks by
    this hop."""
    lines = head.lines
    if head.length and (chunked or head.status == 204):
        # A length beside chunks is a smuggler's tool (RFC 9112 6.3); the chunks win.
        lines = crossing(head.headers, HOST)
    framing = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    ends = b"Connection: close\r\n" if close else b""
    return b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n" % (head.status, head.reason, lines, extra, framing, ends)
