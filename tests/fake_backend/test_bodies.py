"""Bodies of every kind: what is wrong with them is the client's fault, never the server's."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.fake_backend.raw import ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**30, 1.5, -0.0, float("nan"), "", "x", "1", "\ud800", [], [1], ["a"], [[1]],
    [[]], [None], [{}], {}, {"a": 1}, {"role": "user"},
    [{"role": "user", "content": "x"}], [{"role": 5, "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}], [{"role": "tool"}], [99999],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function"}], "auto", {"include_usage": 1},
    {"do_remote_prefill": True}, {"fake_answer_token_ids": [1, "x"]}, {"fake_answer_token_ids": [[]]}, "a/b", [-1],
)  # fmt: skip
FIELDS = {
    "/v1/chat/completions": (
        "model", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options",
        "temperature", "top_p", "seed", "logprobs", "top_logprobs", "tools", "tool_choice", "cache_salt", "priority",
        "min_tokens", "ignore_eos", "stop_token_ids", "return_token_ids", "chat_template",
        "chat_template_kwargs", "prompt_token_ids",
        "add_generation_prompt", "continue_final_message", "kv_transfer_params", "vllm_xargs", "documents", "user",
        "reasoning_effort", "response_format", "logit_bias", "session_id", "request_id", "include_stop_str_in_output",
    ),
    "/v1/completions": (
        "model", "prompt", "max_tokens", "n", "stop", "stream", "stream_options", "echo", "logprobs", "seed", "suffix",
        "cache_salt", "min_tokens", "stop_token_ids", "return_token_ids", "kv_transfer_params", "vllm_xargs",
        "add_special_tokens", "prompt_logprobs", "best_of",
    ),
    "/v1/embeddings": ("model", "input", "encoding_format", "dimensions", "user"),
    "/v1/responses": ("model", "input", "instructions", "max_output_tokens", "stream", "temperature", "tools", "user"),
    "/v1/messages": ("model", "messages", "system", "max_tokens", "stream", "stop_sequences", "temperature"),
    "/v1/messages/count_tokens": ("model", "messages", "system"),
    "/tokenize": ("model", "prompt", "messages", "add_special_tokens", "return_token_strs"),
    "/detokenize": ("model", "tokens"),
    "/inference/v1/generate": ("token_ids", "sampling_params", "stream", "stream_options", "cache_salt", "request_id"),
    "/v1/chat/completions/render": ("messages", "max_tokens", "temperature", "model"),
    "/v1/completions/render": ("prompt", "max_tokens", "model"),
    "/inference/v1/abort_requests": ("request_ids",),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/v1/completions/render": {"prompt": "a"},
    "/inference/v1/abort_requests": {"request_ids": []},
}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize("path", FIELDS)
async def test_no_body_is_the_servers_fault(start: Callable[..., Awaitable[Server]], path: str) -> None:
    server = await start("--enable-scale-out", "--max-model-len", "512")
    draw = random.Random(path)
    good = GOOD.get(path, CHAT)
    assert (await ask(server.port, "POST", path, json.dumps(good).encode())).status == 200
    for name in FIELDS[path]:
        for value in VALUES:
            body = good | {name: value}
            if draw.random() < 0.3:
                body[draw.choice(FIELDS[path])] = draw.choice(VALUES)
            answer = await ask(server.port, "POST", path, json.dumps(body).encode())
            assert answer.status in (200, 400, 403, 404), (body, answer.status, answer.body[:300])
            if answer.status == 200 and answer.headers.get("content-type", "").startswith("text/event-stream"):
                assert answer.body.endswith(b"\n\n")
    (engine,) = server.replica.engines
    assert engine.pool.free_blocks == engine.pool.usable


async def test_what_is_no_object_is_refused(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start("--enable-scale-out")
    for path in FIELDS:
        for raw in (b"", b"[", b"null", b"[1]", b"\xff", b'"x"', b"7", b"{}", b'{"a":' * 3000):
            answer = await ask(server.port, "POST", path, raw)
            allowed = (path, raw) == ("/inference/v1/abort_requests", b"{}")
            assert answer.status == (200 if allowed else 400), (path, raw[:20], answer.body)


async def test_only_json_is_taken(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await ask(server.port, "POST", "/v1/completions", b'{"prompt": "a"}', {"content-type": kind})
        assert answer.status == 400
        assert "Only 'application/json' is allowed" in json.loads(answer.body)["error"]["message"]
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await ask(server.port, "POST", "/v1/completions", b'{"prompt": "a"}', charset)).status == 200


@pytest.mark.parametrize("value", ["x", "--5", "²", ""])
async def test_headers_that_are_no_numbers_are_ignored(start: Callable[..., Awaitable[Server]], value: str) -> None:
    server = await start()
    headers = {"x-data-parallel-rank": value, "x-vllm-priority": value}
    assert (await ask(server.port, "POST", "/v1/completions", b'{"prompt": "a"}', headers)).status == 200
