"""Request bodies whose beginning was read before: only the messages behind it are parsed.

A chat's next request begins with the bytes of the one before. A digest of the body is taken every STEP bytes; the
deepest one that is known leads to the body that had it, and so to the end of that body's last message.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
from xxhash import xxh3_128, xxh3_128_digest

from router.prompt.turns import stand_in

if TYPE_CHECKING:
    from router.prompt.cache import Bounded

STEP: Final = 8192
"""Bytes between two digests of a body."""

_MOST_AT_A_MARK: Final = 8
_MOST_STATES: Final = 4
_LONGEST_REST: Final = 16 * 1024

# No client can know this member's name.
_OURS: Final = f"_{secrets.token_hex(8)}"
_MESSAGES: Final = re.compile(rb'"messages"[ \t\n\r]*:[ \t\n\r]*\[')
_BETWEEN: Final = re.compile(rb"[ \t\n\r]*,?[ \t\n\r]*")
_SPACE: Final = re.compile(rb"[ \t\n\r]*")
_COMMA: Final = 0x2C
_OPENING: Final = 0x7B
_BRACE: Final = 0x7D
_BRACKET: Final = 0x5D
_BEGIN: Final = b'{"' + _OURS.encode() + b'":['
_Spans = msgspec.defstruct("_Spans", [(_OURS, list[msgspec.Raw])])
_SPANS: Final = msgspec.json.Decoder(_Spans)


class State:
    """How a chat's rendering stands at the end of its known messages.

    `base`: the digest of its pieces there (memo.Row). `rest`: the text behind these, which belongs to no piece yet.
    `opening`: a digest of what the template writes first, which may be a date. `inexact`: as in an Ask.
    """

    __slots__ = ("base", "inexact", "opening", "rest")

    def __init__(self, base: bytes, rest: str | bytes, opening: int, inexact: bool = False) -> None:
        self.base = base
        self.rest = rest
        self.opening = opening
        self.inexact = inexact

    def same(self, other: State) -> bool:
        return (
            self.base == other.base
            and self.rest == other.rest
            and self.opening == other.opening
            and self.inexact == other.inexact
        )


class Known:
    """The beginning of a body, up to the end of a message.

    `end`: its length in bytes; `digest` covers those from the last mark on. `head`: the members before the messages.
    `count`: its messages, `short` these with their middle left out (turns.stand_in). `states`: where their rendering
    stands, by all that it depends on but messages. `weight`: bytes, about.
    """

    __slots__ = ("count", "digest", "end", "head", "short", "short_bytes", "states", "weight")

    def __init__(
        self,
        end: int,
        digest: bytes,
        head: dict[str, Any],
        count: int,
        short: list[Any],
        short_bytes: int,
        states: dict[bytes, State],
    ) -> None:
        self.end = end
        self.digest = digest
        self.head = head
        self.count = count
        self.short = short
        self.short_bytes = short_bytes
        self.stand(states)

    def stand(self, states: dict[bytes, State]) -> None:
        """The states of its rendering, in place of those before."""
        weight = 1000 + 2 * self.short_bytes
        for state in states.values():
            weight += 300 + 2 * len(state.rest)
        # At once, and not by what came and went: other threads may do the same.
        self.states, self.weight = states, weight


def marks(body: bytes) -> list[bytes]:
    """Digests of the first STEP bytes, of the first 2 * STEP bytes, and so on."""
    found, so_far, view = [], xxh3_128(), memoryview(body)
    for start in range(0, len(body) - STEP + 1, STEP):
        so_far.update(view[start : start + STEP])
        found.append(so_far.digest())
    return found


class Chat:
    """A chat body. `messages` are those behind `known`; all of them where nothing is known."""

    __slots__ = ("body", "known", "marks", "messages")

    def __init__(self, body: bytes, marks: list[bytes], known: Known | None, messages: list[Any]) -> None:
        self.body = body
        self.marks = marks
        self.known = known
        self.messages = messages


class Bodies:
    """Finds and keeps the beginnings of chat bodies."""

    def __init__(self, kept: Bounded[list[Known]]) -> None:
        self._kept = kept

    def find(self, body: bytes, digests: list[bytes]) -> Known | None:
        """The longest beginning of `body` that is known."""
        for at in range(len(digests) - 1, -1, -1):
            if row := self._kept.get(digests[at]):
                begin = (at + 1) * STEP
                longest, end, digest = None, 0, b""
                for known in row:
                    if known.end > len(body) or (longest is not None and known.end <= longest.end):
                        continue
                    if known.end != end:  # most end alike
                        end = known.end
                        digest = xxh3_128_digest(body[begin:end])
                    if known.digest == digest:
                        longest = known
                if longest is not None:
                    return longest
        return None

    def keep(self, chat: Chat, key: bytes, state: State) -> None:
        """Remember where a chat's rendering stands at the end of its last message."""
        if len(state.rest) > _LONGEST_REST:
            return
        known = chat.known
        if known is not None and not chat.messages:
            self._add_state(chat, known, key, state)
            return
        if (found := _ends(chat)) is None:
            return
        end, head, sizes = found
        mark = end // STEP
        if not 0 < mark <= len(chat.marks):
            return
        # Of a chat with its middle left out, again: what was left out is still even in number.
        short = stand_in([*(known.short if known is not None else ()), *chat.messages])
        weight = sum(sizes[-4:]) + (known.short_bytes if known is not None else sum(sizes[:2]))
        new = Known(
            end=end,
            digest=xxh3_128_digest(chat.body[mark * STEP : end]),
            head=head,
            count=(known.count if known is not None else 0) + len(chat.messages),
            short=short,
            short_bytes=min(weight, len(chat.body)),
            states={key: state},
        )
        self._put(chat.marks[mark - 1], new, known)

    def _add_state(self, chat: Chat, known: Known, key: bytes, state: State) -> None:
        if (before := known.states.get(key)) is not None and before.same(state):
            return
        states = {**known.states, key: state}
        while len(states) > _MOST_STATES:
            del states[next(iter(states))]
        known.stand(states)
        self._put(chat.marks[known.end // STEP - 1], known)

    def _put(self, mark: bytes, new: Known, used: Known | None = None) -> None:
        """Add to what is known at a mark. What was used last stays."""
        row = [new]
        for known in self._kept.get(mark) or ():
            if known is used:
                row.insert(1, known)
            elif known.end != new.end or known.digest != new.digest:
                row.append(known)
        del row[_MOST_AT_A_MARK:]
        weight = 0
        for known in row:
            weight += known.weight
        self._kept.put(mark, row, weight)


def split(body: bytes, known: Known) -> tuple[dict[str, Any], list[Any]] | None:
    """Members and messages of `body` behind `known`; None where it must be read whole.

    Raises orjson.JSONDecodeError.
    """
    begin = _behind(_BETWEEN, body, known.end)
    goes_on = _COMMA in body[known.end : begin]
    members = orjson.loads(_BEGIN + body[begin:])
    messages = members.pop(_OURS, None)
    if not isinstance(messages, list) or goes_on != bool(messages) or "messages" in members:
        return None
    return {**known.head, **members}, messages


def _ends(chat: Chat) -> tuple[int, dict[str, Any], list[int]] | None:
    """Where the last message ends, the members before the messages, and the messages' lengths; None where that can't be
    told for certain."""
    body = chat.body
    if chat.known is not None:
        head, begin = chat.known.head, _behind(_BETWEEN, body, chat.known.end)
    elif (found := _head(body)) is not None:
        head, begin = found
    else:
        return None
    try:
        spans = _SPANS.decode(_BEGIN + body[begin:])
    except msgspec.MsgspecError:
        return None
    raws: list[msgspec.Raw] = getattr(spans, _OURS)
    if len(raws) != len(chat.messages) or not raws:
        return None
    sizes = [memoryview(raw).nbytes for raw in raws]
    at = begin
    for size in sizes:
        at = _behind(_BETWEEN, body, at) + size
    end = _behind(_SPACE, body, at)
    # A message is an object, so that none goes on where this one ends.
    if body[at - 1] != _BRACE or end == len(body) or body[end] != _BRACKET:
        return None
    return at, head, sizes


def _behind(between: re.Pattern[bytes], body: bytes, at: int) -> int:
    """Where what stands between two messages, or behind the last one, ends. Most write a comma, or nothing."""
    if at < len(body):
        if body[at] == _OPENING or body[at] == _BRACKET:
            return at
        if body[at] == _COMMA and between is _BETWEEN and at + 1 < len(body) and body[at + 1] == _OPENING:
            return at + 1
    found = between.match(body, at)
    assert found is not None
    return found.end()


def _head(body: bytes) -> tuple[dict[str, Any], int] | None:
    """The members before the messages, and where the first message begins."""
    found = _MESSAGES.search(body)
    if found is None:
        return None
    try:
        # If this is the name of a member at the top, another name at its place is one too, and the last.
        head = orjson.loads(body[: found.start()] + b'"' + _OURS.encode() + b'":0}')
    except orjson.JSONDecodeError:
        return None
    if not isinstance(head, dict) or head.pop(_OURS, None) != 0:
        return None
    head.pop("messages", None)
    return head, found.end()
