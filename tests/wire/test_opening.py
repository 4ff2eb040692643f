"""What an event stream begins with, and what is shown of it when."""

from __future__ import annotations

import pytest

from router.wire.stream import Opening, Verdict

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "verdict"),
    [
        (ROLE, Verdict.NOTHING),
        (b": keep-alive\n\n" + ROLE, Verdict.NOTHING),
        (ROLE + ERROR, Verdict.ERROR),
        (ERROR, Verdict.ERROR),
        (ROLE + WORD, Verdict.ANSWER),
        (ROLE + WORD + ERROR, Verdict.ANSWER),
        (b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n', Verdict.ANSWER),
        (b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}\n\n', Verdict.ANSWER),
        (b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{}]}}]}\n\n', Verdict.ANSWER),
        (b'data: {"choices":[],"usage":{}}\n\n', Verdict.ANSWER),
        (b'data: {"error":null,"choices":[{"delta":{"role":"assistant"}}]}\n\n', Verdict.NOTHING),
        (b"data: [DONE]\n\n", Verdict.ANSWER),
        (b"data: {nonsense\n\n", Verdict.ANSWER),
        (b"data: 7\n\n", Verdict.ANSWER),
        (b"x" * 70_000, Verdict.ANSWER),
    ],
)
def test_what_a_stream_opens_with(stream: bytes, verdict: Verdict) -> None:
    assert Opening().by(stream) is verdict


@pytest.mark.parametrize("stream", [ROLE + WORD, ROLE + ERROR, ERROR])
def test_split_anywhere(stream: bytes) -> None:
    whole = Opening().by(stream)
    opening = Opening()
    verdicts = [opening.by(stream[i : i + 1]) for i in range(len(stream))]
    first = next(verdict for verdict in verdicts if verdict is not Verdict.NOTHING)
    assert first is whole
