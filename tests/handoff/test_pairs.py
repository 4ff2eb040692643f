"""A prompt is computed by one fake and answered by another, and the client sees an answer like any other."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import Fleet
from tests.handoff.pairs import chat, completion, consumer, nothing_pinned, producer, text, transfers

pytestmark = pytest.mark.usefixtures("any_port")
NAME = b"x-warmroute-replica"
PREFILL = b"x-warmroute-prefill"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat), ("/v1/completions", completion)])
async def test_a_split_answer_is_the_whole_ones(fleet: Fleet, path: str, body: object, stream: bool) -> None:
    prefill, decode = await producer(fleet), await consumer(fleet)
    plain = await fleet.client(await fleet.router(decode))
    client = await fleet.client(await fleet.router(prefill, decode, split="always"))
    sent = body(stream=stream)  # type: ignore[operator]
    client.post(path, sent)
    split = await client.reply()
    assert split.header(NAME) == decode.url.removeprefix("http://").encode()
    assert split.header(PREFILL) == prefill.url.removeprefix("http://").encode()
    plain.post(path, sent)
    whole = await plain.reply()
    assert whole.header(PREFILL) is None
    assert text(split) == text(whole) != ""
    assert transfers(decode).counts.transfers != []
    await nothing_pinned(prefill)
