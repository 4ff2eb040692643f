"""Tokenizers that are a list of ranks only: tiktoken's files, a line each of a token in base64 and its rank.

Such a file says neither where texts are split before they are merged nor which special tokens there are. For
qwen.tiktoken both are known. Otherwise special tokens come from tokenizer_config.json, and the split from a constant in
the model's own tokenization_*.py, which is read as text and never run.
"""

from __future__ import annotations

import ast
import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import normalizers

from router.prompt import ranks
from router.prompt.ranks import RanksError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import tokenizers

_NAMES = ("*.tiktoken", "tiktoken.model", "tokenizer.model")
_QWEN = "qwen.tiktoken"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_BY_CODE = "build_inputs_with_special_tokens"
_NORMALIZERS = {
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
}


def find(directory: Path) -> Path | None:
    """The file of ranks in a model's directory."""
    return next((path for name in _NAMES for path in sorted(directory.glob(name)) if path.is_file()), None)


def load(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a file of ranks; `config`: what stands in tokenizer_config.json. Raises RanksError."""
    found = _ranks(path)
    if path.name == _QWEN:
        special = {token: len(found) + i for i, token in enumerate(_QWEN_SPECIAL)}
        said = _Said(splits={_QWEN_SPLIT}, forms={"NFC"})
    else:
        special, said = _special(path, config), _Said()
        for code in sorted(path.parent.glob("tokeniz*.py")):
            said.read(code)
    if len(said.splits) != 1:
        raise RanksError(f"{path} does not say where texts are split, nor does a constant pat_str in tokenization_*.py")
    if said.bounds or len(said.forms) > 1:
        raise RanksError(f"{path}: what its texts begin with, or how they are normalized, is only in the model's code")
    (split,) = said.splits
    try:
        engine = ranks.engine(found, split, special, special)
    except Exception as error:  # the library raises bare Exception for an expression that it cannot read
        raise RanksError(f"{path}: {error}") from error
    for form in said.forms:
        engine.normalizer = _NORMALIZERS[form]()
    return engine


def _ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        found = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error):
        hint = "sentencepiece's must be saved as tokenizer.json (transformers' save_pretrained does)"
        raise RanksError(f"{path} is no list of ranks; {hint}") from None
    if len(found) != len(lines) or len(set(found.values())) != len(lines) or not found or min(found.values()) < 0:
        raise RanksError(f"{path} is no list of ranks: a token or a rank stands twice in it")
    if any(bytes((byte,)) not in found for byte in range(256)):
        raise RanksError(f"{path} has no token for some bytes")
    return found


def _special(path: Path, config: dict[str, Any]) -> dict[str, int]:
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict) or not added:
        raise RanksError(f"{path} needs tokenizer_config.json with added_tokens_decoder: its special tokens")
    special = {}
    for number, token in added.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not content or not str(number).isdecimal():
            raise RanksError(f"{path.parent / 'tokenizer_config.json'} has an added token without content")
        special[content] = int(number)
    return special


@dataclass(slots=True)
class _Said:
    """What a model's code says in constants."""

    splits: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)
    """Unicode normal forms that it names."""
    bounds: bool = False
    """Whether code of its own puts something around texts."""

    def read(self, path: Path) -> None:
        """Raises RanksError."""
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RanksError(f"{path} cannot be read: {error}") from error
        for name, value in _assignments(tree):
            if name.lower() == "pat_str" and (text := _constant(value)) is not None:
                self.splits.add(text)
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name):
                    self.bounds = self.bounds or name == _BY_CODE
                case ast.Call(func=ast.Attribute(attr="normalize"), args=[ast.Constant(value=form), *_]):
                    if form in _NORMALIZERS:
                        self.forms.add(str(form))


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _constant(value: ast.expr) -> str | None:
    """A text, or several joined, as they stand in the code."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[parts], keywords=[]
        ):
            items = parts.elts if isinstance(parts, ast.List | ast.Tuple) else []
            texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            return between.join(texts) if texts and len(texts) == len(items) else None
    return None
