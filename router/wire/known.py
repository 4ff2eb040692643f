"""Heads that were met before: what was parsed once need not be parsed again.

On a kept connection a client says the same before each body, and so does a replica within a second; only the length
differs. Such a head is told by its bytes, every one of them but the digits of that length, and it counts only where
just the body that it announces came with it. So nothing is taken for a message here that the parser, which sees all
others, has not taken for one before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.wire.front import Limits
    from router.wire.http import Head, Request
    from router.wire.keys import Keys

# Longer ones are not kept: each connection of a client keeps its last one.
LONGEST: Final = 2048
# A length that is written as all write it: what `%d` would write.
MOST_DIGITS: Final = 12
# After so many heads in a row that were parsed, none of which had come again, only one in some is remembered: they have
# ids in them, or dates, and to remember one costs as much as to parse it.
TRIES: Final = 8
SELDOM: Final = 64
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (0|[1-9][0-9]{0,%d})\r\n" % (MOST_DIGITS - 1), re.IGNORECASE)
# The one before a final answer may be of another kind (RFC 9110 15.2).
_FINAL: Final = b"HTTP/1.1 200 "


def counted(size: int, base: int) -> int:
    """What a number in so many bytes counts, where these are the number's own digits and what it counts. It is for the
    caller to see that they are: of a few sizes there is no such number."""
    digits, bound = 1, base
    while size - digits >= bound:
        digits, bound = digits + 1, bound * base
    return size - digits


def worth_keeping(parsed: int) -> bool:
    """Whether a head may come again where so many in a row, this one among them, were not known."""
    return parsed <= TRIES or parsed % SELDOM == 0


class Known:
    """What stands before and behind the length's digits."""

    __slots__ = ("_after", "_before", "_size")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._size = len(before) + len(after)

    def body_at(self, data: bytes) -> int:
        """Where the body begins where `data` is this head and all of the body that it announces, no more; or -1."""
        before = self._before
        if not data.startswith(before):
            return -1
        length = counted(len(data) - self._size, 10)
        told = b"%d%b" % (length, self._after)
        start = len(before)
        at = start + len(told)
        return at if at + length == len(data) and data[start:at] == told else -1


def _parts(data: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and behind the digits of the length of `data`, where that is one head and its body."""
    end = data.find(b"\r\n\r\n", 0, LONGEST)
    found = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
    return None if found is None else (data[: found.start(1)], data[found.end(1) : end + 4])


class KnownRequest(Known):
    """Of a client's request, as it was judged by these limits and keys."""

    __slots__ = ("_keys", "_limits", "_request")

    def __init__(self, before: bytes, after: bytes, request: Request, limits: Limits, keys: Keys | None) -> None:
        super().__init__(before, after)
        self._request = request
        self._limits = limits
        self._keys = keys

    def holds(self, limits: Limits, keys: Keys | None) -> bool:
        """Whether it would be judged alike now."""
        return self._limits is limits and self._keys is keys

    def request(self, body: bytes) -> Request:
        """The same again with another body."""
        return self._request.like(body=body)


class KnownAnswer(Known):
    """Of a replica's answer."""

    __slots__ = ("_head", "_lines_after", "_lines_before")

    def __init__(self, before: bytes, after: bytes, head: Head, lines_before: bytes, lines_after: bytes) -> None:
        super().__init__(before, after)
        self._head = head
        self._lines_before = lines_before
        self._lines_after = lines_after

    def head(self, length: int) -> Head:
        """The same again for a body of `length` bytes."""
        return self._head.like(b"%b%d%b" % (self._lines_before, length, self._lines_after))


def known_request(data: bytes, request: Request, limits: Limits, keys: Keys | None) -> KnownRequest | None:
    """`data`: what `request` was parsed from, from its first byte on; None where it is not worth remembering."""
    parts = _parts(data)
    if parts is None:
        return None
    known = KnownRequest(*parts, request.like(body=b""), limits, keys)
    return known if known.body_at(data) >= 0 else None


def known_answer(data: bytes, head: Head) -> KnownAnswer | None:
    """`data`: what an answer with this head was parsed from, likewise."""
    parts = _parts(data)
    found = _LENGTH.search(b"\r\n" + head.lines)
    if parts is None or found is None or not data.startswith(_FINAL):
        return None
    # Two bytes were put before the lines, for the first of them to be found like the others.
    known = KnownAnswer(*parts, head, head.lines[: found.start(1) - 2], head.lines[found.end(1) - 2 :])
    return known if known.body_at(data) >= 0 else None
