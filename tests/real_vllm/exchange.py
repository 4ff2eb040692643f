"""One HTTP exchange with an engine, kept as its bytes."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def text(self) -> str:
        """The body, with what differs from run to run made equal."""
        return _steady(self.body).decode("utf-8", "replace")

    def message(self) -> bytes:
        """Status line, headers and body (its transfer coding undone), with what differs from run to run made equal."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return _steady(f"HTTP/1.1 {self.status} {self.reason}\r\n{head}\r\n".encode() + self.body)


def exchange(
    url: str,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    timeout: float = 120,
) -> Answer:
    """`body`: bytes as they are, None for none, anything else as JSON."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, given | (headers or {}))
        response = connection.getresponse()
        return Answer(response.status, response.reason, response.getheaders(), response.read())
    finally:
        connection.close()


_STEADY = (
    (re.compile(rb"(?m)^date: .*?\r$"), b"date: Thu, 01 Jan 2026 00:00:00 GMT\r"),
    (re.compile(rb"(tcp://\*:)\d{5}"), rb"\g<1>25557"),
    (re.compile(rb'"(created|created_at|completed_at)":\s?\d{10}'), rb'"\1":1767225600'),
    (
        re.compile(rb"(chatcmpl|cmpl|modelperm|resp|msg|generate-tokens|rs|call)([-_])[0-9a-f]{16,32}"),
        rb"\1\g<2>0123456789abcdef",
    ),
)


def _steady(message: bytes) -> bytes:
    for pattern, replacement in _STEADY:
        message = pattern.sub(replacement, message)
    return message
