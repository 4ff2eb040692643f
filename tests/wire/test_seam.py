"""The second replica's events, made to follow the first one's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.wire.seam import Seam
from router.wire.stream import EventWatch, Said, failed_at

SAID = Said(text="ab", events=2, identity={"id": "chatcmpl-1", "created": 7, "model": "m"}, role=True)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    identity = {"id": "chatcmpl-2", "object": "chat.completion.chunk", "created": 9, "model": "m2"}
    return {**identity, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}


def as_first(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "id": "chatcmpl-1", "created": 7, "model": "m"}


def test_identity_and_role_are_the_first_ones() -> None:
    seam = Seam(SAID, 2)
    text = chunk({"content": "é 你"}, system_fingerprint="vllm-b")
    given = seam.feed(event(chunk({"role": "assistant", "content": ""})) + event(text) + b"data: [DONE]\n\n")
    assert given == event(as_first(text)) + b"data: [DONE]\n\n"
    assert (seam.ended, seam.spoilt) == (True, False)


def test_a_role_beside_text_goes_alone() -> None:
    assert Seam(SAID, 2).feed(event(chunk({"role": "assistant", "content": "c"}))) == event(
        as_first(chunk({"content": "c"}))
    )


def test_the_first_role_is_kept() -> None:
    opening = chunk({"role": "assistant", "content": ""})
    assert Seam(Said(), 0).feed(event(opening)) == event(opening)


@pytest.mark.parametrize(("told", "prompt"), [(None, 98), (97, 97)])
def test_tokens_are_those_of_one_answer(told: int | None, prompt: int) -> None:
    said = Said(text="ab", events=2, prompt_tokens=told, identity=SAID.identity, role=True)
    usage = {
        "prompt_tokens": 100,
        "total_tokens": 130,
        "completion_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 99},
    }
    given = Seam(said, 2).feed(event({"id": "x", "created": 1, "model": "m", "choices": [], "usage": usage}))
    assert json.loads(given.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": prompt,
        "total_tokens": prompt + 32,
        "completion_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": prompt},
    }


def test_comments_pass() -> None:
    assert Seam(SAID, 2).feed(b": keep-alive\n\n") == b": keep-alive\n\n"


@pytest.mark.parametrize(
    "piece",
    [
        event(chunk({"reasoning": "hm"})),
        event(chunk({"tool_calls": [{}]})),
        event({"choices": [{"index": 1, "text": "x"}]}),
        event({"error": {"code": 500}}),
        b"data: {\n\n",
        b"event: x\ndata: {}\n\n",
    ],
)
def test_what_is_no_more_of_the_text_spoils_it(piece: bytes) -> None:
    seam = Seam(SAID, 2)
    text = event(chunk({"content": "c"}))
    assert seam.feed(text + piece + text) == event(as_first(chunk({"content": "c"})))
    assert (seam.spoilt, seam.ended) == (True, False)


def test_what_was_said_is_counted_up_to_the_last_text() -> None:
    watch = EventWatch()
    usage = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    pieces = [
        chunk({"role": "assistant", "content": ""}, usage=usage),
        chunk({"content": "a"}, usage=usage | {"completion_tokens": 1}),
        chunk({"content": ""}, usage=usage | {"completion_tokens": 2}),
        chunk({"content": "é"}, usage=usage | {"completion_tokens": 3}),
        chunk({"content": ""}, usage=usage | {"completion_tokens": 4}),  # half a character
    ]
    for each in pieces:
        watch.feed(event(each))
    assert watch.said() == Said(
        text="aé",
        events=3,
        tokens=3,
        prompt_tokens=5,
        identity={"id": "chatcmpl-2", "created": 9, "model": "m2"},
        role=True,
        ended=False,
    )
    assert EventWatch().said() == Said()


@pytest.mark.parametrize("tokens", [63, 64, 65, 200])
def test_a_text_of_many_tokens_is_all_of_them(tokens: int) -> None:
    watch = EventWatch()
    for number in range(tokens):
        watch.feed(event(chunk({"content": f" {number}"})))
    assert watch.answer().text == "".join(f" {number}" for number in range(tokens))


def test_an_engines_own_failure_is_told_from_all_else() -> None:
    error = b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    assert failed_at(error) == 0
    assert failed_at(b'data: {"choices":[]}\n\n' + error) == 22
    assert failed_at(error.replace(b"500", b"400")) == -1
    assert failed_at(b'data: {"choices":[{"text":"data: {\\"error\\""}]}\n\n') == -1
    assert failed_at(error[:30]) == -1
