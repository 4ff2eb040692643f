"""Plain files of ranks are read where all that they leave out is known, and refused in one line where it isn't."""

from __future__ import annotations

import base64
import json
import logging
import unicodedata
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.readers import Readers
from router.prompt.tokens import Tokenizer, TokenizerError
from tests.prompt.tekken import PATTERN, TOKENS
from tests.prompt.test_ranks import by_ranks

FIRST = len(TOKENS)
CONFIG = {
    "added_tokens_decoder": {str(FIRST): {"content": "<|user|>"}, str(FIRST + 5): {"content": "<|end|>"}},
    "eos_token": "<|end|>",
    "chat_template": "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
}
CODE = f"""
open({{path!r}}, "w").write("it was run")
class Tokenizer:
    pat_str = "|".join(
        [
            {PATTERN.split("|", 1)[0]!r},
            {PATTERN.split("|", 1)[1]!r},
        ]
    )
"""


def write(directory: Path, name: str, config: dict[str, Any] | None = None, code: str | None = None) -> None:
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS)]
    (directory / name).write_bytes(b"".join(lines))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if code is not None:
        (directory / "tokenization_m.py").write_text(code)


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        ran = Path(directory) / "ran"
        write(Path(directory), name, CONFIG, None if name == "qwen.tiktoken" else CODE.format(path=str(ran)))
        found = Tokenizer.load(Path(directory))
        assert not ran.exists()
        return found


@settings(deadline=None)
@given(st.lists(st.sampled_from(["the", " and", "<|user|>", "<|end|>", "<|", "é", "e\u0301", "🙂", "abcd", "\n\n"])))
def test_tokens_are_by_rank_and_special_ones_are_found(words: list[str]) -> None:
    expected = []
    special = {"<|user|>": FIRST, "<|end|>": FIRST + 5}
    rest = ""
    for word in words:
        if word in special:
            expected += [token - 60 for token in by_ranks(rest)] + [special[word]]
            rest = ""
        else:
            rest += word
    expected += [token - 60 for token in by_ranks(rest)]
    found = tokenizer("tiktoken.model")
    assert found.encode("".join(words), True) == expected
    assert [token for ids in found.encode_pieces(found.cutter.cut("".join(words))) for token in ids] == expected
    assert found.decode(expected) == "".join(words)


def test_what_else_a_directory_says() -> None:
    found = tokenizer("tiktoken.model")
    assert found.eos_token_ids == {FIRST + 5}
    assert found.cutter.marks == ("<|user|>", "<|end|>")
    assert found.chat_template is not None
    assert found.chat_template.render([{"role": "user", "content": "x"}]) == "<|user|>x<|end|>"


def test_of_qwens_all_is_known_by_its_name() -> None:
    found = tokenizer("qwen.tiktoken")
    special = "<|endoftext|><|im_start|><|im_end|><|extra_204|>"
    assert found.encode(special, False) == [FIRST, FIRST + 1, FIRST + 2, FIRST + 207]
    text = "e\u0301"
    assert found.encode(text, True) == found.encode(unicodedata.normalize("NFC", text), True)
    assert found.encode("the123", False) == [
        TOKENS.index(b"the"),
        *(TOKENS.index(digit) for digit in (b"1", b"2", b"3")),
    ]


@pytest.mark.parametrize(
    ("name", "config", "code", "why"),
    [
        ("tiktoken.model", None, "pat_str = 'x'", "needs tokenizer_config.json with added_tokens_decoder"),
        ("tiktoken.model", CONFIG, None, "does not say where texts are split"),
        ("tiktoken.model", CONFIG, "pat_str = load()", "does not say where texts are split"),
        ("tiktoken.model", CONFIG, "pat_str = 'a'\nPAT_STR = 'b'", "does not say where texts are split"),
        ("tiktoken.model", CONFIG, "pat_str = '('", "tiktoken.model: "),
        ("tiktoken.model", CONFIG, "pat_str =", "tokenization_m.py cannot be read: "),
        (
            "tiktoken.model",
            CONFIG,
            "pat_str = 'a'\nclass T:\n def build_inputs_with_special_tokens(self): pass",
            "only in the model's code",
        ),
        ("tiktoken.model", {"added_tokens_decoder": {"1": {}}}, "pat_str = 'x'", "added token without content"),
        (
            "tiktoken.model",
            {"added_tokens_decoder": {"900": {"content": "the"}}},
            "pat_str = 'x'",
            "an ordinary one, too",
        ),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(
    name: str, config: dict[str, Any] | None, code: str | None, why: str, tmp_path: Path
) -> None:
    write(tmp_path, name, config, code)
    with pytest.raises(TokenizerError, match=why) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\n\x0e\n\x05<unk>\x15", "no list of ranks; sentencepiece's must be saved as tokenizer.json"),
        (b"YQ== x\n", "no list of ranks"),
        (b"YQ== 1\nYg== 1\n", "stands twice"),
        (b"YQ== 1\nYg== 2\n", "no token for some bytes"),
        (b"", "stands twice"),
    ],
)
def test_no_file_of_ranks(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=why):
        Tokenizer.load(tmp_path)


def test_a_model_whose_tokenizer_cannot_be_read_is_routed_by_bytes_and_it_is_said_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "tiktoken.model", CONFIG)
    readers = Readers("", 1 << 20)
    with caplog.at_level(logging.WARNING, "warmroute.prompt"):
        assert not readers.find("m", str(tmp_path)).exact
    assert (
        f"model m: the tokenizer in {tmp_path} is of no use: {tmp_path / 'tiktoken.model'} does not say" in caplog.text
    )
