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


class Request:
    """A whole request: the body has arrived and its framing is gone."""

    __slots__ = (
        "_headers",
        "_packed",
        "body",
        "http11",
        "id",
        "keep_alive",
        "key",
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
        headers: Headers,
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
        self.path = target.partition(b"?")[0].decode("latin-1")
        self._headers: Headers | None = headers
        self._packed = b""
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
        if self._headers is not None:
            return self._headers
        lines = [line.partition(b": ") for line in self._packed.split(b"\r\n") if line]
        return [(name, value) for name, _, value in lines]

    @headers.setter
    def headers(self, headers: Headers) -> None:
        self._headers, self._packed = headers, b""

    def settle(self) -> None:
        """A long answer has begun: the headers, which may never be asked for again, are kept in one piece."""
        if self._headers is not None:
            self._packed = b"\r\n".join([b": ".join(pair) for pair in self._headers])
            self._headers = None

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    def like(
        self, *, method: bytes | None = None, target: bytes | None = None, headers: Headers | None = None
    ) -> Request:
        """Another one of the same client, that differs in this."""
        return Request(
            self.method if method is None else method,
            self.target if target is None else target,
            self.headers if headers is None else headers,
            self.body,
            self.http11,
            self.keep_alive,
            self.upgrade,
            self.key,
            self.id,
            self.rank,
        )


class Head:
    """Status line and headers of a replica's answer."""

    __slots__ = ("codings", "encoded", "headers", "kind", "length", "reason", "status", "tells_id")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
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

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    def drop_id(self) -> None:
        """Take its X-Request-Id out, wherever it stands."""
        self.headers = [pair for pair in self.headers if fate(pair[0]) != REQUEST_ID]
        self.tells_id = False

    @property
    def measured(self) -> bool:
        """Whether it tells the length of its body."""
        return self.length and self.codings is None

    @property
    def bodiless(self) -> bool:
        """RFC 9112 6.3: these statuses end with their headers whatever the headers say."""
        return self.status < 200 or self.status in (204, 304)


def _add_crossing(lines: list[bytes], headers: Headers, last: int) -> None:
    """Add the headers that may cross the router: neither hop-by-hop, nor named by Connection, nor our own. `last`: the
    last fate that crosses here."""
    before, names = len(lines), False
    for name, value in headers:
        what = fate(name)
        if what <= last:
            lines.append(name)
            lines.append(b": ")
            lines.append(value)
            lines.append(b"\r\n")
        elif what == CONNECTION and value not in _NAMES_NONE:
            names = True
    if names:
        del lines[before:]
        _add_crossing(lines, _without_named(headers), last)


def _without_named(headers: Headers) -> Headers:
    """The headers less Connection and what it takes away."""
    named = {b"connection"}
    for name, value in headers:
        if fate(name) == CONNECTION:
            named.update([token.strip().lower() for token in value.split(b",")])
    named -= _NEVER_NAMED
    return [pair for pair in headers if pair[0].lower() not in named]


def request_head(
    request: Request, length: int, authority: bytes, base_path: bytes, added: Headers | None = None
) -> bytes:
    """The request's head for a replica: same method, target and headers and those `added`, this hop's own framing of
    `length` bytes."""
    method = request.method
    lines = [method, b" ", base_path, request.target, b" HTTP/1.1\r\nHost: ", authority, b"\r\n"]
    _add_crossing(lines, request.headers, ENCODING)
    if added:
        for name, value in added:
            lines.extend((name, b": ", value, b"\r\n"))
    if length or method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"Content-Length: %d\r\n\r\n" % length)
    else:
        lines.append(b"\r\n")
    return b"".join(lines)


def response_head(head: Head, extra: Headers, *, chunked: bool, close: bool) -> bytes:
    """An answer's head for the client. `chunked`: the body that follows is framed in chunks by this hop."""
    status = head.status
    lines = [b"HTTP/1.1 200 " if status == 200 else b"HTTP/1.1 %d " % status, head.reason, b"\r\n"]
    # A length beside chunks is a smuggler's tool (RFC 9112 6.3); the chunks win.
    _add_crossing(lines, head.headers, HOST if chunked or status == 204 else LENGTH)
    for name, value in extra:
        lines.extend((name, b": ", value, b"\r\n"))
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    if close:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
