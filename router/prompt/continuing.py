"""The request by which another engine goes on with an answer that broke off.

The client's own body, with the text that it has been given put behind the prompt and that many tokens taken off its
bounds; every other byte untouched. Only where the engine then sees exactly the tokens that the first one had, and
where nothing in the request looks back on the tokens generated so far: anything else is an `UnfitError`, and the
client is better off with an honest error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from router.prompt.members import codec_of, edited, members
from router.prompt.reader import PromptError
from router.prompt.request import read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.prompt.reader import Reader

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ROUTES: Final = frozenset({CHAT, COMPLETIONS})
"""Where answers can be continued: their streams carry text, and their prompts can end with it."""

# vLLM's own (entrypoints/openai/completion/protocol.py): a completion without max_tokens ends here.
_USUAL_MAX_TOKENS: Final = 16

# What the engine does with these is the same whether a token is the prompt's or the answer's. What is not listed may
# be new, and is taken to differ.
_ANY_VALUE: Final = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents", "reasoning_effort"),
        *("include_reasoning", "priority", "cache_salt", "session_id", "request_id", "safety_identifier"),
        *("prompt_cache_key", "parallel_tool_calls"),
    }
)
# These only where they ask for nothing.
_WITHOUT_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),  # counts the tokens of the answer only
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "return_token_ids": (False,),
    "length_penalty": (1,),
    "suffix": ("",),
}


class UnfitError(Exception):
    """The answer can't be continued exactly. The message is one of a few fixed words."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """`body`: what to send. `tokens`: how many of its prompt are the answer's."""

    body: bytes
    tokens: int


def continuation(
    path: str, body: bytes, text: str, reader: Reader | None, *, events: int, told: int | None
) -> Continuation:
    """The request that goes on where the answer to `body` broke off, once it had said `text`. Raises UnfitError.

    `events`: how many events of the stream carried a token or more of it. `told`: its tokens, as the engine counts.
    """
    if not text:
        return Continuation(body, 0)  # the same request again
    if reader is None or not reader.exact:
        raise UnfitError("no tokenizer")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise UnfitError("form of the request") from None
    _check_form(value, text)
    try:
        goes_on = _Chat(path, body, value, text) if path == CHAT else _Completion(path, body, value, text)
        tokens = goes_on.tokens(reader)
    except PromptError:
        raise UnfitError("prompt cannot be read") from None
    # More events than tokens, or another number than the engine told: it did not generate the tokens that the text has.
    if tokens < events or told not in (None, tokens):
        raise UnfitError("tokens are not known")
    changes = goes_on.changes | _bounds(path, value, tokens)
    try:
        made = edited(body, {name: orjson.dumps(change) for name, change in changes.items()} | goes_on.raw)
        same = orjson.loads(made) == value | changes  # not so where a member is there twice, say
    except ValueError:
        same = False
    if not same:
        raise UnfitError("form of the request")
    return Continuation(made, tokens)


def _check_form(value: Any, text: str) -> None:
    if not isinstance(value, dict):
        raise UnfitError("form of the request")
    for name, given in value.items():
        if given is None or name in _ANY_VALUE:
            continue
        # 0 and False are equal and not the same: `logprobs: 0` asks for some.
        if not any(
            given == plain and (given is plain or not isinstance(plain, bool))
            for plain in _WITHOUT_EFFECT.get(name, ())
        ):
            raise UnfitError("form of the request")
    stop = value.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    for each in stops:
        if not isinstance(each, str):
            raise UnfitError("form of the request")
        # The engine keeps so much of its text back as may become a stop string, and looks for these in its own text.
        begun = any(text.endswith(each[:length]) for length in range(1, len(each)))
        if len(each) > 1 and (begun or value.get("include_stop_str_in_output") is not True):
            raise UnfitError("stop strings")


def _bounds(path: str, value: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The bounds on the answer's length that change because `tokens` of it are there already."""
    bounds = {
        name: given
        for name in ("max_tokens", "max_completion_tokens")
        if (given := value.get(name)) is not None and (path == CHAT or name == "max_tokens")
    }
    if path == COMPLETIONS and "max_tokens" not in value:
        bounds["max_tokens"] = _USUAL_MAX_TOKENS
    changes = {}
    for name, given in bounds.items():
        if not isinstance(given, int) or given <= tokens:
            raise UnfitError("tokens are not known")  # it would have ended
        changes[name] = given - tokens
    least = value.get("min_tokens")
    if isinstance(least, int) and least > 0:
        changes["min_tokens"] = max(0, least - tokens)
    return changes


class _Chat:
    """The text becomes the beginning of the assistant's message, which the engine is told to continue."""

    def __init__(self, path: str, body: bytes, value: dict[str, Any], text: str) -> None:
        self._path, self._body, self._text = path, body, text
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UnfitError("form of the request")
        self.raw: dict[str, bytes] = {}
        if value.get("continue_final_message") is True:
            *before, last = messages
            if not isinstance(last, dict) or not isinstance(said := last.get("content"), str):
                raise UnfitError("form of the request")
            self.changes: dict[str, Any] = {"messages": [*before, {**last, "content": said + text}]}
        else:
            message = {"role": "assistant", "content": text}
            self.changes = {
                "messages": [*messages, message],
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
            self.raw["messages"] = _appended(body, "messages", message)

    def tokens(self, reader: Reader) -> int:
        """How many tokens the text is, where the template writes the continued chat as it wrote the prompt. Reasoning
        models' often write something else there. Raises PromptError, UnfitError."""
        whole = {name: orjson.dumps(change) for name, change in self.changes.items()} | self.raw
        before, after = (reader.tokenize(read(self._path, each))[0] for each in (self._body, edited(self._body, whole)))
        if after[: len(before)] != before or not _says(reader, before, after, self._text):
            raise UnfitError("chat template")
        return len(after) - len(before)


class _Completion:
    """The text goes on where the prompt ends; behind token ids, as token ids."""

    def __init__(self, path: str, body: bytes, value: dict[str, Any], text: str) -> None:
        self._path, self._body, self._text = path, body, text
        self._prompt = value.get("prompt")
        self.raw: dict[str, bytes] = {}
        self.changes: dict[str, Any] = {}

    def tokens(self, reader: Reader) -> int:
        """How many tokens the text is, where none of them spans the prompt's end. Raises PromptError, UnfitError."""
        ask = read(self._path, self._body)
        if len(ask.prompts) != 1:
            raise UnfitError("form of the request")
        (before,) = reader.tokenize(ask)
        if isinstance(self._prompt, str):
            self.changes["prompt"] = self._prompt + self._text
            longer = read(self._path, edited(self._body, {"prompt": orjson.dumps(self.changes["prompt"])}))
            (after,) = reader.tokenize(longer)
            if after[: len(before)] != before:
                raise UnfitError("tokens are not known")
            return len(after) - len(before)
        ids = reader.answer(ask, self._text)
        if not ids or not _says(reader, before, [*before, *ids], self._text):
            raise UnfitError("tokens are not known")
        self.changes["prompt"] = [*before, *ids]
        return len(ids)


def _says(reader: Reader, before: Sequence[int], after: Sequence[int], text: str) -> bool:
    """Whether `text`, no more and no less, is what `after` has behind `before`. A template may trim it."""
    tokenizer = reader.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(list(after)) == tokenizer.decode(list(before)) + text


def _appended(body: bytes, name: str, item: object) -> bytes:
    """The list that a member of the body is, with one more item; the others stay as they are spelled."""
    text = codec_of(body).decode(body)
    spans = [(member.value, member.end) for member in members(text, 0, len(text)) if member.name == name]
    start, end = spans[-1] if spans else (0, 0)
    listed = text[start:end].strip()
    if not listed.endswith("]"):
        raise UnfitError("form of the request")
    return f"{listed[:-1].rstrip()},{orjson.dumps(item).decode()}]".encode("utf-8", "surrogatepass")
