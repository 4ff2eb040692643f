"""A request's prompts as the engine will see them: token ids, or bytes where no tokenizer is at hand."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

from router.prompt.blocks import ByteHasher, Hasher
from router.prompt.chat import TemplateError, conversation

if TYPE_CHECKING:
    from router.prompt.request import Ask
    from router.prompt.tokens import Tokenizer

BYTES_PER_TOKEN = 4
"""What a token of text weighs on average; blocks of bytes are this many times the engine's block size."""

_TAIL = 64  # characters of a prompt that may still merge with the answer's first ones


class PromptError(Exception):
    """The prompt can't be read for routing. The request goes by load; the engine decides whether it is an error."""


class Reader:
    """Reads prompts for one model. With a tokenizer its token ids are the engine's own; without, prompts are bytes.

    `trust_request_chat_template`: render a template that the request brings, as `vllm serve` does with the flag of this
    name. Off, such a request can't be read (an engine without the flag refuses it).
    """

    def __init__(self, tokenizer: Tokenizer | None, *, trust_request_chat_template: bool = False) -> None:
        self.tokenizer = tokenizer
        self._trust_request_chat_template = trust_request_chat_template

    @property
    def exact(self) -> bool:
        """Whether prompts are token ids, so that block hashes can be the engine's."""
        return self.tokenizer is not None

    @property
    def mode(self) -> str:
        """The mode in words for people."""
        return f"tokens: {self.tokenizer.name}" if self.tokenizer else f"bytes, {BYTES_PER_TOKEN} per token"

    @property
    def units_per_token(self) -> int:
        """How many items of a prompt (and so of a block) stand for one token: 1, or BYTES_PER_TOKEN."""
        return 1 if self.exact else BYTES_PER_TOKEN

    def block_tokens(self, block_size: int) -> int:
        """The `block_size` to give to this reader's hashers for an engine whose blocks are `block_size` tokens."""
        return block_size * self.units_per_token

    def hasher(self, algorithm: str, seed: str | None = None) -> Hasher | ByteHasher:
        """A hasher for what this reader yields."""
        return Hasher(algorithm, seed) if self.exact else ByteHasher(seed)

    def tokenize(self, ask: Ask) -> list[list[int]] | list[bytes]:
        """The prompts of a request, in order: a chat is one, a completion may be several. Raises PromptError."""
        ask.tails = []
        if ask.kind == "other":
            raise PromptError("the request has no prompt")
        if ask.truncate_prompt_tokens is not None:
            raise PromptError("a prompt that the engine cuts (truncate_prompt_tokens) can't be read")
        if self.tokenizer is None:
            return [_layout(ask)] if ask.kind == "chat" else [_as_bytes(p) for p in ask.prompts]
        if ask.kind == "completion":
            return [self._ids(p, ask) if isinstance(p, str) else self._given(p, ask) for p in ask.prompts]
        return [self._ids(self._render(ask), ask)]

    def answer(
        self,
        ask: Ask,
        text: str | None,
        token_ids: list[int] | None = None,
        *,
        finish_reason: str | None = None,
        choice: int = 0,
    ) -> list[int] | bytes | None:
        """What the engine's cache holds behind the prompt once it has answered; None if that can't be told.

        `text` is the answer's text, `token_ids` its ids where the client asked for them (they win), `choice` the index
        of the choice, counted over all prompts as the engine does. An answer's last token is sampled but never
        computed, so it is no part of the cache: the end-of-sequence token after "stop", which `text` doesn't show, but
        the last token of the text after "length". Call it after `tokenize` of the same `ask`.
        """
        if self.tokenizer is None:
            return None if text is None else text.encode("utf-8", "surrogatepass")
        if token_ids is not None:
            return token_ids[:-1]
        if text is None:
            return None
        which = choice // ask.n
        tail = ask.tails[which] if which < len(ask.tails) else ""
        try:
            # Not the text alone: some tokenizers begin a text differently from how they go on with one.
            before = self.tokenizer.encode(tail, add_special_tokens=False)
            ids = self.tokenizer.encode(tail + text, add_special_tokens=False)
            ids = ids[len(before) :] if ids[: len(before)] == before else self.tokenizer.encode(text, False)
        except ValueError:
            return None
        return ids[:-1] if finish_reason == "length" else ids

    def _ids(self, text: str, ask: Ask) -> list[int]:
        assert self.tokenizer is not None
        try:
            ids = self.tokenizer.encode(text, ask.add_special_tokens)
        except ValueError as error:
            raise PromptError(str(error)) from error
        ask.tails.append(text[-_TAIL:])
        return ids

    def _given(self, ids: list[int], ask: Ask) -> list[int]:
        assert self.tokenizer is not None
        try:
            ask.tails.append(self.tokenizer.decode(ids[-8:]))
        except OverflowError as error:
            raise PromptError(str(error)) from error
        return ids

    def _render(self, ask: Ask) -> str:
        assert self.tokenizer is not None
        if ask.chat_template is not None and not self._trust_request_chat_template:
            raise PromptError("the request brings its own chat template")
        if self.tokenizer.chat_template is None:
            raise PromptError(f"the tokenizer at {self.tokenizer.name} has no chat template")
        extra: dict[str, Any] = dict(ask.chat_template_kwargs)
        if not extra.keys().isdisjoint(("chat_template", "tokenize")):
            raise PromptError("chat_template_kwargs steers the engine's own rendering")
        if ask.documents is not None:
            extra["documents"] = ask.documents
        if ask.reasoning_effort is not None:
            extra["reasoning_effort"] = ask.reasoning_effort
            extra.setdefault("enable_thinking", ask.reasoning_effort != "none")
        try:
            return self.tokenizer.chat_template.render(
                ask.messages,
                tools=ask.tools,
                add_generation_prompt=ask.add_generation_prompt,
                continue_final_message=ask.continue_final_message,
                extra=extra,
                template=ask.chat_template,
            )
        except TemplateError as error:
            raise PromptError(str(error)) from error


def _as_bytes(prompt: str | list[int]) -> bytes:
    """Text in UTF-8; token ids in BYTES_PER_TOKEN bytes each, so that a block of them is a block of bytes."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return array("I", prompt).tobytes()


def _layout(ask: Ask) -> bytes:
    """A chat in a layout of our own, in which earlier messages are a prefix of later ones and an answer goes on where
    the prompt ends.
    """
    pieces = []
    if ask.tools:
        pieces.append(f"\x1etools\n{json.dumps(ask.tools)}\x1f\n")
    for message in ask.messages:
        if not isinstance(message, dict):
            raise PromptError("a message is an object")
        try:
            (seen,) = conversation([message], "string")
        except TemplateError:  # images and the like: their description is as good a name as any
            content = message.get("content")
            seen = {**message, "content": content if isinstance(content, str) else json.dumps(content)}
        rest = {k: v for k, v in seen.items() if k not in ("role", "content")}
        pieces.append(f"\x1e{seen.get('role')}\n{seen['content']}\x1f{json.dumps(rest) if rest else ''}\n")
    if ask.continue_final_message:
        pieces[-1] = pieces[-1].partition("\x1f")[0]
    elif ask.add_generation_prompt:
        pieces.append("\x1eassistant\n")
    return "".join(pieces).encode("utf-8", "surrogatepass")
