"""Answers of /v1/responses and /v1/messages as real vLLM gave them (tests/real_vllm writes the data)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.prompt.reader import Reader
from router.prompt.request import read
from router.prompt.tokens import Tokenizer
from router.wire.stream import Answer, EventWatch, JsonWatch, UsageWatch
from tests.prompt.test_against_vllm import DATA, TINY

RECORDED: dict[str, dict[str, str]] = json.loads((DATA / "apis.json").read_bytes())


def seen(watch: EventWatch | JsonWatch, data: bytes, step: int) -> Answer:
    for start in range(0, len(data), step):
        watch.feed(data[start : start + step])
    return watch.answer()


@pytest.mark.parametrize("step", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_what_an_answer_tells(name: str, step: int) -> None:
    data = RECORDED[name]["answer"].encode()
    answer = seen(EventWatch() if "stream" in name else JsonWatch(), data, step)
    # The prompt was sent four times, whole and streamed to each route; the first time nothing was cached.
    cached = 0 if name == "responses" else 640
    assert answer == Answer(
        text="\n" * 9, finish_reason="length", prompt_tokens=642, completion_tokens=9, cached_tokens=cached
    )


def test_its_tokens_follow_the_prompt() -> None:
    reader = Reader(Tokenizer.load(TINY))
    for name, recorded in RECORDED.items():
        ask = read(recorded["path"], recorded["request"].encode())
        (prompt,) = reader.tokenize(ask)
        assert len(prompt) == 642
        answer = seen(EventWatch() if "stream" in name else JsonWatch(), recorded["answer"].encode(), 1 << 20)
        ids = reader.answer(ask, answer.text, finish_reason=answer.finish_reason)
        assert ids is not None
        assert len(ids) == 8


def events(*told: dict[str, Any]) -> Answer:
    data = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in told)
    return seen(EventWatch(), data.encode(), 1 << 20)


@pytest.mark.parametrize(
    "other",
    [
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
    ],
)
def test_more_than_plain_text_is_not_known(other: dict[str, Any]) -> None:
    words = {"type": "response.output_text.delta", "delta": "a"}
    assert events(words).text == "a"
    assert events(words, other).text is None


def test_ends_that_are_none() -> None:
    assert events({"type": "response.failed", "response": {"status": "failed"}}).failed
    assert events({"type": "error", "error": {"type": "overloaded_error"}}).failed
    assert events({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}).finish_reason == "stop"
    assert events({"type": "response.completed", "response": {"status": "completed"}}).finish_reason == "stop"


@pytest.mark.parametrize(
    "whole",
    [
        {"object": "response", "output": []},
        {"object": "response", "output": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}]},
        {"type": "message", "content": [{"type": "tool_use", "name": "f", "input": {}}]},
        {"type": "message", "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "name": "f"}]},
    ],
)
def test_a_whole_answer_of_more_than_one_text_is_not_known(whole: dict[str, Any]) -> None:
    assert seen(JsonWatch(), json.dumps(whole).encode(), 1 << 20).text is None


@pytest.mark.parametrize("nonsense", [-3, True, 2.0, 1 << 62, "7"])
def test_counts_of_messages_that_are_none_are_not_taken_for_some(nonsense: object) -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": nonsense, "output_tokens": nonsense}
    answer = seen(JsonWatch(), json.dumps({"type": "message", "content": [], "usage": usage}).encode(), 1 << 20)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, None, None)


def test_pieces_that_are_json_only_together_are_none() -> None:
    watch = EventWatch()
    for data in (b'{"choices": [{"text": "a"}]}', b'{"id": 1},2', b'{"id": [3', b'{"id": 4}]}'):
        watch.feed(b"data: " + data + b"\n\n")
    assert not watch.whole
    assert watch.answer().text is None


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_of_vectors_the_usage_alone_is_read(step: int) -> None:
    usage = {
        "prompt_tokens": 5,
        "total_tokens": 5,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    whole = {"object": "list", "data": [{"index": 0, "embedding": [0.25] * 3000}], "usage": usage}
    data, watch = json.dumps(whole).encode(), UsageWatch()
    for start in range(0, len(data), step):
        watch.feed(data[start : start + step])
    answer = watch.answer()
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, 4, 0)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"usage"', b'"usage"', b'{"usage":null}', b'"usage":[1]}', b'{"a":"usage"}']
)
def test_where_no_usage_is_told_none_is_read(data: bytes) -> None:
    watch = UsageWatch()
    watch.feed(data)
    assert watch.answer() == Answer()


MEMBERS: dict[str, list[object]] = {
    "error": [None, False, {"code": 500}],
    "object": ["chat.completion", "response", 1],
    "type": [None, "message"],
    "usage": [
        None,
        [],
        {"prompt_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 8}},
        {"prompt_tokens": 9.0, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": True}},
        {"prompt_tokens": 1 << 40, "completion_tokens": "1", "prompt_tokens_details": None},
        {"prompt_tokens": 10**30, "completion_tokens": None, "prompt_tokens_details": 1},
    ],
    "choices": [None, {}, [], [None], [{}], [{"text": "a"}, {"text": "b"}]],
}
CHOICE: dict[str, list[object]] = {
    "message": [
        None,
        "words",
        {},
        {"content": "words"},
        {"content": None, "tool_calls": [{"id": "a"}]},
        {"content": "words", "tool_calls": [], "reasoning": "", "reasoning_content": None},
        {"content": "words", "reasoning": "thoughts"},
        {"content": "words", "reasoning_content": {"a": 1}},
        {"content": [{"type": "text"}]},
    ],
    "text": [None, "more", 1],
    "token_ids": [None, [], [1, 2], [1, -1], [1, True], [1.0], {}, [1 << 32]],
    "finish_reason": [None, "stop", 1],
}


def as_any(body: bytes) -> Answer:
    """Read as an answer is that is not all ASCII."""
    return seen(JsonWatch(), body[:-1] + ', "\u00e9": "\u00e9"}'.encode(), 1 << 20)


def test_the_usual_answer_is_read_as_any_other_is() -> None:
    usual = {"usage": MEMBERS["usage"][2], "choices": [{"message": {"content": "words"}, "finish_reason": "stop"}]}
    bodies = [usual | {name: value} for name, values in MEMBERS.items() for value in values]
    bodies += [
        usual | {"choices": [{"index": 0, "message": message, "text": text} | {name: value}]}
        for message in CHOICE["message"]
        for text in CHOICE["text"]
        for name in ("token_ids", "finish_reason")
        for value in CHOICE[name]
    ]
    for body in bodies:
        data = json.dumps(body).encode()
        assert seen(JsonWatch(), data, 1 << 20) == as_any(data), body


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": [{"text": "a"}], "choices": [{"text": "b"}]}',
        b'{"choices": [{"text": "a"}], "choices": null}',
        b'{"choices": [{"text": "a", "text": "b"}], "usage": 1, "usage": {"prompt_tokens": 3}}',
        rb'{"ch\u006fices": [{"text": "\ud83d\ude00"}]}',
        b'{"choices": [{"text": "a"}], "other": ' + b"[" * 600 + b"]" * 600 + b"}",
    ],
)
def test_a_name_given_twice_or_in_escapes_is_read_as_in_any_other_answer(data: bytes) -> None:
    assert seen(JsonWatch(), data, 1 << 20) == as_any(data)


@pytest.mark.parametrize(
    "other", [rb'"\ud800"', b'"\xff"', b'"\t"', b"01", b"1.", b"NaN", b"nul", b"[1,]", b'{"a"}', rb'"\x"', b'"']
)
def test_of_what_is_no_json_nothing_is_read(other: bytes) -> None:
    data = b'{"choices": [{"text": "a", "other": %b}], "more": %b}' % (other, other)
    assert seen(JsonWatch(), data, 1 << 20) == Answer()
