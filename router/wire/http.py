"""HTTP/1.1 messages as this router sees them, and what may cross it (RFC 9110, RFC 9112)."""

from __future__ import annotations

from dataclasses import dataclass
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

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    @property
    def bodiless(self) -> bool:
        """RFC 9112 6.3: these statuses end with their headers whatever the headers say."""
        return self.status in (204, 304) or self.status < 200


def end_to_end(headers: Headers) -> Headers:
    """The headers that may cross the router: neither hop-by-hop, nor named by Connection, nor our own."""
    dropped: frozenset[bytes] | set[bytes] = HOP_BY_HOP
    for name, value in headers:
        if name.lower() == b"connection":
            named = {token.strip().lower() for token in value.split(b",")}
            dropped = dropped | (named - {b"content-length", b"host"})
    return [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in dropped and not lower.startswith(OWN_PREFIX)
    ]


def request_head(
    request: Request, length: int, authority: bytes, base_path: bytes, added: Headers | None = None
) -> bytes:
    """The request's head for a replica: same method, target and headers and those `added`, this hop's own framing of
    `length` bytes."""
    lines = [request.method, b" ", base_path, request.target, b" HTTP/1.1\r\nHost: ", authority, b"\r\n"]
    for name, value in (*end_to_end(request.headers), *(added or ())):
        if name.lower() not in (b"host", b"content-length"):
            lines += (name, b": ", value, b"\r\n")
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"Content-Length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_head(head: Head, extra: Headers, *, chunked: bool, close: bool) -> bytes:
    """An answer's head for the client. `chunked`: the body that follows is framed in chunks by this hop."""
    lines = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    for name, value in end_to_end(head.headers):
        # A length beside chunks is a smuggler's tool (RFC 9112 6.3); the chunks win.
        if not ((chunked or head.status == 204) and name.lower() == b"content-length"):
            lines += (name, b": ", value, b"\r\n")
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    if close:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
