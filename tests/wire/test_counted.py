"""What is counted of an answer on its way: its bytes and its pace."""

from __future__ import annotations

import asyncio

from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, chunk, delta, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def sample(page: bytes, name: str) -> float | None:
    for line in page.decode().splitlines():
        key, _, value = line.rpartition(" ")
        if key == name:
            return float(value)
    return None


async def test_bytes_and_the_pace_of_a_stream(bench: Bench) -> None:
    more = asyncio.Event()

    async def script(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' not in request.body:
            await replica._plain(request, reader, writer)
            return
        writer.write(STREAM_HEAD + chunk(b": a comment\n\n"))
        for text in ("a", "b", "c"):
            await more.wait()
            more.clear()
            writer.write(chunk(delta(text)))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    replica = await bench.replica(script)
    router = await bench.router(replica)
    client = await bench.client(router)
    client.post("/v1/chat/completions", STREAM_BODY)
    reply = await client.head()
    size = len(reply.head) + len(b"0\r\n\r\n")
    assert await client.chunk() == b": a comment\n\n"
    size += len(chunk(b": a comment\n\n"))
    for text in ("a", "b", "c"):
        more.set()
        assert await client.chunk() == delta(text)
        size += len(chunk(delta(text)))
    while (piece := await client.chunk()) is not None:
        size += len(chunk(piece))
    client.post("/v1/chat/completions", BODY)
    whole = await client.reply()
    assert whole.body == CHAT
    label = f'{{replica="{replica.name}"}}'
    await until(
        lambda: sample(router.telemetry.page(), "warmroute_sent_bytes_total") == size + len(whole.head) + len(CHAT),
        "every byte to the client is counted",
    )
    page = router.telemetry.page()
    assert sample(page, "warmroute_received_bytes_total") == len(STREAM_BODY) + len(BODY)
    assert sample(page, f"warmroute_time_to_first_token_seconds_count{label}") == 1
    # Between the first token and the second, and so on to [DONE]: the comment before them is none.
    assert sample(page, f"warmroute_inter_token_latency_seconds_count{label}") == 3
    assert f'warmroute_inter_token_latency_seconds_bucket{{le="3600.0",replica="{replica.name}"}} 3.0'.encode() in page
