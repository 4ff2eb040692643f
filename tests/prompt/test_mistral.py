"""Chats in mistral's own format, against what real vLLM made of them (tests/real_vllm/mistral_chats.py)."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.blocks import NO_EXTRA
from router.prompt.bodies import Bodies, marks
from router.prompt.memo import Memo
from router.prompt.reader import PromptError, Reader
from router.prompt.request import Ask, Beginning, read
from router.prompt.tokens import Tokenizer
from tests.prompt.tekken import VERSIONS, tekken
from tests.prompt.test_against_vllm import DATA, TINY

CHATS = [json.loads(line) for line in (DATA / "mistral.jsonl").read_text("utf-8").splitlines()]
USER = {"role": "user", "content": "hi"}


@lru_cache
def tokenizer(version: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        (Path(directory) / "tekken.json").write_text(json.dumps(tekken(version)))
        return Tokenizer.load(Path(directory))


def ask_of(body: dict[str, Any]) -> Ask:
    return read("/v1/chat/completions", json.dumps(body).encode())


def ids(version: str, *messages: dict[str, Any], **members: Any) -> list[int]:
    (prompt,) = Reader(tokenizer(version)).tokenize(ask_of({"messages": messages, **members}))
    return list(prompt)


def shown(version: str, *messages: dict[str, Any], **members: Any) -> str:
    """The prompt with control tokens by their numbers."""
    found = tokenizer(version)
    text = ""
    for token in ids(version, *messages, **members):
        text += f"<{token}>" if token < 60 else found.decode([token])
    return text


@pytest.mark.parametrize("version", VERSIONS)
def test_token_ids(version: str) -> None:
    memo = Memo(1 << 24)
    reader = Reader(tokenizer(version), memo)
    taken = 0
    for case in CHATS:
        expected = case["prompt_token_ids"][version]
        if expected is None:
            continue
        assert reader.tokenize(ask_of(case["body"])) == [expected], case["body"]
        (row,) = reader.rows(ask_of(case["body"]))
        hasher = reader.hasher("sha256", "0")
        assert row.chain(hasher, 4, NO_EXTRA).keys == hasher.chain(expected, 4).keys
        assert row.units() == expected
        taken += 1
    assert taken >= 25


def test_the_vectors_have_all_that_a_chat_may_have() -> None:
    bodies = [case["body"] for case in CHATS if case["prompt_token_ids"]["v13"] is not None]
    messages = [message for body in bodies for message in body["messages"]]
    assert {message["role"] for message in messages} == {"system", "developer", "user", "assistant", "tool"}
    assert any(body.get("tools") for body in bodies)
    assert any(body.get("continue_final_message") for body in bodies)
    assert any(isinstance(message.get("content"), list) for message in messages)
    assert any("reasoning" in message for message in messages)


def test_control_tokens_in_a_text_are_text() -> None:
    text = "[INST] a [/INST] </s><s>"
    prompt = ids("v7", {"role": "user", "content": text})
    assert [token for token in prompt if token < 60] == [1, 3, 4]
    assert tokenizer("v7").decode(prompt[2:-1]) == text


def test_one_token_begins_a_chat_whatever_is_asked_for() -> None:
    assert shown("v7", USER) == shown("v7", USER, add_special_tokens=True) == "<1><3>hi<4>"


@settings(deadline=None)
@given(st.text(alphabet="the [INST]</s>\ue0f3\ue0f40123456789abcdef", max_size=60))
def test_no_text_makes_a_control_token(text: str) -> None:
    assert min(tokenizer("v7").encode(text, False), default=60) >= 60


def test_an_image_begins_what_is_not_the_engines() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]}
    for version in ("v3", "v13"):
        ask = ask_of(body)
        assert Reader(tokenizer(version)).tokenize(ask)
        assert ask.inexact
    # It comes before the text that leads to it; and before a system prompt's text what it is still the engine's own.
    asked = shown("v3", {"role": "system", "content": "the"}, *body["messages"])
    assert asked.startswith("<1><3>the\n\n<")
    assert asked.endswith("see<4>")


@pytest.mark.parametrize(
    ("version", "messages", "why"),
    [
        ("v3", [{"role": "assistant", "content": "x", "reasoning": "y"}, USER], "takes no thoughts"),
        ("v3", [USER, {"role": "assistant"}, USER], "says nothing"),
        ("v7", [USER, {"role": "assistant", "content": "x"}], "ends with an answer"),
        ("v7", [{"role": "nobody", "content": "x"}], "role is not known"),
        ("v7", [{"role": "user", "content": [{"type": "file"}]}], "kind that the model does not take"),
        ("v7", [{"role": "user", "content": ["x"]}], "part is an object"),
        ("v7", [{"role": "user", "content": 5}], "text or a list"),
        ("v11", [USER, {"role": "assistant", "tool_calls": [5]}, USER], "object with a function"),
        ("v13", [USER, {"role": "tool", "content": "x"}], "is none here"),
    ],
)
def test_what_the_engine_refuses_has_no_prompt(version: str, messages: list[Any], why: str) -> None:
    with pytest.raises(PromptError, match=why):
        ids(version, *messages)


def test_a_message_that_is_refused_is_not_written_by_itself() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}, USER]
    for version, by_itself in (("v3", False), ("v7", True)):
        template = tokenizer(version).chat_template
        assert template is not None
        assert (template.render_parts(chat) is not None) == by_itself


def test_settings_of_the_model() -> None:
    assert shown("v15", USER) == '<1><27>{"reasoning_effort": "none"}<28><3>hi<4>'
    assert shown("v15", USER, reasoning_effort="high") == '<1><27>{"reasoning_effort": "high"}<28><3>hi<4>'
    with pytest.raises(PromptError, match="no reasoning_effort low"):
        ids("v15", USER, reasoning_effort="low")
    assert shown("v13", USER, reasoning_effort="low") == "<1><3>hi<4>"


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text + " long" * 300}


def call(*ids: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"x": 1}'}
    return {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}


def result(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": "the result" + " r" * 99}


A, B = "aaaaaaaaa", "bbbbbbbbb"
turn = st.sampled_from(
    [
        [said("user", "a"), said("assistant", "b")],
        [said("user", "c"), said("assistant", "d ")],
        [
            said("user", "a"),
            call("aaaaaaaaa", "bbbbbbbbb"),
            result("aaaaaaaaa"),
            result("bbbbbbbbb"),
            said("assistant", "e"),
        ],
        [
            said("user", "a"),
            call("aaaaaaaaa", "bbbbbbbbb"),
            result("bbbbbbbbb"),
            result("aaaaaaaaa"),
            said("assistant", "e"),
        ],
        [said("user", "a"), call("ccccccccc"), result("ccccccccc"), call("ddddddddd"), result("ddddddddd")],
        [said("user", "a"), said("user", "b"), said("assistant", "x"), said("assistant", "y ")],
        [said("user", "a"), said("system", "now"), said("user", "b"), said("assistant", "x")],
    ]
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(VERSIONS),
    st.sampled_from([[], [said("system", "be")], [said("system", "be"), said("system", "so")]]),
    st.lists(turn, min_size=2, max_size=6),
    st.sampled_from([None, TOOLS]),
)
def test_what_is_known_of_a_chat_changes_nothing(
    version: str, chat: list[Any], turns: list[list[Any]], tools: list[Any] | None
) -> None:
    memo = Memo(1 << 24)
    reader = Reader(tokenizer(version), memo)
    for more in turns:
        for members in ({}, {"add_special_tokens": True}):
            body = json.dumps({"messages": [*chat, more[0]], "tools": tools, **members}).encode()
            found = marks(body)
            ask = read("/v1/chat/completions", body, Beginning(found, Bodies(memo.bodies).find(body, found)))
            (row,) = reader.rows(ask)
            (expected,) = reader.tokenize(read("/v1/chat/completions", body))
            assert row.units() == expected
            hasher = reader.hasher("sha256", "0")
            assert row.chain(hasher, 16, NO_EXTRA).keys == hasher.chain(expected, 16).keys  # type: ignore[arg-type]
        chat = [*chat, *more]


@pytest.mark.parametrize(("version", "tools"), [("v3", None), ("v7", None), ("v13", TOOLS), ("v15", TOOLS)])
def test_only_the_end_of_a_long_chat_is_read(version: str, tools: list[Any] | None) -> None:
    memo = Memo(1 << 24)
    reader = Reader(tokenizer(version), memo)
    chat: list[Any] = []
    for number in range(8):
        chat += [said("user", f"{number}")]
        body = json.dumps({"tools": tools, "messages": chat}).encode()
        found = marks(body)
        ask = read("/v1/chat/completions", body, Beginning(found, Bodies(memo.bodies).find(body, found)))
        (row,) = reader.rows(ask)
        row.chain(reader.hasher("sha256", "0"), 16, NO_EXTRA)
        if number > 3:
            assert ask.messages == chat[-2:]
        chat += [said("assistant", f"{number}")]


def test_the_other_apis() -> None:
    body = {"system": "be", "messages": [USER, {"role": "system", "content": "brief"}, USER], "max_tokens": 5}
    ask = read("/v1/messages", json.dumps({**body, "thinking": {"type": "disabled"}}).encode())
    (prompt,) = Reader(tokenizer("v15")).tokenize(ask)
    other = [{"role": "system", "content": "bebrief"}, USER, USER]
    assert prompt == ids("v15", *other, reasoning_effort="none")
    ask = read("/v1/responses", json.dumps({"input": "hi", "instructions": "be"}).encode())
    assert Reader(tokenizer("v7")).tokenize(ask) == [ids("v7", {"role": "system", "content": "be"}, USER)]


def test_a_version_that_is_not_known_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken("v99") | {"special_tokens": None}))
    with caplog.at_level(logging.WARNING, "warmroute.prompt"):
        found = Tokenizer.load(tmp_path)
    assert f"{tmp_path}: how chats of version v99 are written is not known here" in caplog.text
    assert found.chat_template is None
    assert "it has no chat template" in Reader(found).mode


def test_mistrals_files_are_taken_where_the_weights_are_in_its_form(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken("v7")))
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).vocab_size == 4096
    (tmp_path / "consolidated.safetensors").touch()
    found = Tokenizer.load(tmp_path)
    assert found.encode("hi", False) == tokenizer("v7").encode("hi", False)
    assert Reader(found).mode == f"tokens: {tmp_path} (chats in mistral's format, version 7)"
