"""The other APIs, with the clients that people use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest

from tests.fake_backend.raw import ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

MODEL = "Qwen3-0.6B"
TALK = [{"role": "user", "content": "Tell me of the sea. " * 20}]


async def test_openai_chat(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-prompt-tokens-details", "--api-key", "k")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k")
    whole = await client.chat.completions.create(model=MODEL, messages=TALK, max_tokens=30)  # type: ignore[arg-type]
    text = ""
    async with await client.chat.completions.create(
        model=MODEL, messages=TALK, max_tokens=30, stream=True, stream_options={"include_usage": True}
    ) as stream:  # type: ignore[call-overload]
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=TALK)  # type: ignore[arg-type]
    await client.close()


async def test_openai_responses(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k")
    whole = await client.responses.create(model=MODEL, input="the sea", instructions="Be brief.", max_output_tokens=9)
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    events = [
        event
        async for event in await client.responses.create(
            model=MODEL, input=[{"role": "user", "content": "the sea"}], instructions="Be brief.", max_output_tokens=9,
            stream=True,
        )
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    await client.close()


async def test_anthropic_messages(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-prompt-tokens-details")
    client = anthropic.AsyncAnthropic(base_url=server.url, api_key="k")
    whole = await client.messages.create(model=MODEL, max_tokens=9, system="Be brief.", messages=TALK)  # type: ignore[arg-type]
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 9
    created = whole.usage.cache_creation_input_tokens or 0
    counted = await client.messages.count_tokens(model=MODEL, system="Be brief.", messages=TALK)  # type: ignore[arg-type]
    assert whole.usage.input_tokens + created == counted.input_tokens
    async with client.messages.stream(model=MODEL, max_tokens=9, system="Be brief.", messages=TALK) as stream:  # type: ignore[arg-type]
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.usage.cache_read_input_tokens == created
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="nope", max_tokens=9, messages=TALK)  # type: ignore[arg-type]
    await client.close()


async def test_openai_embeddings(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k")
    answer = await client.embeddings.create(model=MODEL, input=["the sea", "the land", "the sea"])
    one, two, three = (item.embedding for item in answer.data)
    assert one == three
    assert one != two
    assert sum(value * value for value in one) == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9
    await client.close()


async def test_adapters_come_and_go(start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    server = await start("--enable-lora", "--lora-modules", "law=/adapters/law", "--enable-prompt-tokens-details")

    async def cached(model: str) -> int:
        body = json.dumps({"model": model, "prompt": list(range(300, 364)), "max_tokens": 2}).encode()
        answer = json.loads((await ask(server.port, "POST", "/v1/completions", body)).body)
        assert answer["model"] == model
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def cards() -> list[tuple[str, str, str | None]]:
        data = json.loads((await ask(server.port, "GET", "/v1/models")).body)["data"]
        return [(card["id"], card["root"], card["parent"]) for card in data][1:]

    metrics = (await ask(server.port, "GET", "/metrics")).body
    assert b'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} ' in metrics
    assert await cards() == [("law", "/adapters/law", MODEL)]
    loaded = await ask(
        server.port, "POST", "/v1/load_lora_adapter", b'{"lora_name": "med", "lora_path": "/adapters/med"}'
    )
    assert loaded.body == b"Success: LoRA adapter 'med' added successfully."
    assert await cards() == [("law", "/adapters/law", MODEL), ("med", "/adapters/med", MODEL)]
    assert [await cached(model) for model in ("law", "med", MODEL, "law", "med", MODEL)] == [0, 0, 0, 48, 48, 48]
    again = await ask(server.port, "POST", "/v1/load_lora_adapter", b'{"lora_name": "med", "lora_path": "/x"}')
    assert again.status == 400
    await ask(server.port, "POST", "/v1/unload_lora_adapter", b'{"lora_name": "med"}')
    assert await cards() == [("law", "/adapters/law", MODEL)]
    gone = await ask(server.port, "POST", "/v1/unload_lora_adapter", b'{"lora_name": "med"}')
    assert (gone.status, json.loads(gone.body)["error"]["message"]) == (404, "The lora adapter 'med' cannot be found.")


async def test_adapters_cannot_be_loaded_unless_allowed(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    answer = await ask(server.port, "POST", "/v1/load_lora_adapter", b'{"lora_name": "a", "lora_path": "b"}')
    assert answer.status == 404


async def test_generate_and_render_agree(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-scale-out")
    body = json.dumps({"messages": TALK, "max_tokens": 5}).encode()
    rendered = json.loads((await ask(server.port, "POST", "/v1/chat/completions/render", body)).body)
    generated = await ask(server.port, "POST", "/inference/v1/generate", json.dumps(rendered).encode())
    ids = json.loads(generated.body)["choices"][0]["token_ids"]
    chat = json.dumps({"messages": TALK, "max_tokens": 5, "return_token_ids": True}).encode()
    answer = json.loads((await ask(server.port, "POST", "/v1/chat/completions", chat)).body)
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == rendered["token_ids"]
    streamed = await ask(
        server.port, "POST", "/inference/v1/generate", json.dumps({**rendered, "stream": True}).encode()
    )
    chunks = [json.loads(event[6:]) for event in streamed.events[:-1]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    assert streamed.events[-1] == b"data: [DONE]"


async def test_scale_out_is_off_by_default(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    answer = await ask(server.port, "POST", "/inference/v1/generate", b'{"token_ids": [1]}')
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (403, "PermissionDeniedError")


@pytest.mark.parametrize("form", ["TEXT", "JSON"])
async def test_load_in_a_header(start: Callable[..., Awaitable[Server]], form: str) -> None:
    server = await start()
    headers = {"endpoint-load-metrics-format": form}
    answer = await ask(server.port, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2}', headers)
    value = answer.headers["endpoint-load-metrics"]
    if form == "TEXT":
        assert value == "TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"
    else:
        report = json.loads(value.removeprefix("JSON "))
        assert report == {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}}


async def test_sleep_wake_and_pause(start: Callable[..., Awaitable[Server]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    server = await start()

    async def state(path: str) -> object:
        return json.loads((await ask(server.port, "GET", path)).body)

    await ask(server.port, "POST", "/sleep?level=1")
    assert await state("/is_sleeping") == {"is_sleeping": True}
    metrics = (await ask(server.port, "GET", "/metrics")).body
    assert b'sleep_state="weights_offloaded"} 1.0' in metrics
    await ask(server.port, "POST", "/wake_up")
    assert await state("/is_sleeping") == {"is_sleeping": False}
    assert (await ask(server.port, "POST", "/pause")).body == b'{"status":"paused"}'
    assert await state("/is_paused") == {"is_paused": True}
    assert (await ask(server.port, "POST", "/resume")).body == b'{"status":"resumed"}'
    answer = await ask(server.port, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')
    assert answer.status == 200
