"""Tokenizers that are given by their tokens' ranks: mistral's tekken.json.

A rank is both a token's age and, moved by the number of special tokens, its id. Which pairs merge follows from it: a
token was made of two older ones, and older tokens are merged first.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from pathlib import Path


class RanksError(Exception):
    """The file isn't what its name says; one line."""


def tekken(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tekken.json. Special tokens are never found in text, as with mistral's own tokenizer; the
    begin-of-text token is put before it where special tokens are asked for. Raises RanksError."""
    try:
        whole: dict[str, Any] = json.loads(path.read_bytes())
        config = whole["config"]
        special = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"]) - special
        ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in whole["vocab"][:size]}
        pattern = str(config["pattern"])
        given = {token["token_str"]: int(token["rank"]) for token in whole.get("special_tokens") or ()}
        begin = given["<s>"] if given else 1
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RanksError(f"{path} is no tekken file: {type(error).__name__} {error}") from None
    return _engine(ranks, pattern, special, begin)


def _engine(ranks: dict[bytes, int], pattern: str, special: int, begin: int) -> tokenizers.Tokenizer:
    written = {token: "".join(map(_AS_TEXT.__getitem__, token)) for token in ranks}
    vocabulary = {written[token]: rank + special for token, rank in ranks.items()}
    # No text has this name: bytes are written without spaces.
    start = " <s>"
    vocabulary[start] = begin
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[left], written[right]) for left, right in pairs]
    engine = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=False, byte_fallback=False, ignore_merges=True)
    )
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.TemplateProcessing(single=[start, "$A"], special_tokens=[(start, begin)])
    return engine


def _bytes_as_text() -> dict[int, str]:
    """How byte-level BPE writes a byte: as itself where it can be seen, else as one of the characters from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    text = {byte: chr(byte) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in text]
    return text | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_AS_TEXT = _bytes_as_text()
