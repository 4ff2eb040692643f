"""What an answer says in passing: its text, its tokens, its usage. These watch; they never touch the bytes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec
import orjson

from router.wire.likeness import Likeness, likeness
from router.wire.whole import Whole

# A line of an event stream longer than this is passed on but not read (a single logprobs line may be megabytes).
MAX_LINE_BYTES: Final = 1024 * 1024
# The most of a whole JSON answer that is kept for reading at its end.
MAX_JSON_BYTES: Final = 1024 * 1024
# Of an answer that is vectors so much of the end is kept; its usage takes some 150 bytes.
USAGE_BYTES: Final = 1024
# An answer's text beyond this is no longer gathered: its blocks will not be known to the index.
MAX_TEXT_CHARS: Final = 1024 * 1024
MAX_TOKEN_IDS: Final = 128 * 1024
# A stream's events, save those that are like one before, are read so many at a time: one by one each would cost twice
# as much. The rest is read at its end.
PIECES_AT_ONCE: Final = 16
BYTES_AT_ONCE: Final = 16 * 1024
# Of so many events that were read together the last one shows what they have in common; so often that is looked for.
LIKELY: Final = 4
LIKENESSES: Final = 8
# So many pieces of an answer's text become one string.
LOOSE_PIECES: Final = 64
# A first chunk that names the role is a few hundred bytes; what is longer than this is an answer.
MAX_OPENING_BYTES: Final = 64 * 1024


DONE: Final = b"data: [DONE]\n\n"
ERROR_EVENT: Final = b'data: {"error"'
"""How vLLM begins an event that says, within an answer, that the engine failed."""
# As a number: to look for bytes in bytes raises and drops an exception first.
_LINE_END: Final = 0x0A


def failed_at(piece: bytes) -> int:
    """Where such an event begins in a piece of a stream; -1 where none does, or it blames the client."""
    at = 0
    if not piece.startswith(ERROR_EVENT):
        # Most pieces are one event: nothing stands behind the first line but its end.
        at = piece.find(b"\n" + ERROR_EVENT) + 1 if _LINE_END in piece[:-2] else -1
        if at <= 0:
            return -1
    try:
        event: Any = orjson.loads(piece[at + len(b"data:") :].partition(b"\n")[0])
    except orjson.JSONDecodeError:
        return -1
    error = event.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return at if isinstance(code, int) and code >= 500 else -1


@dataclass(slots=True, init=False)
class Answer:
    """What was learned of one answer. `text` and `token_ids` are None where they are not known exactly. `failed`: an
    error object came in place of, or in the middle of, the answer."""

    text: str | None
    token_ids: list[int] | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    failed: bool

    def __init__(
        self,
        text: str | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        failed: bool = False,
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens
        self.failed = failed


class FirstEvent:
    """Tells when an event stream's first event begins.

    Comments only keep the connection alive; either may be split over pieces, or share one.
    """

    __slots__ = ("_line",)

    def __init__(self) -> None:
        self._line = b""  # what is known of the start of the current line

    def by(self, piece: bytes) -> bool:
        """Whether it has begun within what was given so far."""
        first, *others = piece.split(b"\n")
        self._line = (self._line + first)[:8]
        if self._line.startswith((b"data:", b"event:")):
            return True
        for line in others:
            self._line = line[:8]
            if line.startswith((b"data:", b"event:")):
                return True
        return False


class Verdict(Enum):
    """What a stream begins with."""

    NOTHING = "nothing yet"
    ANSWER = "an answer"
    ERROR = "an error"


class Opening:
    """Tells whether an event stream of chat completions or completions begins with an answer or with an error.

    An engine that could not load a prompt's KV says so in the stream, behind a first chunk that only names the role.
    Nobody has been shown anything by then: the request can still be answered otherwise.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = b""

    def by(self, piece: bytes) -> Verdict:
        """What it begins with, by what was given so far. Not asked again after it has said."""
        *lines, self._lines = (self._lines + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (verdict := _opens_with(line[5:].strip())) is not Verdict.NOTHING:
                return verdict
        return Verdict.ANSWER if len(self._lines) > MAX_OPENING_BYTES else Verdict.NOTHING


def _opens_with(data: bytes) -> Verdict:
    try:
        event: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Verdict.ANSWER
    if not isinstance(event, dict):
        return Verdict.ANSWER
    if event.get("error") is not None:
        return Verdict.ERROR
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return Verdict.ANSWER
    return Verdict.NOTHING if all(map(_only_a_role, choices)) else Verdict.ANSWER


def _only_a_role(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


@dataclass(frozen=True, slots=True)
class Said:
    """What a stream of chat completions or completions has given its client so far.

    `text`: None where it was more than plain text. `events`: those that carried a token or more, up to the last one
    with text; `tokens`: generated up to there, where the engine told. `identity`: by which a client tells that chunks
    are of one answer; `role`: one of them named the role. `ended`: it told why it finished.
    """

    text: str | None = ""
    events: int = 0
    tokens: int | None = None
    prompt_tokens: int | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    role: bool = False
    ended: bool = False


# Members of each chunk that are the same in all chunks of an answer.
_IDENTITY: Final = ("id", "created", "model")
_UNNAMED: Final = object()


# A count as vLLM writes it in `usage`. In an answer's text the quotes are escaped, so it is not found there.
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d+)(?=\D)')
_CACHED_BEGUN: Final = re.compile(rb'"cached_tokens"\s*(?::\s*\d*)?\Z')
_CACHED_NAME: Final = b'"cached_tokens"'


class CachedCount:
    """Puts the true count of cached tokens in the place of one in passing, at the same length.

    The replica that answers a prompt computed elsewhere counts what it fetched as cached. What the client is to be told
    is what was cached where it was computed.
    """

    __slots__ = ("_rest", "tokens")

    def __init__(self) -> None:
        self.tokens: int | None = None
        """The true count; None while it is not known, which changes nothing."""
        self._rest = b""  # the beginning of a count whose end has not come

    def piece(self, piece: bytes) -> bytes:
        """What to pass on now, of all that has come."""
        data = self._rest + piece
        at = _begun_count(data)
        self._rest = data[at:]
        return self._mended(data[:at])

    def rest(self) -> bytes:
        """What is left at the end."""
        rest, self._rest = self._rest, b""
        return rest

    def _mended(self, data: bytes) -> bytes:
        if self.tokens is None or _CACHED_NAME not in data:
            return data
        pieces: list[bytes] = []
        done = 0
        for found in _CACHED.finditer(data):
            start, end = found.span(1)
            told = b"%d" % self.tokens
            if len(told) <= end - start:
                pieces += (data[done:start], told.rjust(end - start))
                done = end
        return b"".join((*pieces, data[done:]))


def _begun_count(data: bytes) -> int:
    """Where a count begins that ends behind `data`; its length, if none does."""
    at = data.rfind(_CACHED_NAME)
    if at >= 0 and _CACHED_BEGUN.match(data, at):
        return at
    quote = data.rfind(b'"', max(0, len(data) - len(_CACHED_NAME)))
    return quote if quote >= 0 and _CACHED_NAME.startswith(data[quote:]) else len(data)


class Watch(ABC):
    """Reads an answer as it passes."""

    __slots__ = ()

    @abstractmethod
    def feed(self, piece: bytes) -> None: ...

    @abstractmethod
    def answer(self) -> Answer:
        """What is known by now."""


def _usage(answer: Answer, usage: object) -> None:
    if not isinstance(usage, dict):
        return
    if (prompt := _count(usage.get("prompt_tokens"))) is not None:
        answer.prompt_tokens = prompt
    if (completion := _count(usage.get("completion_tokens"))) is not None:
        answer.completion_tokens = completion
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and (cached := _count(details.get("cached_tokens"))) is not None:
        answer.cached_tokens = cached


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def _ids(value: object) -> list[int] | None:
    """Token ids, if that is what it is."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in value):
        return None
    return value


# Why an answer ended, as chat completions say it.
_FINISH: Final = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
# Events of /v1/responses that carry what the model generated, but not as plain text.
_OTHER_WORDS: Final = ("response.reasoning", "response.function_call", "response.custom_tool_call", "response.refusal")


def _response(answer: Answer, whole: dict[str, Any]) -> None:
    """What a finished answer of /v1/responses tells beside its text."""
    status, usage = whole.get("status"), whole.get("usage")
    answer.failed = answer.failed or status in ("failed", "cancelled")
    answer.finish_reason = {"completed": "stop", "incomplete": "length"}.get(str(status))
    if isinstance(usage, dict):
        told = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
        _usage(answer, told | {"prompt_tokens_details": usage.get("input_tokens_details")})


def _message_usage(answer: Answer, usage: object) -> None:
    """Usage of /v1/messages, which counts cached tokens apart from the others."""
    if not isinstance(usage, dict):
        return
    cached = _count(usage.get("cache_read_input_tokens"))
    if (computed := _count(usage.get("input_tokens"))) is not None:
        answer.prompt_tokens = computed + (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    if cached is not None:
        answer.cached_tokens = cached
    if (written := _count(usage.get("output_tokens"))) is not None:
        answer.completion_tokens = written


def _only_text(items: object, kind: str) -> str | None:
    """The text of an answer that consists of one text; None for any other."""
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        return None
    content = items[0].get("content")
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        return None
    text = content[0].get("text")
    whole = content[0].get("type") == kind and isinstance(text, str) and len(text) <= MAX_TEXT_CHARS
    return text if whole else None


class EventWatch(Watch):
    """Reads a `text/event-stream` answer of a route that generates text, split anywhere."""

    __slots__ = (
        "_answer",
        "_chars",
        "_done",
        "_events",
        "_fresh",
        "_fresh_bytes",
        "_identity",
        "_ids",
        "_likeness",
        "_loose",
        "_opaque",
        "_rest",
        "_rest_bytes",
        "_role",
        "_skipping",
        "_text",
        "_text_events",
        "_text_tokens",
        "_tries",
    )

    def __init__(self) -> None:
        self._answer = Answer()
        self._fresh: list[bytes] = []  # pieces that have not been read
        self._fresh_bytes = 0
        self._rest: list[bytes] | None = None  # of a line that is not whole yet: to join each piece is quadratic
        self._rest_bytes = 0
        self._skipping = False
        self._text: list[str] = []
        self._loose = 0  # so many of its last strings are single tokens
        self._chars = 0
        self._ids: list[int] | None = None
        self._opaque = False  # something other than plain text was generated, or too much of it
        self._identity: tuple[Any, ...] | None = None
        self._role = False
        self._done = False  # the stream said that it was all
        self._events = 0
        self._text_events = 0  # as many, and told tokens, when text last came
        self._text_tokens: int | None = None
        self._likeness: Likeness | None = None
        self._tries = LIKENESSES

    def feed(self, piece: bytes) -> None:
        known = self._likeness
        if known is not None and (text := known.text_of(piece)) is not None and self._between_lines():
            self._events += 1
            self._piece(text)
            return
        self._fresh.append(piece)
        self._fresh_bytes += len(piece)
        if len(self._fresh) >= PIECES_AT_ONCE or self._fresh_bytes >= BYTES_AT_ONCE:
            self._read()

    def _between_lines(self) -> bool:
        """Whether a line begins with what comes next. All that came before is read then."""
        self._read()
        return self._rest is None and not self._skipping

    def _read(self) -> None:
        """Read what has come since the last time."""
        if not self._fresh:
            return
        lines = b"".join(self._fresh).split(b"\n")
        self._fresh.clear()
        self._fresh_bytes = 0
        rest = lines.pop()
        if lines and self._rest:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest = None
            self._rest_bytes = 0
        if rest:
            if self._rest is None:
                self._rest = [rest]
            else:
                self._rest.append(rest)
            self._rest_bytes += len(rest)
        if lines and self._skipping:
            self._skipping = False
            del lines[0]
        self._lines([line for line in lines if line])
        if self._rest_bytes > MAX_LINE_BYTES:
            self._rest = None
            self._rest_bytes = 0
            self._skipping = self._opaque = True

    def _lines(self, lines: list[bytes]) -> None:
        known = self._likeness
        if known is None:
            self._events_of(lines)
            return
        others: list[bytes] = []
        for line in lines:
            text = known.text(line)
            if text is None:
                others.append(line)
                continue
            if others:
                self._events_of(others)
                others = []
            self._events += 1
            self._piece(text)
        if others:
            self._events_of(others)

    def _events_of(self, lines: list[bytes]) -> None:
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        objects = [data for data in found if data.startswith(b"{")]
        self._done = self._done or b"[DONE]" in found
        try:
            events: list[Any] = orjson.loads(b"[%s]" % b",".join(objects))
        except orjson.JSONDecodeError:
            events = []
        if len(events) != len(objects):
            events = self._one_by_one(objects)
        for event in events:
            if isinstance(event, dict):
                self._chunk(event)
            else:
                self._opaque = True  # they are JSON only together
        if self._tries and len(events) >= LIKELY and len(events) == len(lines) and isinstance(events[-1], dict):
            self._tries -= 1
            self._likeness = likeness(lines[-1], events[-1])

    def _one_by_one(self, objects: list[bytes]) -> list[Any]:
        """Those of them that are JSON."""
        events = []
        for data in objects:
            try:
                events.append(orjson.loads(data))
            except orjson.JSONDecodeError:
                self._opaque = True
        return events

    def _chunk(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._answer.failed = True
        usage = event.get("usage")
        if usage is not None:
            _usage(self._answer, usage)
        choices = event.get("choices")
        if isinstance(choices, list):
            if self._identity is None:
                self._identity = tuple([event.get(name, _UNNAMED) for name in _IDENTITY])
            for choice in choices:
                self._choice(choice)
        elif isinstance(kind := event.get("type"), str):
            self._event(kind, event)

    def _event(self, kind: str, event: dict[str, Any]) -> None:
        """An event of /v1/responses ("response....") or /v1/messages."""
        if kind == "response.output_text.delta":
            self._add(event.get("delta"))
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            whole = event.get("response")
            if isinstance(whole, dict):
                _response(self._answer, whole)
            self._answer.failed = self._answer.failed or kind == "response.failed"
        elif kind == "message_start":
            message = event.get("message")
            _message_usage(self._answer, message.get("usage") if isinstance(message, dict) else None)
        elif kind == "content_block_delta":
            delta = event.get("delta")
            if isinstance(delta, dict) and delta.get("type") == "text_delta":
                self._add(delta.get("text"))
            else:
                self._opaque = True  # thoughts, or a call's arguments
        elif kind == "message_delta":
            delta = event.get("delta")
            if isinstance(delta, dict) and isinstance(reason := delta.get("stop_reason"), str):
                self._answer.finish_reason = _FINISH.get(reason, reason)
            _message_usage(self._answer, event.get("usage"))
        elif kind.startswith(_OTHER_WORDS):
            self._opaque = True

    def _add(self, text: object) -> None:
        if isinstance(text, str) and text:
            self._chars += len(text)
            if self._chars > MAX_TEXT_CHARS:
                self._opaque = True
                self._text = []
            else:
                self._text.append(text)
                self._loose += 1
                if self._loose == LOOSE_PIECES:
                    # A token is a few characters, and a string of its own many bytes.
                    self._text[-LOOSE_PIECES:] = ["".join(self._text[-LOOSE_PIECES:])]
                    self._loose = 0

    def _choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self._opaque = True
            return
        delta = choice.get("delta")
        if isinstance(delta, dict):
            text = delta.get("content")
            if "role" in delta:
                self._role = True
                self._events += bool(text)
            elif text is not None:
                self._events += 1
            if delta.get("tool_calls") or delta.get("reasoning") or delta.get("reasoning_content"):
                self._opaque = True
        else:
            text = choice.get("text")
            self._events += 1
        self._piece(text)
        ids = choice.get("token_ids")
        if ids is not None and (ids := _ids(ids)) is not None:
            if self._ids is None:
                self._ids = ids
            elif len(self._ids) <= MAX_TOKEN_IDS:
                self._ids += ids
        if isinstance(reason := choice.get("finish_reason"), str):
            self._answer.finish_reason = reason

    def _piece(self, text: object) -> None:
        if text:
            self._add(text)
            self._text_events = self._events
            self._text_tokens = self._answer.completion_tokens

    @property
    def whole(self) -> bool:
        """Whether the answer told its end, or its failure."""
        self._read()
        return self._done or self._answer.failed or self._answer.finish_reason is not None

    def answer(self) -> Answer:
        self._read()
        answer = self._answer
        answer.text = None if self._opaque else "".join(self._text)
        answer.token_ids = self._ids if self._ids is not None and len(self._ids) <= MAX_TOKEN_IDS else None
        return answer

    def said(self) -> Said:
        """What the client has been given, if this is where the stream breaks off."""
        answer = self.answer()
        identity = zip(_IDENTITY, self._identity or (), strict=False)
        return Said(
            text=answer.text,
            events=self._text_events,
            tokens=self._text_tokens,
            prompt_tokens=answer.prompt_tokens,
            identity={name: value for name, value in identity if value is not _UNNAMED},
            role=self._role,
            ended=answer.finish_reason is not None,
        )


class JsonWatch(Watch):
    """Reads a whole JSON answer of a route that generates text, once it is there."""

    __slots__ = (
        "_pieces",
        "_size",
    )

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= MAX_JSON_BYTES:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def answer(self) -> Answer:
        body = b"".join(self._pieces)
        return _usual(body) or _any(body)


_decode: Final = msgspec.json.Decoder(Whole).decode


def _usual(body: bytes) -> Answer | None:
    """What an answer of chat completions or completions with one choice says; None for any other. No object is made of
    what nobody asks for, which is most of it."""
    if not body.isascii() or body.find(b'"choices"') < 0:
        return None  # what is passed over may be no UTF-8, and so no JSON; answers of other routes have no choices
    try:
        whole = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    choices = whole.choices
    if len(choices) != 1 or whole.object == "response" or whole.type == "message":
        return None
    answer = Answer(failed=whole.error is not None)
    usage = whole.usage
    if usage is not None:
        answer.prompt_tokens, answer.completion_tokens = _count(usage.prompt_tokens), _count(usage.completion_tokens)
        if (details := usage.prompt_tokens_details) is not None:
            answer.cached_tokens = _count(details.cached_tokens)
    choice = choices[0]
    message = choice.message
    if message is None:
        text = choice.text
    else:
        plain = not (message.tool_calls or message.reasoning or message.reasoning_content)
        text = message.content if plain else None
    _end(answer, text, choice.token_ids, choice.finish_reason)
    return answer


def _any(body: bytes) -> Answer:
    """Likewise, of any answer."""
    answer = Answer()
    try:
        whole: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return answer
    if not isinstance(whole, dict):
        return answer
    answer.failed = whole.get("error") is not None
    _usage(answer, whole.get("usage"))
    if whole.get("object") == "response":
        _response(answer, whole)
        answer.text = _only_text(whole.get("output"), "output_text")
        return answer
    if whole.get("type") == "message":
        _message_usage(answer, whole.get("usage"))
        answer.text = _only_text([whole], "text")
        if isinstance(reason := whole.get("stop_reason"), str):
            answer.finish_reason = _FINISH.get(reason, reason)
        return answer
    choices = whole.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return answer
    choice = choices[0]
    message = choice.get("message")
    if isinstance(message, dict):
        plain = not (message.get("tool_calls") or message.get("reasoning") or message.get("reasoning_content"))
        text = message.get("content") if plain else None
    else:
        text = choice.get("text")
    _end(answer, text, choice.get("token_ids"), choice.get("finish_reason"))
    return answer


def _end(answer: Answer, text: object, ids: object, reason: object) -> None:
    if isinstance(text, str) and len(text) <= MAX_TEXT_CHARS:
        answer.text = text
    if ids is not None:
        answer.token_ids = _ids(ids)
    if isinstance(reason, str):
        answer.finish_reason = reason


class UsageWatch(Watch):
    """Reads but the usage, at the end of a whole JSON answer: the rest is vectors, perhaps megabytes of them."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        self._tail = (self._tail + piece[-USAGE_BYTES:])[-USAGE_BYTES:]

    def answer(self) -> Answer:
        answer = Answer()
        begin = self._tail.rfind(b'"usage"')
        if begin >= 0:
            try:
                # The brace that ends the answer ends this too.
                members: Any = orjson.loads(b"{" + self._tail[begin:])
            except orjson.JSONDecodeError:
                return answer
            _usage(answer, members["usage"])
        return answer
