"""A stream's events differ in their text and, token after token, in nothing else: such a one need not be parsed.

What stands around the text is taken from an event that was parsed, and proven there: with another text put between, it
parses into the same event with that text.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_DATA: Final = b"data: "
# How an event ends that engines send as a piece of its own.
_END: Final = b"\n\n"
# What its text is called, in a chat's event and in a completion's.
_NAMES: Final = (("content", b'"content":"'), ("text", b'"text":"'))
# As numbers: to look for bytes in bytes raises and drops an exception first.
_QUOTE: Final = 0x22
_ESCAPE: Final = 0x5C
# What tokens say, by their bytes: most of them come again, and to look one up is cheaper than to read it.
_TEXTS: Final[dict[bytes, str]] = {}
_MOST_TEXTS: Final = 4096
_LONGEST_TEXT: Final = 16
# The inside of a string of JSON.
_INSIDE: Final = re.compile(rb'(?:[^"\\]|\\.)*')


class Likeness:
    """What stands before and behind the text in the line of an event that adds but text."""

    __slots__ = ("_after", "_before", "_whole_after")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._whole_after = after + _END

    def text(self, line: bytes) -> str | None:
        """The text of an event that is alike in all else; None of any other, and of what is no JSON."""
        return self._between(line, self._after)

    def text_of(self, piece: bytes) -> str | None:
        """Likewise, of a piece of a stream that is one event and the end of it."""
        return self._between(piece, self._whole_after)

    def _between(self, data: bytes, after: bytes) -> str | None:
        begin, end = len(self._before), len(data) - len(after)
        if begin > end or not data.startswith(self._before) or not data.endswith(after):
            return None
        inside = data[begin:end]
        text = _TEXTS.get(inside)
        if text is None:
            text = _string(inside)
            if text is not None and len(inside) <= _LONGEST_TEXT:
                if len(_TEXTS) >= _MOST_TEXTS:
                    _TEXTS.clear()
                _TEXTS[inside] = text
        return text


def _string(inside: bytes) -> str | None:
    """The string of JSON that has this between its quotes; None where that is none."""
    try:
        if _QUOTE not in inside and _ESCAPE not in inside:
            text = inside.decode()
            if text.isprintable():
                return text
        value: Any = orjson.loads(b'"%b"' % inside)
    except (UnicodeDecodeError, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, str) else None


def likeness(line: bytes, event: dict[str, Any]) -> Likeness | None:
    """Of an event and the line that it was parsed from; None where it does more than add text."""
    choices = event.get("choices")
    if "error" in event or event.get("usage") is not None or not isinstance(choices, list) or len(choices) != 1:
        return None
    for name, key in _NAMES:
        at = line.find(key) + len(key)
        place = _place(choices[0], name)
        if at < len(key) or place is None or not line.startswith(_DATA):
            continue
        found = _INSIDE.match(line, at)
        assert found is not None
        before, after, text = line[:at], line[found.end() :], place[name]
        other = "b" if text == "a" else "a"
        try:
            probe: Any = orjson.loads(b"".join((before[len(_DATA) :], other.encode(), after)))
        except orjson.JSONDecodeError:
            return None
        changed = _place(probe["choices"][0], name)
        if changed is None or changed[name] != other:
            return None
        changed[name] = text
        return Likeness(before, after) if probe == event else None
    return None


def _place(choice: object, name: str) -> dict[str, Any] | None:
    """Where the text is, in a choice that tells nothing else."""
    if not isinstance(choice, dict) or choice.get("index", 0) != 0 or isinstance(choice.get("finish_reason"), str):
        return None
    delta = choice.get("delta")
    if choice.get("token_ids") is not None or (name == "text") == isinstance(delta, dict):
        return None
    place: dict[str, Any] = delta if isinstance(delta, dict) else choice
    told = [place.get(other) for other in ("tool_calls", "reasoning", "reasoning_content")]
    return None if "role" in place or any(told) or not isinstance(place.get(name), str) else place
