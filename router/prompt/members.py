"""Where the members of a JSON body stand, so that bytes can be cut out of it or put in, and every other byte stays."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    start: int  # of the key's quote
    value: int  # where the value begins, or the white space before it
    end: int  # after the value
    comma: int | None  # the comma that follows it, if one does


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    mark: bytes

    def decode(self, body: bytes) -> str:
        return body[len(self.mark) :].decode(self.name, "surrogatepass")

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.name, "surrogatepass")


def codec_of(body: bytes) -> Codec:
    """The encoding that json.loads would detect, with the byte order mark apart."""
    name = json.detect_encoding(body)
    if name == "utf-8-sig":
        return Codec("utf-8", body[:3])
    if name in ("utf-16", "utf-32"):  # detected by their mark, which also tells the byte order
        width = 2 if name == "utf-16" else 4
        order = "le" if body[:1] == b"\xff" else "be"
        return Codec(f"{name}-{order}", body[:width])
    return Codec(name, b"")


# A string without an end runs to the end of the text, and nothing is tried twice: hostile text must not cost more time
# than other text of its length.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}\[\],:]', re.DOTALL)


_NOTHING: Mapping[str, bytes] = {}


def members(text: str, start: int, end: int) -> list[Member]:
    """The members of the object that `text[start:end]` holds, in order; none where it holds anything else."""
    members: list[Member] = []
    depth = 0
    key: re.Match[str] | None = None
    value = 0
    for token in _TOKEN.finditer(text, start, end):
        mark = text[token.start()]
        if mark in "{[":
            if depth == 0 and (mark == "[" or text[start : token.start()].strip(" \t\n\r")):
                return []
            depth += 1
        elif depth == 1 and mark == '"' and key is None:
            key = token
        elif depth == 1 and mark == ":" and not value:
            value = token.end()
        elif depth == 1 and mark in ",}" and key is not None:
            after = token.start()
            while text[after - 1] in " \t\n\r":
                after -= 1
            try:
                name = json.loads(key.group())
            except ValueError:
                return []
            members.append(Member(name, key.start(), value, after, token.start() if mark == "," else None))
            key, value = None, 0
        if mark in "}]":
            depth -= 1
            if depth == 0:
                break
    return members


def edited(body: bytes, changes: Mapping[str, bytes | None], *, where_given: Mapping[str, bytes] = _NOTHING) -> bytes:
    """The same bytes with these members of its top: None takes a member out with one comma, JSON takes the place of a
    value or is added at the end (not those in `where_given`); every other byte untouched. `body` must be an object that
    keeps a member. Raises ValueError for any other."""
    codec = codec_of(body)
    text = codec.decode(body)
    edits: list[tuple[int, int, str]] = []  # from, to, what stands there then
    last: Member | None = None
    there = set()
    for member in members(text, 0, len(text)):
        there.add(member.name)
        if member.name not in changes and member.name not in where_given:
            last = member
        elif (value := changes.get(member.name, where_given.get(member.name))) is not None:
            start = member.end - len(text[member.value : member.end].lstrip())
            edits.append((start, member.end, value.decode()))
            last = member
        else:
            edits.append((member.start, member.end, ""))
            # A last member has no comma of its own: the one that led to it goes.
            comma = member.comma if member.comma is not None or last is None else last.comma
            if comma is not None:
                edits.append((comma, comma + 1, ""))
    if last is None:
        raise ValueError("the body is no object, or nothing of it is left")
    added = "".join(
        f',"{name}":{value.decode()}' for name, value in changes.items() if value is not None and name not in there
    )
    edits.append((last.end, last.end, added))
    pieces: list[str] = []
    done = 0
    for start, end, instead in sorted(set(edits), key=lambda edit: edit[:2]):
        pieces += (text[done:start], instead)
        done = end
    pieces.append(text[done:])
    return codec.encode("".join(pieces))
