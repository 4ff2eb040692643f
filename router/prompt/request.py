"""What a request's body says, read for routing only.

The engine is the judge of bodies: whatever can't be read here is still forwarded as it came. So nothing here raises,
and nothing here re-serialises: `without_hand_off` cuts bytes out and leaves every other byte alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

HAND_OFF_KEYS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Members by which a proxy steers KV transfer between engines. Sent by a client they can pin an engine's blocks or end
its process, so the router never passes a client's own ones on."""

_KINDS: dict[str, Literal["chat", "completion"]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}


@dataclass(slots=True)
class Ask:
    """One request, as far as routing needs it. Fields that the body lacks, or has with another type, keep the defaults.

    `kind` "other" has no prompt to look up: it is routed by load. `n` is the number of answers per prompt.
    `max_tokens` is the bound on each answer's tokens (`max_completion_tokens` wins). `hand_off`: the body has a
    top-level member of HAND_OFF_KEYS.
    """

    kind: Literal["chat", "completion", "other"] = "other"
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    n: int = 1
    cache_salt: str | None = None
    hand_off: bool = False
    messages: list[Any] = field(default_factory=list, repr=False)
    prompts: list[str] | list[list[int]] = field(default_factory=list, repr=False)
    tools: list[Any] | None = field(default=None, repr=False)
    documents: list[Any] | None = field(default=None, repr=False)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    chat_template: str | None = field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    truncate_prompt_tokens: int | None = None
    tails: list[str] = field(default_factory=list, repr=False)
    """The last characters of each rendered prompt, which `Reader.tokenize` leaves for `Reader.answer`."""


def read(path: str, body: bytes) -> Ask:
    """Read a request. `path` may carry a query string. Never raises."""
    kind = _KINDS.get(path.partition("?")[0])
    try:
        value = _loads(body)
    except (ValueError, RecursionError):
        # An engine with a deeper stack may still read it, so what mustn't reach it is looked for without one.
        return Ask(hand_off=bool(_hand_off_members(body)))
    if not isinstance(value, dict):
        return Ask()
    ask = Ask(
        model=_typed(value, "model", str),
        stream=value.get("stream") is True,
        hand_off=not HAND_OFF_KEYS.isdisjoint(value),
        cache_salt=_typed(value, "cache_salt", str) or None,
        max_tokens=_count(value, "max_completion_tokens"),
        n=_count(value, "n") or 1,
    )
    if ask.max_tokens is None:
        ask.max_tokens = _count(value, "max_tokens")
    options = value.get("stream_options")
    ask.include_usage = isinstance(options, dict) and options.get("include_usage") is True
    ask.truncate_prompt_tokens = _typed(value, "truncate_prompt_tokens", int)
    if kind == "chat" and isinstance(messages := value.get("messages"), list) and messages:
        ask.kind, ask.messages = kind, messages
        ask.tools = _typed(value, "tools", list)
        ask.documents = _typed(value, "documents", list)
        ask.reasoning_effort = _typed(value, "reasoning_effort", str)
        ask.add_generation_prompt = value.get("add_generation_prompt") is not False
        ask.continue_final_message = value.get("continue_final_message") is True
        ask.add_special_tokens = value.get("add_special_tokens") is True
        ask.chat_template = _typed(value, "chat_template", str)
        ask.chat_template_kwargs = _typed(value, "chat_template_kwargs", dict) or {}
    elif kind == "completion" and (prompts := _prompts(value.get("prompt"))):
        ask.kind, ask.prompts = kind, prompts
        ask.add_special_tokens = value.get("add_special_tokens") is not False
    return ask


def without_hand_off(body: bytes) -> bytes:
    """The same bytes less the top-level members of HAND_OFF_KEYS, each with one comma; every other byte untouched."""
    members = _hand_off_members(body)
    if not members:
        return body
    text, codec, every = members
    cut: list[tuple[int, int]] = []
    comma_of_last_kept: int | None = None
    for member in every:
        if member.name not in HAND_OFF_KEYS:
            comma_of_last_kept = member.comma
            continue
        cut.append((member.start, member.end))
        # A last member has no comma of its own: the one that led to it goes.
        comma = comma_of_last_kept if member.comma is None else member.comma
        if comma is not None:
            cut.append((comma, comma + 1))
    pieces, done = [], 0
    for start, end in sorted(cut):
        pieces.append(text[done:start])
        done = end
    pieces.append(text[done:])
    return codec.encode("".join(pieces))


def _loads(body: bytes) -> Any:
    """As the engine would: starlette hands the bytes to json.loads. orjson is first, being stricter and much faster."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)


def _typed(value: dict[str, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    return found if isinstance(found, kind) and not isinstance(found, bool) else None


def _count(value: dict[str, Any], name: str) -> int | None:
    found = _typed(value, name, int)
    return found if found is not None and found >= 0 else None


def _prompts(prompt: object) -> list[str] | list[list[int]]:
    """A completion's `prompt` ("a", ["a", "b"], [1, 2] or [[1], [2]]) as a list; empty if it is none of these."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        return []
    if isinstance(prompt[0], str):
        return prompt if all(isinstance(p, str) for p in prompt) else []
    if isinstance(prompt[0], list):
        return prompt if all(isinstance(p, list) and _are_ids(p) for p in prompt) else []
    return [prompt] if _are_ids(prompt) else []


def _are_ids(ids: list[Any]) -> bool:
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 32


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    start: int  # of the key's quote
    end: int  # after the value
    comma: int | None  # the comma that follows it, if one does


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    mark: bytes

    def decode(self, body: bytes) -> str:
        return body[len(self.mark) :].decode(self.name, "surrogatepass")

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.name, "surrogatepass")


def _codec(body: bytes) -> _Codec:
    """The encoding that json.loads would detect, with the byte order mark apart."""
    name = json.detect_encoding(body)
    if name == "utf-8-sig":
        return _Codec("utf-8", body[:3])
    if name in ("utf-16", "utf-32"):  # detected by their mark, which also tells the byte order
        width = 2 if name == "utf-16" else 4
        order = "le" if body[:1] == b"\xff" else "be"
        return _Codec(f"{name}-{order}", body[:width])
    return _Codec(name, b"")


# A string without an end runs to the end of the text, and nothing is tried twice: hostile text must not cost more time
# than other text of its length.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}\[\],:]', re.DOTALL)


def _hand_off_members(body: bytes) -> tuple[str, _Codec, list[_Member]] | None:
    """The body's text, encoding and top-level members if one of them is a hand-off; None otherwise.

    Scans without recursion, so that nesting too deep for a parser hides nothing.
    """
    if b"transfer_params" not in body and b"\\u" not in body and b"\0" not in body:
        return None  # neither plainly, nor in escapes, nor in an encoding of wider characters
    codec = _codec(body)
    try:
        text = codec.decode(body)
    except UnicodeDecodeError:
        return None
    members = _members(text)
    return (text, codec, members) if any(m.name in HAND_OFF_KEYS for m in members) else None


def _members(text: str) -> list[_Member]:
    """The members of the object that `text` holds, in order; none where it holds anything else."""
    members: list[_Member] = []
    depth = 0
    key: re.Match[str] | None = None
    for token in _TOKEN.finditer(text):
        mark = text[token.start()]
        if mark in "{[":
            if depth == 0 and (mark == "[" or text[: token.start()].strip(" \t\n\r")):
                return []
            depth += 1
        elif depth == 1 and mark == '"' and key is None:
            key = token
        elif depth == 1 and mark in ",}" and key is not None:
            end = token.start()
            while text[end - 1] in " \t\n\r":
                end -= 1
            try:
                name = json.loads(key.group())
            except ValueError:
                return []
            members.append(_Member(name, key.start(), end, token.start() if mark == "," else None))
            key = None
        if mark in "}]":
            depth -= 1
            if depth == 0:
                break
    return members
