"""Who may enter: clients' API keys, kept as hashes.

A key is compared by its SHA-256: what an attacker can steer of a digest says nothing of how near his guess was, so the
time of a lookup tells him nothing.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.wire.http import Headers

# What the router answers by itself tells nothing that is worth a key, and probes have none.
OPEN = frozenset({b"/health", b"/ready", b"/metrics"})
# The Anthropic client sends its key under the second name.
_CARRIERS = frozenset({b"authorization", b"x-api-key"})
_HASHED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):(?:sha256:)?([0-9a-f]{64})\Z")


class KeysError(ValueError):
    """A file of keys makes no sense. The message never shows a key."""


class Keys:
    """The keys of a file: one on each line, as it is or as `NAME:SHA256` (64 hex digits); `#` begins a comment."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises KeysError where there is no key at all: nobody could enter."""
        self._names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if (hashed := _HASHED.match(text)) is not None:
                name, digest = hashed[1], bytes.fromhex(hashed[2])
            elif len(text.split()) > 1:
                raise KeysError(f"line {number} is neither a key nor NAME:SHA256")
            else:
                name, digest = f"line {number}", sha256(text.encode()).digest()
            self._names[digest] = name
        if not self._names:
            raise KeysError("it has no key")

    def __len__(self) -> int:
        return len(self._names)

    def admit(self, method: bytes, target: bytes, headers: Headers) -> tuple[str, Headers] | None:
        """None for a request that may not pass; else whose it is, and its headers without the key, which ends here.

        A browser's preflight (OPTIONS) cannot carry a key and passes, as it does at vLLM.
        """
        path = target.partition(b"?")[0]
        if method == b"OPTIONS" or (path in OPEN and method in (b"GET", b"HEAD")):
            return "", headers
        name = None
        for header, value in headers:
            if header.lower() in _CARRIERS and name is None:
                name = self._of(value)
        if name is None:
            return None
        return name, [pair for pair in headers if pair[0].lower() not in _CARRIERS]

    def _of(self, value: bytes) -> str | None:
        scheme, _, rest = value.partition(b" ")
        return self._names.get(sha256(rest.strip() if scheme.lower() == b"bearer" else value).digest())
