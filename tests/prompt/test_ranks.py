"""A tokenizer given by ranks merges as ranks say: always the pair that makes the oldest token."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.tokens import Tokenizer, TokenizerError
from tests.prompt.tekken import PATTERN, SPECIAL, TOKENS, tekken

BEGIN = 1


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as directory:
        (Path(directory) / "tekken.json").write_text(json.dumps(tekken("v3")))
        return Tokenizer.load(Path(directory))


def by_ranks(text: str) -> list[int]:
    ids = []
    for word in re.findall(PATTERN, text):
        parts = [bytes((b,)) for b in word.encode()]
        while True:
            made = [a + b for a, b in pairwise(parts)]
            pairs = [(TOKENS.index(token), i) for i, token in enumerate(made) if token in TOKENS]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [SPECIAL + TOKENS.index(part) for part in parts]
    return ids


@settings(deadline=None)
@given(st.text(alphabet="thean dbc<s>é\n🙂", max_size=40))
def test_merges_follow_the_ranks(text: str) -> None:
    ids = by_ranks(text)
    assert tokenizer().encode(text, False) == ids
    assert tokenizer().encode(text, True) == [BEGIN, *ids]
    assert [list(piece) for piece in tokenizer().encode_pieces([text])] == [ids]
    assert tokenizer().decode(ids) == text


def test_what_it_knows() -> None:
    assert tokenizer().bounds is not None
    assert tokenizer().eos_token_ids == {2}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": {}, "vocab": []}'])
def test_no_tekken_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tekken\.json is no tekken file"):
        Tokenizer.load(tmp_path)
