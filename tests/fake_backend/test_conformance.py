"""Everything real vLLM answered when tests/real_vllm recorded it, asked of the fake: status, headers, JSON, SSE frames.

Both get the same requests in the same order. The model's own words differ, so the fake is told to give the recorded
ones; after that only identities and times may differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fake_backend.raw import Answer, ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server
    from router.prompt.tokens import Tokenizer

RECORDED = Path(__file__).resolve().parents[1] / "data" / "vllm"
REQUESTS: dict[str, dict[str, str]] = json.loads((RECORDED / "http" / "requests.json").read_text())
FLAGS = (
    "--served-model-name", "tiny", "--max-model-len", "4096", "--block-size", "32", "--max-num-seqs", "16",
    "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details", "--enable-scale-out",
    "--answers", "fixed:4000",
)  # fmt: skip

EXCEPTIONS = {
    "error_embeddings": "a text model has no such route; the fake embeds beside a text model, so that a fleet has both",
    "error_busy": "needs an engine with a short queue: test_limits",
    "error_unauthorized": "needs an engine with a key: test_limits",
    "kv_event_sources": "names the ports that KV events are on: test_events",
}
SHAPES = {
    "chat_two_answers_logprobs": "the fake's log probabilities are made up",
    "completion_stream_usage": "two prompts' tokens interleave in another order",
    "chat_stream_two_answers": "the recorded stream has a chunk of two tokens, because its reader was late",
}
"""Compared by keys and types alone."""

_VARYING = (
    (re.compile(rb'"created":\d+'), b'"created":0'),
    (re.compile(rb'"(id|request_id)":"(chatcmpl|cmpl|modelperm|generate-tokens)-[^"]*"'), rb'"\1":"\2-0"'),
    (re.compile(rb'"system_fingerprint":"vllm-0\.32\.0-[0-9a-f]{8}"'), b'"system_fingerprint":"vllm-0.32.0-0"'),
    (re.compile(rb'"root":"[^"]*"'), b'"root":""'),
)


def steady(data: bytes) -> bytes:
    for pattern, instead in _VARYING:
        data = pattern.sub(instead, data)
    return data


def recorded(name: str) -> Answer:
    raw = (RECORDED / "http" / f"{name}.txt").read_bytes()
    head, _blank, body = raw.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")
    status, *lines = head.decode().replace("\r", "").split("\n")
    return Answer(int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body)


def said(answer: Answer) -> list[str]:
    """The text of each choice of a recorded answer."""
    texts: dict[int, str] = {}
    events = (
        [event[6:] for event in answer.events] if "event-stream" in answer.headers["content-type"] else [answer.body]
    )
    for event in events:
        if event == b"[DONE]":
            continue
        for choice in json.loads(event).get("choices", []):
            part = choice.get("text")
            if part is None:
                part = (choice.get("message") or choice.get("delta"))["content"]
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return [texts[index] for index in sorted(texts)]


def tokens_of(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """``count`` token ids of a text, however the model had cut it."""
    ids = tokenizer.encode(text, False)
    if len(ids) != count:
        ids = [token for character in text for token in tokenizer.encode(character, False)]
    return ids


def with_answer(name: str, body: dict[str, Any], answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    """The request, with the words that the model is to say."""
    if name == "chat_stop_token":
        ids = [[2]]
    elif name == "chat_stop_string":
        ids = [tokenizer.encode("\n\n\n\n", False)]
    else:
        texts = [text.removeprefix(body["prompt"]) if body.get("echo") else text for text in said(answer)]
        ids = [tokens_of(tokenizer, text, body["max_tokens"]) for text in texts]
    return body | {"vllm_xargs": {"fake_answer_token_ids": ids}}


def shape(data: bytes) -> list[object]:
    """Keys and types of an answer, of a stream's distinct events."""
    texts = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    kinds: list[object] = []
    for text in texts:
        kind = "[DONE]" if text == b"[DONE]" else kind_of(json.loads(text))
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def kind_of(value: object) -> object:
    if isinstance(value, dict):
        return {key: kind_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [kind_of(value[0])] if value else []
    return type(value).__name__


def difference(name: str, answer: Answer, expected: Answer) -> str | None:
    if answer.status != expected.status:
        return f"status {answer.status}, vLLM {expected.status}: {answer.body[:300]!r}"
    if set(answer.headers) != set(expected.headers):
        return f"headers {sorted(answer.headers)}, vLLM {sorted(expected.headers)}"
    for header in expected.headers.keys() - {"date", "content-length"}:
        if answer.headers[header] != expected.headers[header]:
            return f"{header}: {answer.headers[header]}, vLLM {expected.headers[header]}"
    found, wanted = (shape, shape) if name in SHAPES else (steady, steady)
    ours, theirs = found(answer.body), wanted(expected.body)
    return None if ours == theirs else f"\n{ours!r}\nvLLM\n{theirs!r}"


async def test_every_recorded_exchange(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start(*FLAGS)
    differences: list[str] = []
    for name, asked in REQUESTS.items():
        if name in EXCEPTIONS:
            continue
        expected = recorded(name)
        body = asked["body"].encode("latin-1") if "body" in asked else None
        if body is not None and expected.status == 200 and asked["path"] in ("/v1/chat/completions", "/v1/completions"):
            body = json.dumps(with_answer(name, json.loads(body), expected, server.replica.tokenizer)).encode()
        found = difference(name, await ask(server.port, asked["method"], asked["path"], body), expected)
        if found:
            differences.append(f"{name}: {found}")
    assert not differences, "\n\n".join(differences)


SERIES = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
METRICS_EXCEPTIONS = {
    "python_info": "this interpreter's version",
    "vllm:cache_config_info": "compared label by label in test_cache_config_labels",
    "vllm:tool_call_parser_invocations_total": "recorded with a tool parser; the fake has none",
    "vllm:tool_call_parser_invocations_created": "recorded with a tool parser; the fake has none",
}


def series(text: str) -> dict[str, set[str]]:
    """Families by name and type, each with its series: names, labels, bucket bounds; values left out."""
    found: dict[str, set[str]] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP"):
            family = line[7:]
        elif line.startswith("# TYPE"):
            family += " | " + line.rsplit(" ", 1)[1]
            found[family] = set()
        elif match := SERIES.match(line):
            found[family].add(f"{match['name']}{{{match['labels']}}}")
    return found


async def test_every_recorded_metric(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start(*FLAGS)
    ours = series((await ask(server.port, "GET", "/metrics")).body.decode())
    theirs = series((RECORDED / "metrics.txt").read_text())
    missing: list[str] = []
    for family, names in theirs.items():
        if family.startswith("http_"):
            continue  # test_http_series_after_traffic
        if family.split(" ")[0] in METRICS_EXCEPTIONS:
            continue
        if names != ours.get(family):
            missing.append(f"{family}\n  vLLM {sorted(names)[:3]}\n  fake {sorted(ours.get(family, set()))[:3]}")
    assert not missing, "\n".join(missing)
    assert {family for family in ours if not family.startswith("http_")} - set(theirs) <= {
        family for family in ours if family.split(" ")[0] in METRICS_EXCEPTIONS
    }


async def test_http_series_after_traffic(start: Callable[..., Awaitable[Server]]) -> None:
    """The same paths give the same series, and paths that vLLM leaves out are left out."""
    server = await start(*FLAGS)
    for method, path in (("GET", "/v1/models"), ("GET", "/nowhere"), ("GET", "/health"), ("POST", "/tokenize")):
        await ask(server.port, method, path, b'{"prompt": "The sea"}' if method == "POST" else None)

    def of_http(text: str) -> dict[str, set[str]]:
        return {family: names for family, names in series(text).items() if family.startswith("http_")}

    ours = of_http((await ask(server.port, "GET", "/metrics")).body.decode())
    theirs = of_http((RECORDED / "metrics.txt").read_text())
    assert ours.keys() == theirs.keys()
    for family, names in ours.items():
        assert names
        assert {name for name in names if 'handler="/v1/models"' not in name} <= theirs[family]


async def test_cache_config_labels(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start(*FLAGS)

    def labels(text: str) -> dict[str, str]:
        line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    ours = labels((await ask(server.port, "GET", "/metrics")).body.decode())
    theirs = labels((RECORDED / "metrics.txt").read_text())
    assert ours.keys() == theirs.keys()
    size = {"num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_cache_memory_bytes"}
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different <= size | {"mamba_ssm_cache_dtype"}
