"""What an event stream begins with, and what is shown of it when."""

from __future__ import annotations

import pytest

from router.wire.stream import CachedCount, Opening, Verdict

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


USAGE = b'{"usage":{"prompt_tokens":463,"prompt_tokens_details":{"cached_tokens":462,"created_cache_tokens":0}}}'


def recounted(tokens: int | None, *pieces: bytes) -> bytes:
    count = CachedCount()
    count.tokens = tokens
    return b"".join([*map(count.piece, pieces), count.rest()])


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [(None, b":462,"), (32, b": 32,"), (0, b":  0,"), (462, b":462,"), (1000, b":462,")],
)
def test_the_count_of_cached_tokens_is_put_right_at_its_length(tokens: int | None, shown: bytes) -> None:
    wanted = USAGE.replace(b":462,", shown)
    assert recounted(tokens, USAGE) == wanted
    for cut in range(len(USAGE)):
        assert recounted(tokens, USAGE[:cut], USAGE[cut:]) == wanted
    assert recounted(tokens, *(USAGE[i : i + 1] for i in range(len(USAGE)))) == wanted


@pytest.mark.parametrize(
    "body",
    [rb'{"text":"\"cached_tokens\":462,"}', b'{"cached_tokens":null}', b'x"cached_tokens"', b'"cached_tokens": 4'],
)
def test_nothing_else_is_touched(body: bytes) -> None:
    for cut in range(len(body)):
        assert recounted(1, body[:cut], body[cut:]) == body
