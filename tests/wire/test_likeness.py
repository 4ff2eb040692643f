"""Events that differ in their text alone: reading them by that is reading them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.wire.likeness import likeness
from router.wire.stream import EventWatch

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": 'm"content":"',
    "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None, "token_ids": None}],
}
COMPLETION: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "text": "x", "finish_reason": None}], "usage": None}


def line(event: dict[str, Any], text: str | None = None) -> bytes:
    if text is not None:
        choice = event["choices"][0]
        where = {"delta": {**choice["delta"], "content": text}} if "delta" in choice else {"text": text}
        event = {**event, "choices": [{**choice, **where}]}
    return b"data: " + orjson.dumps(event)


@pytest.mark.parametrize("event", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "text", ["", "a", "b", " word", 'quo"te', "back\\slash", "\n\t\x00", "é\u2028\U0001f600", '"}]}']
)
def test_the_text_of_an_event_that_is_alike(event: dict[str, Any], text: str) -> None:
    known = likeness(line(event), event)
    assert known is not None
    assert known.text(line(event, text)) == text
    escaped = b"data: " + json.dumps(orjson.loads(line(event, text)[6:]), separators=(",", ":")).encode()
    assert known.text(escaped) in (text, None)


def other(**changes: Any) -> dict[str, Any]:
    return {**CHAT, "choices": [{**CHAT["choices"][0], **changes}]}


@pytest.mark.parametrize(
    "event",
    [
        {**CHAT, "usage": {"prompt_tokens": 1}},
        {**CHAT, "error": {"code": 500}},
        {**CHAT, "choices": CHAT["choices"] * 2},
        {**CHAT, "choices": []},
        other(index=1),
        other(finish_reason="stop"),
        other(token_ids=[1]),
        other(delta={"role": "assistant", "content": ""}),
        other(delta={"content": "x", "reasoning": "y"}),
        other(delta={"content": None, "tool_calls": [{"content": "x"}]}),
        other(delta={"content": None}),
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
    ],
)
def test_an_event_that_does_more_than_add_text_is_no_model_for_others(event: dict[str, Any]) -> None:
    assert likeness(line(event), event) is None


@pytest.mark.parametrize(
    "wrong",
    [
        line({**CHAT, "created": 2}),
        line(CHAT)[:-1],
        line(CHAT) + b" ",
        line(CHAT).replace(b'"content":"x"', b'"content":"x","role":"y"'),
        line(CHAT).replace(b'"content":"x"', b'"content":"x\\"'),
        line(CHAT).replace(b'"content":"x"', b'"content":"\xff"'),
        line(CHAT).replace(b'"content":"x"', b'"content":"\x01"'),
        line(CHAT).replace(b'"content":"x"', b'"content":"\\ud800"'),
        b"",
    ],
)
def test_what_is_not_alike_or_no_json_is_none(wrong: bytes) -> None:
    known = likeness(line(CHAT), CHAT)
    assert known is not None
    assert known.text(wrong) is None


EVENTS = st.one_of(
    st.text().map(lambda text: line(CHAT, text)),
    st.text().map(lambda text: line(COMPLETION, text)),
    st.sampled_from(
        [
            line(other(delta={"role": "assistant", "content": ""})),
            line(other(finish_reason="stop")),
            line(other(token_ids=[7])),
            line(other(delta={"tool_calls": [{}]})),
            line({**CHAT, "created": 2}),
            line({**CHAT, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
            line({**CHAT, "usage": {"prompt_tokens": 9, "completion_tokens": 2}}),
            *(b"data: [DONE]", b": comment", b"data: {", b'data: {"error":{"code":500}}', b"event: x", b"data:"),
        ]
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(1, 12)), max_size=12), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_a_stream_is_read_as_it_would_be_event_by_event(parts: list[tuple[bytes, int]], end: bytes) -> None:
    watch, plain = EventWatch(), EventWatch()
    plain._tries = 0
    for event, times in parts:
        for _ in range(times):
            watch.feed(event + end)
            plain.feed(event + end)
    assert watch.whole == plain.whole
    assert watch.said() == plain.said()
    assert watch.answer() == plain.answer()
    assert (watch._events, watch._opaque, watch._text) == (plain._events, plain._opaque, plain._text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(1, 12)), max_size=12), st.data())
def test_it_is_read_so_wherever_its_pieces_end(parts: list[tuple[bytes, int]], data: st.DataObject) -> None:
    """Behind part of a line, what looks like an event is the rest of that line."""
    stream = b"".join([(event + b"\n\n") * times for event, times in parts])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    # Most pieces are whole events, as engines send them.
    ends = [at + 2 for at in range(len(stream)) if stream[at : at + 2] == b"\n\n"]
    places = sorted({0, *cuts, *[end for end in ends if data.draw(st.integers(0, 9))], len(stream)})
    watch, plain = EventWatch(), EventWatch()
    plain._tries = 0
    for begin, end in itertools.pairwise(places):
        watch.feed(stream[begin:end])
    plain.feed(stream)
    assert watch.whole == plain.whole
    assert watch.said() == plain.said()
    assert watch.answer() == plain.answer()


def test_a_piece_that_is_one_event_is_read_as_it_comes() -> None:
    known = likeness(line(CHAT), CHAT)
    assert known is not None
    assert known.text_of(line(CHAT, "word") + b"\n\n") == "word"
    for piece in (line(CHAT), line(CHAT) + b"\n", line(CHAT) + b"\n\n" + line(CHAT, "b") + b"\n\n", b"\n\n"):
        assert known.text_of(piece) is None


def test_a_long_stream_is_read_by_likeness() -> None:
    watch = EventWatch()
    for number in range(64):
        watch.feed(line(CHAT, f"word {number}") + b"\n\n")
    assert watch._likeness is not None
    assert watch.answer().text == "".join(f"word {number}" for number in range(64))
