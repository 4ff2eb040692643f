"""A request's prompts as the engine will see them: token ids, or bytes where no tokenizer is at hand."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any, Final

import orjson
import xxhash

from router.prompt.blocks import ByteHasher, Hasher
from router.prompt.bodies import Bodies, State
from router.prompt.chat import MEDIUM, TemplateError, conversation
from router.prompt.memo import Memo, Row, ids_in_pieces, seed, settled_in
from router.prompt.mistral import MistralChat
from router.prompt.segments import MIN_PIECE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.prompt.request import Ask
    from router.prompt.tokens import Tokenizer

BYTES_PER_TOKEN: Final = 4
"""What a token of text weighs on average; blocks of bytes are this many times the engine's block size."""

_TAIL: Final = 64  # characters of a prompt, or of its last piece, that may still merge with the answer's first ones
_MOST_TAILS: Final = 64
# A fast tokenizer is through with a shorter text as soon as its ids are found or kept, and most are never met again but
# behind what they stood behind, where their blocks are known.
_LEAST_KEPT: Final = 1024


class PromptError(Exception):
    """The prompt can't be read for routing. The request goes by load; the engine decides whether it is an error."""


class Reader:
    """Reads prompts for one model. With a tokenizer its token ids are the engine's own; without, prompts are bytes.

    `trust_request_chat_template`: render a template that the request brings, as `vllm serve` does with the flag of this
    name. Off, such a request can't be read (an engine without the flag refuses it).
    """

    def __init__(
        self, tokenizer: Tokenizer | None, memo: Memo | None = None, *, trust_request_chat_template: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.memo = Memo(0) if memo is None else memo
        self._bodies = Bodies(self.memo.bodies)
        self._seed = seed("bytes") if tokenizer is None else seed("tokens", tokenizer.name)
        self._bounded_seed = self._seed if tokenizer is None else seed("with begin and end", tokenizer.name)
        self._trust_request_chat_template = trust_request_chat_template
        self._tail_ids: dict[str, list[int]] = {}  # most chats end with the same mark

    @property
    def exact(self) -> bool:
        """Whether prompts are token ids, so that block hashes can be the engine's."""
        return self.tokenizer is not None

    @property
    def mode(self) -> str:
        """The mode in words for people."""
        if self.tokenizer is None:
            return f"bytes, {BYTES_PER_TOKEN} per token"
        written = self.tokenizer.chat_template
        chats = "" if written is not None else " (it has no chat template: chats only by likeness)"
        if self.tokenizer.harmony and written is not None:
            chats = " (chats by its template, where the engine has code for them: they may differ)"
        elif isinstance(written, MistralChat):
            chats = f" (chats in mistral's format, version {written.version})"
        return f"tokens: {self.tokenizer.name}{chats}"

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
        """The prompts of a request, in order: a chat is one, a completion may be several. Raises PromptError.

        From scratch: `rows` gives the same, in pieces that may be known.
        """
        self._begin(ask)
        ask.load()
        if self.tokenizer is None:
            return [b"".join(_layout(ask))] if ask.kind == "chat" else [_as_bytes(p) for p in ask.prompts]
        if ask.kind == "completion":
            return [self._ids(p, ask) if isinstance(p, str) else self._given(p, ask) for p in ask.prompts]
        if self.tokenizer.chat_template is None:
            return [self._ids(self._own_layout(ask), ask)]
        try:
            text = self._render(ask, self._variables(ask))
        except TemplateError as error:
            raise PromptError(str(error)) from error
        return [self._ids(text, ask)]

    @staticmethod
    def _own_layout(ask: Ask) -> str:
        """In place of a rendered chat where only the engine has the template: chats that begin alike are alike."""
        ask.load()
        ask.inexact, ask.add_special_tokens = True, False
        return b"".join(_layout(ask)).decode("utf-8", "surrogatepass")

    @staticmethod
    def _begin(ask: Ask) -> None:
        ask.tails = []
        if ask.kind == "other":
            raise PromptError("the request has no prompt")
        if ask.truncate_prompt_tokens is not None:
            raise PromptError("a prompt that the engine cuts (truncate_prompt_tokens) can't be read")

    def rows(self, ask: Ask) -> list[Row]:
        """The prompts of a request, in order, as rows of pieces of which the memo knows some. Raises PromptError.

        Leaves in the memo what the request's next turn will begin with.
        """
        self._begin(ask)
        try:
            if ask.kind == "completion":
                return [self._completion(prompt, ask) for prompt in ask.prompts]
            return [self._chat_bytes(ask) if self.tokenizer is None else self._chat_tokens(ask)]
        except UnicodeEncodeError:
            raise PromptError("text with lone surrogates has no tokens") from None
        except (ValueError, TemplateError) as error:
            raise PromptError(str(error)) from error

    def _completion(self, prompt: str | list[int], ask: Ask) -> Row:
        if not isinstance(prompt, str):
            if self.tokenizer is None:
                return Row(self.memo, [_as_bytes(prompt)], base=self._seed)
            return Row(self.memo, ids_in_pieces(self._given(prompt, ask)), base=seed("ids"))
        if self.tokenizer is None:
            return Row(self.memo, [_as_bytes(prompt)], base=self._seed)
        return self._text(prompt, ask)

    def _text(self, text: str, ask: Ask) -> Row:
        """A text that is tokenized as a whole, or in pieces that come to the same."""
        assert self.tokenizer is not None
        pieces = self.tokenizer.cutter.cut(text)
        if not ask.add_special_tokens:
            ask.tails.append(pieces[-1][-_TAIL:])
            return self._row(pieces, self._seed)
        if (bounds := self.tokenizer.bounds) is None:
            return Row(self.memo, ids_in_pieces(self._ids(text, ask)), base=seed("ids"))
        ask.tails.append(pieces[-1][-_TAIL:])
        before, after = bounds
        return self._row(pieces, self._bounded_seed, before or None, after or None)

    def _row(
        self,
        pieces: list[str],
        base: bytes,
        before: array[int] | None = None,
        after: array[int] | None = None,
        again: Callable[[], Row] | None = None,
    ) -> Row:
        assert self.tokenizer is not None
        encode = self.tokenizer.encode_pieces
        return Row(
            self.memo,
            pieces,
            base=base,
            encode=encode,
            tokenizer=self._seed,
            least=_LEAST_KEPT if self.tokenizer.fast else 0,
            before=before,
            after=after,
            again=again,
        )

    # -- chats whose beginning may be known ----------------------------------------------------------------------

    def _chat_tokens(self, ask: Ask) -> Row:
        assert self.tokenizer is not None
        if self.tokenizer.chat_template is None:
            return self._text(self._own_layout(ask), ask)
        extra = self._variables(ask)
        template = self.tokenizer.chat_template
        turns = None
        can_be_known = ask.chat is not None and ask.chat_template is None
        if can_be_known and not ask.continue_final_message and not ask.add_special_tokens:
            turns = template.turns(ask.tools)
        key = self._key(ask, extra) if turns is not None else None
        known = ask.chat.known if ask.chat is not None else None
        if known is not None:
            state = known.states.get(key) if key is not None else None
            if state is not None and turns is not None:
                parts = self._parts(known.short + ask.messages, ask, extra, turns.unsettled(len(ask.messages)))
                if parts is not None and _opening(parts) == state.opening:
                    fresh = turns.new(parts, len(ask.messages))
                    return self._go_on(ask, state, key, fresh, turns.settled(fresh)[0], again=True)
            ask.load()
        parts = self._parts(ask.messages, ask, extra) if key is not None else None
        if parts is None:
            return self._text(self._render(ask, extra), ask)
        assert turns is not None
        start = State(self._seed, "", _opening(parts))
        return self._go_on(ask, start, key, parts, turns.settled(parts)[0], again=False)

    def _go_on(
        self, ask: Ask, start: State, key: bytes | None, parts: Sequence[str], settled: str, *, again: bool
    ) -> Row:
        """The row of a text that goes on with `parts`, of which `settled` stays however the chat goes on."""
        assert self.tokenizer is not None
        assert isinstance(start.rest, str)
        text = start.rest + "".join(parts)
        ask.inexact = start.inexact or MEDIUM in text
        pieces = self.tokenizer.cutter.cut(text)
        ask.tails.append(pieces[-1][-_TAIL:])
        row = self._row(pieces, start.base, again=self._again(ask) if again else None)
        count, rest = settled_in(pieces, len(start.rest) + len(settled), self.tokenizer.cutter.longest)
        self._keep(ask, key, row, count, State(b"", rest, start.opening, ask.inexact))
        return row

    def _chat_bytes(self, ask: Ask) -> Row:
        key = None if ask.chat is None or ask.continue_final_message else self._key(ask, {})
        known = ask.chat.known if ask.chat is not None else None
        state = known.states.get(key) if known is not None and key is not None else None
        if state is None:
            ask.load()
            state = State(self._seed, b"", 0)
            layout = _layout(ask)
            again = None
        else:
            layout = [b"", *_layout(ask)[1:]]
            again = self._again(ask)
        assert isinstance(state.rest, bytes)
        # A piece ends with a message, once it is long enough.
        pieces, open_piece = [], state.rest
        for part in layout[:-1]:
            open_piece += part
            if len(open_piece) >= MIN_PIECE:
                pieces.append(open_piece)
                open_piece = b""
        row = Row(self.memo, [*pieces, open_piece + layout[-1]], base=state.base, again=again)
        self._keep(ask, key, row, len(pieces), State(b"", open_piece, 0))
        return row

    def _keep(self, ask: Ask, key: bytes | None, row: Row, count: int, state: State) -> None:
        """Remember that `row` stays for its first `count` pieces, and `state` for what comes behind them."""
        if key is not None and ask.chat is not None and self.memo.bodies.limit:
            base = row.sums[count - 1] if count else row.base
            self._bodies.keep(ask.chat, key, State(base, state.rest, state.opening, state.inexact))

    def _again(self, ask: Ask) -> Callable[[], Row]:
        def again() -> Row:
            ask.load()
            (row,) = self.rows(ask)
            return row

        return again

    def _key(self, ask: Ask, extra: dict[str, Any]) -> bytes | None:
        """All that a rendering depends on but the messages."""
        try:
            what = [str(self._seed), ask.tools, ask.add_generation_prompt, extra]
            return orjson.dumps(what)
        except (TypeError, orjson.JSONEncodeError):
            return None

    def _parts(self, messages: list[Any], ask: Ask, extra: dict[str, Any], last: int | None = None) -> list[str] | None:
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        assert template is not None
        return template.render_parts(
            messages, tools=ask.tools, add_generation_prompt=ask.add_generation_prompt, extra=extra, last=last
        )

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
            before = self._tail_ids.get(tail)
            if before is None:
                before = self.tokenizer.encode_piece(tail)
                if len(self._tail_ids) == _MOST_TAILS:
                    self._tail_ids.clear()
                self._tail_ids[tail] = before
            ids = self.tokenizer.encode_piece(tail + text)
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
        ask.tails.append(self.tokenizer.cutter.cut(text)[-1][-_TAIL:])
        return ids

    def _given(self, ids: list[int], ask: Ask) -> list[int]:
        assert self.tokenizer is not None
        try:
            ask.tails.append(self.tokenizer.decode(ids[-8:]))
        except OverflowError as error:
            raise PromptError(str(error)) from error
        return ids

    def _variables(self, ask: Ask) -> dict[str, Any]:
        """What the request adds to the template's variables. Raises PromptError."""
        assert self.tokenizer is not None
        if ask.chat_template is not None and not self._trust_request_chat_template:
            raise PromptError("the request brings its own chat template")
        assert self.tokenizer.chat_template is not None
        if isinstance(self.tokenizer.chat_template, MistralChat):
            ask.add_special_tokens = False  # its chats are ids already, to which nothing is added
        if ask.thinking_off:
            ask.reasoning_effort, ask.thinking_off = self.tokenizer.chat_template.thinking_off(), False
        if ask.system_anywhere:
            ask.system_anywhere = False
            if self.tokenizer.chat_template.system_first():
                ask.messages = _system_joined(ask.messages)
        if not ask.chat_template_kwargs and ask.documents is None and ask.reasoning_effort is None:
            return {}
        extra: dict[str, Any] = dict(ask.chat_template_kwargs)
        if not extra.keys().isdisjoint(("chat_template", "tokenize")):
            raise PromptError("chat_template_kwargs steers the engine's own rendering")
        if ask.documents is not None:
            extra["documents"] = ask.documents
        if ask.reasoning_effort is not None:
            extra["reasoning_effort"] = ask.reasoning_effort
            extra.setdefault("enable_thinking", ask.reasoning_effort != "none")
        return extra

    def _render(self, ask: Ask, extra: dict[str, Any]) -> str:
        assert self.tokenizer is not None
        template = self.tokenizer.chat_template
        assert template is not None
        text = template.render(
            ask.messages,
            tools=ask.tools,
            add_generation_prompt=ask.add_generation_prompt,
            continue_final_message=ask.continue_final_message,
            extra=extra,
            template=ask.chat_template,
        )
        ask.inexact = MEDIUM in text
        return text


def _opening(parts: Sequence[str]) -> int:
    """A digest of what stands before the first message: it may hold what is no request's doing, such as a date."""
    return xxhash.xxh3_64_intdigest(parts[0].encode("utf-8", "surrogatepass"))


def _system_joined(messages: list[Any]) -> list[Any]:
    systems = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(systems)}, *rest] if systems else rest


def _as_bytes(prompt: str | list[int]) -> bytes:
    """Text in UTF-8; token ids in BYTES_PER_TOKEN bytes each, so that a block of them is a block of bytes."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return array("i", prompt).tobytes()


def _layout(ask: Ask) -> list[bytes]:
    """A chat in a layout of our own, in which earlier messages are a prefix of later ones and an answer goes on where
    the prompt ends: the tools, each message, what the answer begins with.
    """
    pieces = [f"\x1etools\n{json.dumps(ask.tools)}\x1f\n" if ask.tools else ""]
    for message in ask.messages:
        if not isinstance(message, dict):
            raise PromptError("a message is an object")
        try:
            (seen,) = conversation([message], "string")
        except TemplateError:  # what it is no chat's: its description is as good a name as any
            content = message.get("content")
            seen = {**message, "content": content if isinstance(content, str) else json.dumps(content)}
        rest = {k: v for k, v in seen.items() if k not in ("role", "content")}
        pieces.append(f"\x1e{seen.get('role')}\n{seen['content']}\x1f{json.dumps(rest) if rest else ''}\n")
    if ask.continue_final_message:
        pieces[-1] = pieces[-1].partition("\x1f")[0]
    pieces.append("\x1eassistant\n" if ask.add_generation_prompt and not ask.continue_final_message else "")
    return [piece.encode("utf-8", "surrogatepass") for piece in pieces]
