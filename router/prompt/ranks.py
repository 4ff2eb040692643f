"""Tokenizers that are given by their tokens' ranks: mistral's tekken.json.

A rank is both a token's age and, moved by the number of special tokens, its id. Which pairs merge follows from it: a
token was made of two older ones, and older tokens are merged first.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


_SECRET = secrets.token_hex(8)

_OLD_CONTROL_TOKENS = {
    token: rank
    for rank, token in enumerate(
        (
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
            "[IMG]",
            "<pad>",
            "[IMG_BREAK]",
            "[IMG_END]",
            "[PREFIX]",
            "[MIDDLE]",
            "[SUFFIX]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[TOOL_CONTENT]",
        )
    )
}
"""Those of a tekken.json that names none (mistral-common tokens/tokenizers/tekken.py `DEPRECATED_SPECIAL_TOKENS`)."""


class RanksError(Exception):
    """The file isn't what its name says; one line."""


@dataclass(frozen=True, slots=True)
class Tekken:
    """What a tekken.json holds. `tokens`: by which name the tokenizer finds each control token in a text, by its own
    text: no client can know these names. `efforts`: what the model takes as reasoning_effort, and its default."""

    engine: tokenizers.Tokenizer
    version: str
    tokens: dict[str, str]
    end: int
    efforts: tuple[frozenset[str], str | None]


def tekken(path: Path) -> Tekken:
    """The tokenizer of a tekken.json. Control tokens spelled out in a text are text, as with mistral's own tokenizer;
    the begin-of-text token is put before it where special tokens are asked for. Raises RanksError."""
    try:
        whole: dict[str, Any] = json.loads(path.read_bytes())
        config = whole["config"]
        special = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - special
        ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in whole["vocab"][:size]}
        pattern = str(config["pattern"])
        listed = whole.get("special_tokens")
        given = {str(t["token_str"]): int(t["rank"]) for t in listed} if listed else _OLD_CONTROL_TOKENS
        given = {token: rank for token, rank in given.items() if rank < special}
        effort = (whole.get("model_settings_builder") or {}).get("reasoning_effort") or {}
        efforts = frozenset(map(str, effort.get("values") or ())), effort.get("default")
        begin, end = given["<s>"], given["</s>"]
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RanksError(f"{path} is no tekken file: {type(error).__name__} {error}") from None
    if set(ranks.values()) != set(range(size)):
        raise RanksError(f"{path} is no tekken file: its ranks do not count from 0 to {size - 1}")
    # All of them, as a faster tokenizer asks for ids without a gap.
    all_names = {f"\ue0f3{_SECRET}{rank}\ue0f4": rank for rank in range(special)}
    names = {token: f"\ue0f3{_SECRET}{rank}\ue0f4" for token, rank in given.items()}
    made = engine({token: rank + special for token, rank in ranks.items()}, pattern, all_names, names.values())
    first = names["<s>"]
    made.post_processor = processors.TemplateProcessing(single=[first, "$A"], special_tokens=[(first, begin)])
    return Tekken(made, str(config.get("version")), names, end, efforts)


def engine(
    ranks: dict[bytes, int], pattern: str, others: Mapping[str, int], special: Iterable[str]
) -> tokenizers.Tokenizer:
    """Byte-level BPE of tokens with these ids, which grow as their ranks do, on texts split by `pattern`.

    `others`: tokens that nothing merges to; `special`: which of them are found in a text.
    """
    written = {token: "".join(map(_AS_TEXT.__getitem__, token)) for token in ranks}
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    if not vocabulary.keys().isdisjoint(others):
        raise RanksError("a special token is an ordinary one, too")
    vocabulary |= others
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[left], written[right]) for left, right in pairs]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, byte_fallback=False, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return made


def _bytes_as_text() -> dict[int, str]:
    """How byte-level BPE writes a byte: as itself where it can be seen, else as one of the characters from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    text = {byte: chr(byte) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in text]
    return text | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_AS_TEXT = _bytes_as_text()
