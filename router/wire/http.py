"""HTTP/1.1 messages as this router sees them, and what may cross it (RFC 9110, RFC 9112)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in the spelling they arrived in, in order, repeats kept."""

OWN_PREFIX = b"x-warmroute-"
"""Headers that only the router writes: a client's are dropped, a replica's too."""

# RFC 9110 7.6.1: these speak of one connection, not of the message. Expect is answered by the front itself.
HOP_BY_HOP = frozenset(
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


@dataclass(slots=True)
class Request:
    """A whole request: the body has arrived and its framing is gone."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes
    http11: bool
    keep_alive: bool
    upgrade: bytes = b""
    """The protocol that the client would rather speak, where that is one that can be passed on."""
    key: str = ""
    """The name of the client's API key, where keys are asked for."""
    id: bytes = b""
    """The client's X-Request-Id, or one that was made for it."""

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None


@dataclass(slots=True)
class Head:
    """Status line and headers of a replica's answer."""

    status: int
    reason: bytes
    headers: Headers
    _named: dict[bytes, bytes] | None = field(default=None, repr=False, compare=False)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        named = self._named
        if named is None:
            # Several are asked for of each answer. The first of equal names stays.
            named = self._named = {key.lower(): value for key, value in reversed(self.headers)}
        return named.get(name)

    def drop(self, name: bytes) -> None:
        """Take a header out, wherever it stands; `name` in lower case."""
        self.headers = [pair for pair in self.headers if pair[0].lower() != name]
        self._named = None

    @property
    def bodiless(self) -> bool:
        """RFC 9112 6.3: these statuses end with their headers whatever the headers say."""
        return self.status in (204, 304) or self.status < 200


class Fate(IntEnum):
    """What a header's name makes of it. Those from HOST on are each hop's own, those from CONNECTION on no hop passes
    on."""

    CROSSES = 0
    REQUEST_ID = 1
    HOST = 2
    LENGTH = 3
    CONNECTION = 4
    EXPECT = 5
    CODING = 6
    STAYS = 7


_NAMED = {
    b"x-request-id": Fate.REQUEST_ID,
    b"host": Fate.HOST,
    b"content-length": Fate.LENGTH,
    b"connection": Fate.CONNECTION,
    b"expect": Fate.EXPECT,
    b"transfer-encoding": Fate.CODING,
}


class _Fates(dict[bytes, Fate]):
    """By the name as it is spelled. Clients spell few names, and looking one up is cheaper than lowering it."""

    def __missing__(self, name: bytes) -> Fate:
        lower = name.lower()
        stays = lower in HOP_BY_HOP or lower.startswith(OWN_PREFIX)
        fate = _NAMED.get(lower, Fate.STAYS if stays else Fate.CROSSES)
        if len(name) <= _LONGEST_NAME:
            if len(self) >= _MOST_NAMES:
                self.clear()
            self[name] = fate
        return fate


FATES = _Fates()
_MOST_NAMES, _LONGEST_NAME = 1024, 64
_HOST, _LENGTH, _CONNECTION = Fate.HOST, Fate.LENGTH, Fate.CONNECTION


def end_to_end(headers: Headers) -> Headers:
    """The headers that may cross the router: neither hop-by-hop, nor named by Connection, nor our own."""
    kept = []
    named: set[bytes] = set()
    for pair in headers:
        fate = FATES[pair[0]]
        if fate <= _LENGTH:
            kept.append(pair)
        elif fate is _CONNECTION:
            named.update(token.strip().lower() for token in pair[1].split(b","))
    named -= _NEVER_NAMED
    return [pair for pair in kept if pair[0].lower() not in named] if named else kept


# What stays here anyway, and what Connection cannot take away.
_NEVER_NAMED = HOP_BY_HOP | {b"close", b"content-length", b"host"}


def request_head(
    request: Request, length: int, authority: bytes, base_path: bytes, added: Headers | None = None
) -> bytes:
    """The request's head for a replica: same method, target and headers and those `added`, this hop's own framing of
    `length` bytes."""
    lines = [request.method, b" ", base_path, request.target, b" HTTP/1.1\r\nHost: ", authority, b"\r\n"]
    for name, value in end_to_end(request.headers):
        if FATES[name] < _HOST:
            lines += (name, b": ", value, b"\r\n")
    for name, value in added or ():
        lines += (name, b": ", value, b"\r\n")
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"Content-Length: %d\r\n\r\n" % length)
    else:
        lines.append(b"\r\n")
    return b"".join(lines)


def response_head(head: Head, extra: Headers, *, chunked: bool, close: bool) -> bytes:
    """An answer's head for the client. `chunked`: the body that follows is framed in chunks by this hop."""
    lines = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    for name, value in end_to_end(head.headers):
        # A length beside chunks is a smuggler's tool (RFC 9112 6.3); the chunks win.
        if not ((chunked or head.status == 204) and FATES[name] is _LENGTH):
            lines += (name, b": ", value, b"\r\n")
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    if close:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
