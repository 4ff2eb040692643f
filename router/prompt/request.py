"""What a request's body says, read for routing only.

The engine is the judge of bodies: whatever can't be read here is still forwarded as it came. So nothing here raises,
and nothing here re-serialises: `without_hand_off` cuts bytes out and leaves every other byte alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import msgspec
import orjson

from router.prompt import apis
from router.prompt.bodies import STEP, Chat, Known, split
from router.prompt.members import Codec, codec_of, members

if TYPE_CHECKING:
    from collections.abc import Callable

_CONVERTED: Final[dict[str, Callable[[dict[str, Any]], apis.AsChat]]] = {
    "/v1/responses": apis.responses,
    "/v1/messages": apis.messages,
}

HAND_OFF_KEYS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Members by which a proxy steers KV transfer between engines. Sent by a client they can pin an engine's blocks or end
its process, so the router never passes a client's own ones on."""

CARRIERS: Final = frozenset({"vllm_xargs", "sampling_params", "extra_args", "extra_body"})
"""Members that an engine unfolds into a request's own (vLLM v1/request.py reads kv_transfer_params from extra_args): a
hand-off inside them is one."""

# Members that most bodies have none of: to find that out costs less than to ask for each of them.
_SELDOM: Final = (
    HAND_OFF_KEYS
    | CARRIERS
    | {"cache_salt", "n", "stream_options", "truncate_prompt_tokens", "tools", "documents", "reasoning_effort"}
    | {"add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs"}
)

# Members that are looked for in a body without a prompt to read. To pass over the others costs less than to read them.
_ROUTED_BY: Final = (
    *("model", "stream", "stream_options", "max_completion_tokens", "max_tokens", "n", "cache_salt"),
    *("truncate_prompt_tokens", *HAND_OFF_KEYS, *CARRIERS),
)
_ROUTED: Final = msgspec.json.Decoder(
    TypedDict("_Routed", dict.fromkeys(_ROUTED_BY, Any), total=False)  # type: ignore[operator]
)

_CARRIED: Final = 4  # how deep carriers may lie in one another; an engine unfolds two

# A shorter body is parsed and rendered whole as fast as its beginning is looked up.
_LEAST_KNOWN: Final = 2 * STEP
# Beyond this a digest of the body would take too long for where it is made, on the event loop.
_MOST_KNOWN: Final = 8 * 1024 * 1024

_CHAT: Final = "/v1/chat/completions"

# What most requests have none of. Nobody adds to them.
_NOTHING: Final[list[Any]] = []
_NO_KWARGS: Final[dict[str, Any]] = {}

_KINDS: Final[dict[str, Literal["chat", "completion"]]] = {
    _CHAT: "chat",
    "/v1/completions": "completion",
}


class Ask:
    """One request, as far as routing needs it. Fields that the body lacks, or has with another type, keep the defaults.

    `kind` "other" has no prompt to look up: it is routed by load. `n` is the number of answers per prompt.
    `max_tokens` is the bound on each answer's tokens (`max_completion_tokens` wins). `hand_off`: the body has a
    member of HAND_OFF_KEYS, at its top or in CARRIERS.
    """

    __slots__ = (
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "hand_off",
        "include_usage",
        "inexact",
        "kind",
        "max_tokens",
        "messages",
        "model",
        "n",
        "prompts",
        "reasoning_effort",
        "stream",
        "system_anywhere",
        "tails",
        "thinking_off",
        "tools",
        "truncate_prompt_tokens",
    )

    def __init__(
        self,
        *,
        kind: Literal["chat", "completion", "other"] = "other",
        model: str | None = None,
        stream: bool = False,
        hand_off: bool = False,
        messages: list[Any] | None = None,
        prompts: list[str] | list[list[int]] | None = None,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.kind: Literal["chat", "completion", "other"] = kind
        self.model = model
        self.stream = stream
        self.include_usage = False
        self.max_tokens: int | None = None
        self.n = 1
        self.cache_salt: str | None = None
        self.hand_off = hand_off
        self.messages: list[Any] = _NOTHING if messages is None else messages
        self.prompts: list[str] | list[list[int]] = _NOTHING if prompts is None else prompts
        self.tools = tools
        self.documents = documents
        self.reasoning_effort = reasoning_effort
        self.thinking_off = False
        self.system_anywhere = False
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.add_special_tokens = add_special_tokens
        self.chat_template = chat_template
        self.chat_template_kwargs: dict[str, Any] = _NO_KWARGS if chat_template_kwargs is None else chat_template_kwargs
        self.truncate_prompt_tokens: int | None = None
        self.tails: list[str] = _NOTHING
        """The last characters of each rendered prompt, which `Reader.tokenize` leaves for `Reader.answer`."""
        self.inexact = False
        """Whether blocks have names of our own, from the first image on or, without a chat template, all of them. The
        reader tells."""
        self.chat: Chat | None = None
        """A chat body that may be remembered. If its beginning is known, `messages` are only those behind it until
        `load` is called."""

    def settle(self) -> None:
        """It is not read again: what only that would take goes."""
        self.messages = self.prompts = _NOTHING
        self.tools = self.documents = self.chat = None
        self.chat_template_kwargs = _NO_KWARGS

    def load(self) -> None:
        """Read all messages."""
        if self.chat is not None and self.chat.known is not None:
            self.messages = orjson.loads(self.chat.body)["messages"]
            self.chat = Chat(self.chat.body, self.chat.marks, None, self.messages)


class Beginning:
    """What a body begins with: its digests, and the longest beginning that is known."""

    __slots__ = ("known", "marks")

    def __init__(self, marks: list[bytes], known: Known | None) -> None:
        self.marks = marks
        self.known = known


def can_be_known(path: str, body: bytes) -> bool:
    """Whether a body is of a kind whose beginnings are remembered."""
    return _LEAST_KNOWN <= len(body) <= _MOST_KNOWN and path.partition("?")[0] == _CHAT


def prompted(path: str) -> bool:
    """Whether requests to a path carry a prompt that can be read here."""
    return _has_prompt(path.partition("?")[0])


def _has_prompt(route: str) -> bool:
    return route in _KINDS or route in _CONVERTED or route == "/v1/embeddings"


def read(path: str, body: bytes, beginning: Beginning | None = None) -> Ask:
    """Read a request. `path` may carry a query string. Never raises."""
    route = path.partition("?")[0]
    kind = _KINDS.get(route)
    chat = Chat(body, beginning.marks, beginning.known, []) if beginning is not None else None
    try:
        value = _loads(body, chat) if _has_prompt(route) else _loads_routed(body)
    except (ValueError, RecursionError):
        # An engine with a deeper stack may still read it, so what mustn't reach it is looked for without one.
        return Ask(hand_off=_found_by_scan(body))
    if not isinstance(value, dict):
        return Ask()
    ask = Ask(model=_typed(value, "model", str), stream=value.get("stream") is True)
    ask.max_tokens = _count(value, "max_completion_tokens")
    if ask.max_tokens is None:
        ask.max_tokens = _count(value, "max_tokens")
    seldom = not _SELDOM.isdisjoint(value)
    if seldom:
        ask.hand_off = _hands_off(value)
        ask.cache_salt = _typed(value, "cache_salt", str) or None
        ask.n = _count(value, "n") or 1
        options = value.get("stream_options")
        ask.include_usage = isinstance(options, dict) and options.get("include_usage") is True
        ask.truncate_prompt_tokens = _typed(value, "truncate_prompt_tokens", int)
    messages = chat.messages if chat is not None else value.get("messages")
    if kind == "chat" and isinstance(messages, list) and (messages or (chat is not None and chat.known is not None)):
        ask.kind, ask.messages, ask.chat = kind, messages, chat
        ask.add_special_tokens = False
        if seldom:
            ask.tools = _typed(value, "tools", list)
            ask.documents = _typed(value, "documents", list)
            ask.reasoning_effort = _typed(value, "reasoning_effort", str)
            ask.add_generation_prompt = value.get("add_generation_prompt") is not False
            _how_it_is_rendered(ask, value)
    elif kind == "completion" and not value.get("prompt_embeds") and (prompts := _prompts(value.get("prompt"))):
        ask.kind, ask.prompts = kind, prompts
        ask.add_special_tokens = value.get("add_special_tokens") is not False
    elif route in _CONVERTED:
        _convert(ask, _CONVERTED[route], value)
    elif route == "/v1/embeddings":
        _embeddings(ask, value)
    return ask


def _convert(ask: Ask, as_chat: Callable[[dict[str, Any]], apis.AsChat], value: dict[str, Any]) -> None:
    """Take in a request of another API as the chat that the engine makes of it."""
    try:
        chat = as_chat(value)
    except apis.UnreadableError:
        return
    ask.kind, ask.messages, ask.tools = "chat", chat.messages, chat.tools
    ask.reasoning_effort, ask.thinking_off = chat.reasoning_effort, chat.thinking_off
    ask.system_anywhere = chat.system_anywhere
    ask.continue_final_message = chat.continue_final_message
    ask.add_generation_prompt = not chat.continue_final_message
    ask.add_special_tokens = False
    ask.chat_template_kwargs = _typed(value, "chat_template_kwargs", dict) or _NO_KWARGS
    ask.n = 1
    if ask.max_tokens is None:
        ask.max_tokens = _count(value, "max_output_tokens")


def _embeddings(ask: Ask, value: dict[str, Any]) -> None:
    """Texts, or a chat, of which nothing is generated (vLLM entrypoints/pooling/embed/protocol.py)."""
    given, messages = value.get("input"), value.get("messages")
    if messages is None and isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        messages = given
    if value.get("padding") not in (None, "do_not_pad"):
        return  # only the engine knows with what, and how far
    if prompts := _prompts(given):
        ask.kind, ask.prompts = "completion", prompts
        ask.add_special_tokens = value.get("add_special_tokens") is not False
    elif isinstance(messages, list) and messages:
        ask.kind, ask.messages = "chat", messages
        ask.add_generation_prompt = value.get("add_generation_prompt") is True
        _how_it_is_rendered(ask, value)
    ask.max_tokens, ask.n = 1, 1


def _how_it_is_rendered(ask: Ask, value: dict[str, Any]) -> None:
    """Members that all bodies with a chat have in common."""
    ask.continue_final_message = value.get("continue_final_message") is True
    ask.add_special_tokens = value.get("add_special_tokens") is True
    ask.chat_template = _typed(value, "chat_template", str)
    ask.chat_template_kwargs = _typed(value, "chat_template_kwargs", dict) or _NO_KWARGS


def without_hand_off(body: bytes) -> bytes:
    """The same bytes less the members of HAND_OFF_KEYS, each with one comma, at its top and in CARRIERS; every other
    byte untouched.
    """
    if (found := _decoded(body)) is None:
        return body
    text, codec = found
    cut = _cut(text, 0, len(text), _CARRIED)
    if not cut:
        return body
    pieces, done = [], 0
    for start, end in sorted(cut):
        pieces.append(text[done:start])
        done = end
    pieces.append(text[done:])
    return codec.encode("".join(pieces))


def _cut(text: str, start: int, end: int, carriers: int) -> list[tuple[int, int]]:
    """What of the object in `text[start:end]` must go, as ranges. `carriers`: how many more levels are looked into."""
    cut: list[tuple[int, int]] = []
    comma_of_last_kept: int | None = None
    for member in members(text, start, end):
        if member.name not in HAND_OFF_KEYS:
            comma_of_last_kept = member.comma
            if carriers and member.name in CARRIERS:
                cut += _cut(text, member.value, member.end, carriers - 1)
            continue
        cut.append((member.start, member.end))
        # A last member has no comma of its own: the one that led to it goes.
        comma = comma_of_last_kept if member.comma is None else member.comma
        if comma is not None:
            cut.append((comma, comma + 1))
    return cut


def _hands_off(value: dict[str, Any], carriers: int = _CARRIED) -> bool:
    if not HAND_OFF_KEYS.isdisjoint(value):
        return True
    if not carriers or CARRIERS.isdisjoint(value):
        return False
    inner = (value.get(name) for name in CARRIERS)
    return any(isinstance(each, dict) and _hands_off(each, carriers - 1) for each in inner)


def _loads(body: bytes, chat: Chat | None = None) -> Any:
    """As the engine would: starlette hands the bytes to json.loads. orjson is first, being stricter and much faster.

    Fills in the messages of `chat`; of a body whose beginning is known, only the rest is parsed.
    """
    try:
        if chat is not None and chat.known is not None:
            found = split(body, chat.known)
            if found is not None:
                chat.messages = found[1]
                return found[0]
            chat.known = None
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = json.loads(body)
        if chat is not None:
            chat.known, chat.marks = None, []
    if chat is not None and isinstance(value, dict) and isinstance(messages := value.get("messages"), list):
        chat.messages = messages
    return value


def _loads_routed(body: bytes) -> Any:
    """Of a body whose prompt is not read, the members of _ROUTED_BY."""
    try:
        return _ROUTED.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return _loads(body)


def _typed(value: dict[str, Any], name: str, kind: type) -> Any:
    found = value.get(name)
    if found is None:  # most are not there
        return None
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
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 31


def _decoded(body: bytes) -> tuple[str, Codec] | None:
    """The body's text and encoding, where it may hold a hand-off at all; None otherwise."""
    if b"transfer_params" not in body and b"\\u" not in body and b"\0" not in body:
        return None  # neither plainly, nor in escapes, nor in an encoding of wider characters
    codec = codec_of(body)
    try:
        return codec.decode(body), codec
    except UnicodeDecodeError:
        return None


def _found_by_scan(body: bytes) -> bool:
    """Whether a body that no parser here reads holds a hand-off. Scans without recursion, so that nesting too deep for
    a parser hides nothing.
    """
    found = _decoded(body)
    return found is not None and bool(_cut(found[0], 0, len(found[0]), _CARRIED))
