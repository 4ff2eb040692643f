"""What can't be read of /v1/responses and /v1/messages, and what a template decides. What can: test_against_vllm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.prompt.chat import ChatTemplate
from router.prompt.reader import Reader
from router.prompt.request import Ask, read
from router.prompt.tokens import Tokenizer
from tests.prompt.templates import CHATML
from tests.prompt.test_against_vllm import TINY

USER = {"role": "user", "content": "x"}


def ask_of(path: str, **members: Any) -> Ask:
    return read(path, json.dumps({"model": "m", **members}).encode())


@pytest.mark.parametrize(
    "members",
    [
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "prompt": {"id": "p"}},
        {"input": "x", "truncation": "auto"},
        {"input": None},
        {"input": ["x"]},
        {"input": [{"type": "item_reference", "id": "1"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "abc"}]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": "x", "tools": [{"type": "custom", "name": "c"}]},
    ],
)
def test_responses_that_only_the_engine_can_read(members: dict[str, Any]) -> None:
    assert ask_of("/v1/responses", **members).kind == "other"


@pytest.mark.parametrize(
    "members",
    [
        {"messages": []},
        {"messages": ["x"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "novel"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [USER], "system": 5},
        {"messages": [USER, {"role": "system", "content": [{"type": "tool_removal"}]}]},
        {"messages": [USER], "tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "tool_reference"}]}]}]},
    ],
)
def test_messages_that_only_the_engine_can_read(members: dict[str, Any]) -> None:
    assert ask_of("/v1/messages", **members).kind == "other"


def test_bounds_on_the_answer() -> None:
    assert ask_of("/v1/responses", input="x", max_output_tokens=7, n=3).max_tokens == 7
    assert ask_of("/v1/responses", input="x", n=3).n == 1
    assert ask_of("/v1/messages", messages=[USER], max_tokens=9).max_tokens == 9
    assert ask_of("/v1/embeddings", input="x", max_tokens=9).max_tokens == 1


def test_tools_of_a_namespace_and_tools_that_run_elsewhere() -> None:
    inner = {"type": "function", "name": "f", "parameters": {}}
    ask = ask_of(
        "/v1/responses",
        input=[{"type": "function_call", "namespace": "n", "name": "f", "arguments": "{}", "call_id": "1"}],
        tools=[{"type": "namespace", "name": "n", "tools": [inner, {"type": "other"}]}, {"type": "web_search"}],
    )
    assert ask.tools == [{"type": "function", "function": {"name": "n__f", "parameters": {}}}]
    assert ask.messages[0]["tool_calls"][0]["function"]["name"] == "n__f"


def reader(template: str) -> Reader:
    return Reader(Tokenizer("t", Tokenizer.load(TINY)._engine, chat_template=ChatTemplate({"default": template}, {})))


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (FIRST_ONLY, "system:Be brief.Be kind.Be long.;user:x;user:y;"),
        (FIRST_ONLY.replace("not loop.first", "false"), "system:Be brief.;user:x;system:Be kind.Be long.;user:y;"),
    ],
)
def test_the_template_decides_where_system_messages_go(template: str, text: str) -> None:
    blocks = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be long."}]
    chat = [USER, {"role": "system", "content": blocks}, {"role": "user", "content": "y"}]
    ask = ask_of("/v1/messages", messages=chat, system="Be brief.")
    tokens = reader(template)
    assert tokens.tokenizer is not None
    assert tokens.tokenize(ask) == [tokens.tokenizer.encode(text, False)]


EFFORT = "{{ messages[0].content }}{{ reasoning_effort }} {{ enable_thinking }}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (EFFORT, "xnone False"),
        (
            "{{ messages[0].content }}{{ 'no' if reasoning_effort == 'never' else reasoning_effort is defined }}",
            "xTrue",
        ),
        ("{{ messages[0].content }}{{ 'max' if reasoning_effort != 'low' else 'low' }}", "xlow"),
    ],
)
def test_the_template_decides_how_thinking_is_turned_off(template: str, text: str) -> None:
    ask = ask_of("/v1/messages", messages=[USER], thinking={"type": "disabled"}, output_config={"effort": "high"})
    tokens = reader(template)
    assert tokens.tokenizer is not None
    assert tokens.tokenize(ask) == [tokens.tokenizer.encode(text, False)]


def test_embeddings_are_texts_ids_or_chats() -> None:
    tokens = reader(CHATML)
    assert tokens.tokenizer is not None
    (text,) = tokens.tokenize(ask_of("/v1/embeddings", input="The sea"))
    assert text == tokens.tokenizer.encode("The sea", True)
    assert tokens.tokenize(ask_of("/v1/embeddings", input=["a", "b"])) == [
        tokens.tokenizer.encode("a", True),
        tokens.tokenizer.encode("b", True),
    ]
    assert tokens.tokenize(ask_of("/v1/embeddings", input=[[1, 2], [3]])) == [[1, 2], [3]]
    for name in ("messages", "input"):
        (chat,) = tokens.tokenize(ask_of("/v1/embeddings", **{name: [USER]}))
        assert chat == tokens.tokenizer.encode("<|im_start|>user\nx<|im_end|>\n", False)
    assert ask_of("/v1/embeddings", input="x", padding="max_length").kind == "other"
    assert ask_of("/v1/embeddings", input="x", padding="do_not_pad").kind == "completion"
    assert ask_of("/v1/completions", prompt="x", prompt_embeds="AA==").kind == "other"
    (chat,) = tokens.tokenize(ask_of("/v1/embeddings", messages=[USER]))
    assert chat == tokens.tokenizer.encode("<|im_start|>user\nx<|im_end|>\n", False)
