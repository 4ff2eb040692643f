from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.chat import TemplateError
from router.prompt.reader import Reader
from router.prompt.tokens import Tokenizer, TokenizerError
from tests.prompt.test_against_vllm import TINY

if TYPE_CHECKING:
    from pathlib import Path

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def change(path: Path, **members: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | members))


@settings(deadline=None)  # the first one loads it
@given(st.text(max_size=80))
def test_the_tiny_tokenizer_keeps_any_text(text: str) -> None:
    tokenizer = tiny()
    assert tokenizer.decode(tokenizer.encode(text, False)) == text


_LOADED: list[Tokenizer] = []


def tiny() -> Tokenizer:
    if not _LOADED:
        _LOADED.append(Tokenizer.load(TINY))
    return _LOADED[0]


def test_what_a_tokenizer_tells() -> None:
    tokenizer = tiny()
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_token_ids) == (str(TINY), 4096, {2})
    assert tokenizer.encode("<|im_start|>user<|im_end|>", False)[::2] == [1, 2]
    with pytest.raises(ValueError, match="lone surrogates"):
        tokenizer.encode("\ud800", False)


def test_end_tokens_of_every_file_count(directory: Path) -> None:
    change(directory / "generation_config.json", eos_token_id=[7, 8])
    change(directory / "config.json", eos_token_id=9)
    change(directory / "tokenizer_config.json", eos_token={"content": "<|im_start|>", "special": True})
    assert Tokenizer.load(directory).eos_token_ids == {1, 7, 8, 9}


def test_tokenizer_json_is_enough(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == (None, frozenset())
    assert tokenizer.encode("hi", True) == tiny().encode("hi", False)


def test_where_the_chat_template_comes_from(directory: Path) -> None:
    def says(**arguments: Any) -> str:
        template = Tokenizer.load(directory).chat_template
        assert template is not None
        return template.render([USER], **arguments)

    assert says() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    change(directory / "tokenizer_config.json", chat_template="{{ eos_token }}")
    assert says().startswith("<|im_start|>")
    (directory / "chat_template.jinja").unlink()
    assert says() == "<|im_end|>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change(directory / "tokenizer_config.json", chat_template=named)
    assert (says(), says(tools=[])) == ("plain", "tools")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("other tools")
    assert (says(), says(tools=[])) == ("plain", "other tools")
    change(directory / "tokenizer_config.json", chat_template=[])
    with pytest.raises(TemplateError, match="no default"):
        says()


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "bos_token": "unheard of"}, [], []),
        ({"add_bos_token": True, "bos_token": None}, [], []),
    ],
)
def test_tokens_that_bound_a_text(directory: Path, config: dict[str, Any], before: list[int], after: list[int]) -> None:
    change(directory / "tokenizer_config.json", **{"bos_token": "<|im_start|>", **config})
    tokenizer = Tokenizer.load(directory)
    hi = tiny().encode("hi", False)
    assert tokenizer.encode("hi", True) == [*before, *hi, *after]
    assert tokenizer.encode("hi", False) == hi


def test_chats_that_the_engine_writes_in_code_are_told(directory: Path) -> None:
    assert Reader(Tokenizer.load(directory)).mode == f"tokens: {directory}"
    change(directory / "config.json", model_type="gpt_oss")
    told = "chats by its template, where the engine has code for them: they may differ"
    assert Reader(Tokenizer.load(directory)).mode == f"tokens: {directory} ({told})"


def test_a_limit_set_in_training_cuts_no_prompt(directory: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    change(directory / "tokenizer.json", truncation=truncation, padding=padding | {"pad_to_multiple_of": None})
    text = "The rivers run into the sea"
    assert Tokenizer.load(directory).encode(text, True) == tiny().encode(text, True)


def test_what_is_no_tokenizer_is_said_in_one_line(directory: Path) -> None:
    def why() -> str:
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.load(directory)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (directory / "tokenizer_config.json").write_text("{")
    assert why().startswith(f"{directory / 'tokenizer_config.json'} is not JSON: ")
    (directory / "tokenizer_config.json").write_text("[]")
    assert why() == f"{directory / 'tokenizer_config.json'} holds no JSON object"
    (directory / "tokenizer.json").write_text("{}")
    assert why().startswith(f"{directory / 'tokenizer.json'} is not a tokenizer: ")
    (directory / "tokenizer.json").unlink()
    assert why() == f"no tokenizer at {directory}: tokenizer.json is missing"
