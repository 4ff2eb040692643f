"""HTTP/1.1 read a second time, strictly and with no code of the router's: what a message says if it says one thing.

RFC 9112 without any of its "may also accept": one reading, or none. Written for clearness, not for speed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# Several spaces before the target and the version are let pass: they hide nothing (RFC 9112 3), and the parser does not
# tell of them.
REQUEST_LINE = re.compile(rb"(%s) +([\x21-\x7e]+) +HTTP/1\.([01])" % TOKEN)
# Of an interim answer nothing reaches anybody; of others the reason is judged by REASON.
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
REASON = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
FIELD = re.compile(rb"(%s):[\t ]*([\t\x20-\x7e\x80-\xff]*?)[\t ]*" % TOKEN)
QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
# Extensions that lack a name or a value are let pass within the line, as the parser does: whoever ignores extensions
# reads the same chunk.
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;(?:%s)?(?:=(?:%s|%s)?)?)*(?<!;)" % (TOKEN, TOKEN, QUOTED))
DIGITS = re.compile(rb"[0-9]{1,15}")
# What frames or routes a message may not stand behind it (RFC 9110 6.5.1).
FRAMING = {b"content-length", b"transfer-encoding"}

Fields = list[tuple[bytes, bytes]]


class WrongError(Exception):
    """These bytes are no message with one reading."""


class ShortError(Exception):
    """These bytes are the beginning of one."""


@dataclass(frozen=True)
class Message:
    """`first` is the start line's groups: method, target and minor version, or minor version, status and reason."""

    first: tuple[bytes, bytes, bytes]
    fields: Fields
    body: bytes
    ends: int
    """Where the next message would begin."""
    chunked: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    def tokens(self, name: bytes) -> set[bytes]:
        return {token.strip().lower() for value in self.values(name) for token in value.split(b",")}


def request(data: bytes, at: int = 0) -> Message:
    """The request that begins there. Raises WrongError, or ShortError where it does not end."""
    first, fields, after = _head(data, _start(data, at), REQUEST_LINE)
    message = Message(first, fields, b"", after, False)
    lengths, codings = message.values(b"content-length"), message.values(b"transfer-encoding")
    if codings:
        if lengths or first[2] == b"0" or [coding.lower() for coding in codings] != [b"chunked"]:
            raise WrongError("framing")
        body, ends = _chunks(data, after)
        return Message(first, fields, body, ends, True)
    length = _length(lengths) or 0
    return Message(first, fields, _take(data, after, length), after + length, False)


def response(data: bytes, at: int = 0, *, to_head: bool = False, whole: bool = True) -> Message:
    """The answer that begins there; interim ones are passed over. `whole`: the connection has ended after `data`, so
    that an answer without framing ends with it."""
    while True:
        first, fields, after = _head(data, _start(data, at), STATUS_LINE)
        if not first[1].startswith(b"1"):
            break
        if first[1] == b"101":
            raise WrongError("switching protocols")
        if first[0] == b"0":
            raise WrongError("HTTP/1.0 knows no interim answers")
        at = after
    message = Message(first, fields, b"", after, False)
    lengths, codings = message.values(b"content-length"), message.values(b"transfer-encoding")
    if first[1] >= b"600" or not REASON.fullmatch(first[2]):
        raise WrongError("status line")  # of interim ones nothing reaches anybody
    if codings and (lengths or first[0] == b"0" or [coding.lower() for coding in codings] != [b"chunked"]):
        raise WrongError("framing")
    length = _length(lengths)
    if to_head or first[1] in (b"204", b"304"):
        return message
    if codings:
        body, ends = _chunks(data, after)
        return Message(first, fields, body, ends, True)
    if length is not None:
        return Message(first, fields, _take(data, after, length), after + length, False)
    if not whole:
        raise ShortError
    return Message(first, fields, data[after:], len(data), False)


def _start(data: bytes, at: int) -> int:
    """Where a message begins: empty lines before it say nothing, whatever they are made of."""
    while data[at : at + 1] in (b"\r", b"\n"):
        at += 1
    return at


def _head(data: bytes, at: int, first: re.Pattern[bytes]) -> tuple[tuple[bytes, bytes, bytes], Fields, int]:
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        raise ShortError
    line, *lines = data[at:end].split(b"\r\n")
    start = first.fullmatch(line)
    if start is None:
        raise WrongError(f"start line {line!r}")
    fields = []
    for each in lines:
        field = FIELD.fullmatch(each)
        if field is None:
            raise WrongError(f"field {each!r}")
        fields.append((field[1], field[2]))
    return (start[1], start[2], start[3] or b""), fields, end + 4


def _length(values: list[bytes]) -> int | None:
    if not values:
        return None
    if len(values) > 1 or not DIGITS.fullmatch(values[0]):
        raise WrongError("content-length")
    return int(values[0])


def _take(data: bytes, at: int, length: int) -> bytes:
    if len(data) - at < length:
        raise ShortError
    return data[at : at + length]


def _chunks(data: bytes, at: int) -> tuple[bytes, int]:
    body = b""
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            raise ShortError
        line = CHUNK_LINE.fullmatch(data[at:end])
        if line is None:
            raise WrongError(f"chunk {data[at:end]!r}")
        size, at = int(line[1], 16), end + 2
        if size == 0:
            break
        body += _take(data, at, size)
        if _take(data, at + size, 2) != b"\r\n":
            raise WrongError("chunk's end")
        at += size + 2
    while not data.startswith(b"\r\n", at):
        end = data.find(b"\r\n", at)
        if end < 0:
            raise ShortError
        trailer = FIELD.fullmatch(data[at:end])
        if trailer is None or trailer[1].lower() in FRAMING:
            raise WrongError("trailer")
        at = end + 2
    return body, at + 2
