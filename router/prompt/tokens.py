"""Text to token ids and back, from a model's own tokenizer files."""

from __future__ import annotations

import json
import logging
from array import array
from typing import TYPE_CHECKING, Any, Final

import tokenizers
import tokenizers.processors

from router.prompt import fast, ranks, tiktoken_files
from router.prompt.chat import ChatTemplate
from router.prompt.mistral import VERSIONS, MistralChat
from router.prompt.segments import Cutter, holds, marks_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


TEKKEN: Final = "tekken.json"
FEW: Final = 4
"""So many pieces are tokenized one by one: to spread them over threads would cost more."""

log = logging.getLogger("warmroute.prompt")


class TokenizerError(Exception):
    """A tokenizer directory can't be used; the message is one line that names the file and what is wrong with it."""


class Tokenizer:
    """One model's tokenizer and chat template.

    Loaded from a local directory that has tokenizer.json, as every model repository with a fast tokenizer does, or else
    mistral's tekken.json or a file of tiktoken's.
    """

    def __init__(
        self,
        name: str,
        engine: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | MistralChat | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        harmony: bool = False,
    ) -> None:
        """`harmony`: vLLM writes this model's chats in code (gpt-oss), whatever template there is."""
        # A prompt is never cut or padded to the length that some training run once set.
        engine.no_truncation()
        engine.no_padding()
        self._engine = engine
        self._fast: Any | None = fast.load(engine, name)
        self.name = name
        self.vocab_size: int = engine.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.harmony = harmony
        if chat_template is not None:
            chat_template.prove()
        self.cutter = self._cutter()
        if chat_template is not None and self.cutter.marks:
            chat_template.media_begin = self.cutter.marks[0]
        self._bounds = self._begin_and_end()

    @property
    def fast(self) -> bool:
        """Whether a faster engine does the work."""
        return self._fast is not None

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether a directory has any file that may be a tokenizer."""
        named = any((directory / name).is_file() for name in ("tokenizer.json", TEKKEN))
        return named or tiktoken_files.find(directory) is not None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load tokenizer.json, tokenizer_config.json, chat_template.jinja and the generation config of `directory`.

        Only tokenizer.json is needed, or what can stand for it. Raises TokenizerError.
        """
        path = directory / "tokenizer.json"
        # vLLM takes mistral's own files where the weights are in mistral's own form, too (tokenizers/registry.py).
        own = not path.is_file() or any(directory.glob("consolidated*.safetensors"))
        if own and (directory / TEKKEN).is_file():
            return cls._tekken(directory)
        config_path = directory / "tokenizer_config.json"
        if path.is_file():
            try:
                engine = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
            config = _read_object(config_path)
        elif (file := tiktoken_files.find(directory)) is not None:
            config = _read_object(config_path)
            try:
                engine = tiktoken_files.load(file, config)
            except ranks.RanksError as error:
                raise TokenizerError(str(error)) from None
        else:
            raise TokenizerError(f"no tokenizer at {directory}: tokenizer.json is missing")
        special = _special_tokens(_read_object(directory / "special_tokens_map.json") | config)
        _add_bounds(engine, config, special)
        ids = {engine.token_to_id(special["eos_token"])} if "eos_token" in special else set()
        models = [_read_object(directory / name) for name in ("generation_config.json", "config.json")]
        for model in models:
            found = model.get("eos_token_id")
            ids.update(found if isinstance(found, list) else [found])
        return cls(
            str(directory),
            engine,
            chat_template=_chat_template(directory, config, special),
            eos_token_ids=frozenset(i for i in ids if isinstance(i, int)),
            harmony=models[1].get("model_type") == "gpt_oss",
        )

    @classmethod
    def _tekken(cls, directory: Path) -> Tokenizer:
        """A model of mistral's with its own tokenizer. Code of its own writes its chats, not a template."""
        try:
            found = ranks.tekken(directory / TEKKEN)
        except ranks.RanksError as error:
            raise TokenizerError(str(error)) from None
        chat = None
        if found.version.removeprefix("v") in map(str, VERSIONS):
            chat = MistralChat(int(found.version[1:]), found.tokens, found.efforts)
        else:
            log.warning("%s: how chats of version %s are written is not known here", directory, found.version)
        return cls(str(directory), found.engine, chat_template=chat, eos_token_ids=frozenset({found.end}))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it count as such, as they do in the engine.

        Raises ValueError for text that isn't Unicode (lone surrogates).
        """
        try:
            # Not `encode`, which keeps every other thread of the process waiting until it is through.
            ids: list[int] = self._engine.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("text with lone surrogates has no tokens") from error
        return ids

    def encode_piece(self, piece: str) -> list[int]:
        """Token ids of one piece, as `encode_pieces` gives them. Where it is short and its ids are wanted as a list,
        this costs a third less. Raises ValueError as `encode` does."""
        if self._fast is not None:
            try:
                ids: list[int] = self._fast.encode(piece).ids
            except Exception as error:  # lone surrogates, or a limit as in `encode_pieces`
                log.debug("%s: fastokens failed (%s), the reference takes over", self.name, error)
            else:
                return ids
        return self.encode(piece, False)

    def encode_pieces(self, pieces: list[str]) -> list[array[int]]:
        """Token ids of each piece by itself, without begin and end texts. Raises ValueError as `encode` does."""
        try:
            if self._fast is not None:
                try:
                    if len(pieces) <= FEW:
                        # Not `encode`, which makes a list of them first.
                        flat = self._fast.encode_batch_flat
                        return [array("i", flat([piece])[0]) for piece in pieces]
                    return _parts(*self._fast.encode_batch_flat(pieces))
                except UnicodeEncodeError:
                    raise
                except Exception as error:  # a limit of its regular expressions, say
                    log.debug("%s: fastokens failed (%s), the reference takes over", self.name, error)
            encodings = self._engine.encode_batch_fast(pieces, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("text with lone surrogates has no tokens") from error
        return [array("i", encoding.ids) for encoding in encodings]

    @property
    def bounds(self) -> tuple[array[int], array[int]] | None:
        """The ids that the engine puts before and after every text where special tokens are asked for; None if this
        depends on the text."""
        return self._bounds

    def _cutter(self) -> Cutter:
        template = self.chat_template.sources if self.chat_template is not None else ""
        cutter = Cutter(marks_of(self._engine.to_str(), template))
        if cutter.marks and not holds(lambda text: self.encode(text, False), cutter):
            log.warning("%s: texts cannot be cut at special tokens, so each is tokenized whole", self.name)
            return Cutter(())
        return cutter

    def _begin_and_end(self) -> tuple[array[int], array[int]] | None:
        bare = self.encode("a", False)
        whole = self.encode("a", True)
        for begin in range(len(whole) - len(bare) + 1):
            before, after = whole[:begin], whole[begin + len(bare) :]
            if all(
                self.encode(text, True) == before + self.encode(text, False) + after
                for text in ("", "a", "b a", " x\n", "".join(self.cutter.marks[:2]), "7 é")
            ):
                return array("i", before), array("i", after)
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._engine.decode(list(ids), skip_special_tokens=False)
        return text


def _parts(flat: bytes, ends: bytes) -> list[array[int]]:
    """Arrays of ids from one buffer of 32-bit ids and the 64-bit ends of its parts."""
    ids, bounds = array("i"), array("Q")
    ids.frombytes(flat)
    bounds.frombytes(ends)
    return [ids[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role ("bos_token", ...), each a string or an added token written out as an object."""
    special = {}
    for role, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(content, str):
            special[role] = content
    return special


def _add_bounds(engine: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Begin and end texts as the config asks; where it says nothing, tokenizer.json has the word.

    transformers: tokenization_utils_tokenizers.py `update_post_processor`.
    """
    if "add_bos_token" not in config and "add_eos_token" not in config and engine.post_processor is not None:
        return
    before = special.get("bos_token") if config.get("add_bos_token") else None
    after = special.get("eos_token") if config.get("add_eos_token") else None
    bounds = [(token, engine.token_to_id(token)) for token in (before, after) if token is not None]
    if any(token_id is None for _, token_id in bounds):
        return
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*([before] if before else []), "$A", *([after] if after else [])], special_tokens=bounds
    )


def _chat_template(directory: Path, config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """chat_template.jinja wins over the config's `chat_template`, which may be a list of named ones."""
    named: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named.update(
            {t["name"]: t["template"] for t in given if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        )
    path = directory / "chat_template.jinja"
    if path.is_file():
        named["default"] = path.read_text(encoding="utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[extra.stem] = extra.read_text(encoding="utf-8")
    return ChatTemplate(named, special) if named else None
