from __future__ import annotations

import pytest

from router.wire.stream import FirstEvent


@pytest.mark.parametrize("event", [b'data: {"a":1}\n\n', b"data:1\n\n", b"event: x\ndata: 1\n\n"])
@pytest.mark.parametrize("before", [b"", b": keep-alive\n\n", b": data: no\n\n:\r\n\r\n", b"\n\n"])
def test_the_first_event_is_told_from_comments_however_they_are_split(before: bytes, event: bytes) -> None:
    whole = before + event
    for size in range(1, len(whole) + 1):
        seen = FirstEvent()
        told = None
        for start in range(0, len(whole), size):
            if seen.by(whole[start : start + size]):
                told = start + size
                break
        mark = event.index(b":") + 1
        assert told is not None
        # Not before its field's name is there, and in the very piece that completes it.
        assert told - size < len(before) + mark <= told


def test_comments_alone_are_no_event() -> None:
    seen = FirstEvent()
    assert not any(seen.by(piece) for piece in (b": a\n\n", b":", b" data: x\n", b"\n", b"retry: 5\n\n"))
