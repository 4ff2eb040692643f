"""Write what real vLLM answers into tests/data/vllm, where the tests that need no engine read it.

hash_vectors.json   digests by vLLM's own hash functions
mistral.jsonl       chats in mistral's own format with the token ids that vLLM made of them
prompts.jsonl       requests of every shape with the token ids that vLLM made of them
kv_events.jsonl     batches of KV events under every hash algorithm
metrics.txt         /metrics after some traffic
apis.json           answers of /v1/responses and /v1/messages, whole and streamed
http/               requests.json, and one answer per file: status line, headers, body
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from exchange import Answer, exchange
from install import vllm_python
from prompts import CHAT, COMPLETION, MESSAGES, PROMPTS, RENDERED, RESPONSES, WEATHER
from replicas import MAX_MODEL_LEN, SERVED_NAME, Replica, running

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data" / "vllm"

EVENT_ENGINES: tuple[tuple[str, str | None], ...] = (("sha256", None), ("xxhash", "0"), ("xxhash_cbor", "42"))
SMALL_POOL = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")

LONG = "All the rivers run into the sea, yet the sea is not full. " * 30
ASK = {
    "model": SERVED_NAME,
    "messages": [{"role": "user", "content": LONG}],
    "temperature": 0,
    "max_tokens": 6,
    "seed": 1,
}
TWO = ASK | {"n": 2, "temperature": 1, "max_tokens": 2}

HTTP: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", CHAT, ASK),
    "chat_again": ("POST", CHAT, ASK),
    "chat_stream": ("POST", CHAT, ASK | {"stream": True}),
    "chat_stream_usage": ("POST", CHAT, ASK | {"stream": True, "stream_options": {"include_usage": True}}),
    "chat_stream_usage_continuous": (
        "POST",
        CHAT,
        ASK | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat_stream_ids": ("POST", CHAT, ASK | {"stream": True, "return_token_ids": True}),
    "chat_stream_two_answers": ("POST", CHAT, TWO | {"stream": True}),
    "chat_ids": ("POST", CHAT, ASK | {"return_token_ids": True}),
    "chat_two_answers_logprobs": ("POST", CHAT, TWO | {"logprobs": True, "top_logprobs": 1}),
    "chat_stop_string": ("POST", CHAT, ASK | {"max_tokens": 64, "stop": ["\n\n\n"]}),
    "chat_stop_token": ("POST", CHAT, ASK | {"logit_bias": {"2": 100}, "return_token_ids": True}),
    "chat_salted": ("POST", CHAT, ASK | {"cache_salt": "tenant-A"}),
    "chat_tools": ("POST", CHAT, ASK | {"tools": [WEATHER]}),
    "chat_client_hand_off": ("POST", CHAT, ASK | {"kv_transfer_params": {"unknown": 1}}),
    "chat_model_omitted": ("POST", CHAT, {k: v for k, v in ASK.items() if k != "model"}),
    "completion": ("POST", COMPLETION, {"model": SERVED_NAME, "prompt": LONG, "max_tokens": 4, "temperature": 0}),
    "completion_stream": ("POST", COMPLETION, {"prompt": "The sea", "max_tokens": 4, "temperature": 0, "stream": True}),
    "completion_stream_usage": (
        "POST",
        COMPLETION,
        {
            "prompt": ["The sea", "A river"],
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "completion_ids": ("POST", COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}),
    "completion_echo": ("POST", COMPLETION, {"prompt": "The sea", "max_tokens": 2, "temperature": 0, "echo": True}),
    "tokenize_prompt": ("POST", "/tokenize", {"model": SERVED_NAME, "prompt": "The sea", "return_token_strs": True}),
    "tokenize_chat": ("POST", "/tokenize", {"messages": [{"role": "user", "content": "The sea"}]}),
    "detokenize": ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    "models": ("GET", "/v1/models", None),
    "version": ("GET", "/version", None),
    "health": ("GET", "/health", None),
    "error_health_head": ("HEAD", "/health", None),
    "ping": ("GET", "/ping", None),
    "load": ("GET", "/load", None),
    "kv_event_sources": ("GET", "/kv_event_sources", None),
    "render_chat": ("POST", CHAT + "/render", {"messages": [{"role": "user", "content": "The sea"}]}),
    "error_embeddings": ("POST", "/v1/embeddings", {"model": SERVED_NAME, "input": "The sea"}),
    "error_two_greedy_answers": ("POST", CHAT, ASK | {"n": 2}),
    "error_not_found": ("GET", "/nowhere", None),
    "error_method": ("GET", CHAT, None),
    "error_not_json": ("POST", CHAT, b'{"messages": [{"role": '),
    "error_array": ("POST", CHAT, b"[1]"),
    "error_null": ("POST", CHAT, b"null"),
    "error_deep": ("POST", CHAT, b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "error_latin_1": ("POST", CHAT, b'{"messages": [{"role": "user", "content": "caf\xe9"}]}'),
    "error_lone_surrogate": ("POST", CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "error_nan_temperature": ("POST", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    "error_big_seed": (
        "POST",
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "seed": 123456789012345678901234}',
    ),
    "error_no_messages": ("POST", CHAT, {"model": SERVED_NAME}),
    "error_wrong_type": ("POST", CHAT, ASK | {"max_tokens": "many"}),
    "error_temperature": ("POST", CHAT, ASK | {"temperature": -1}),
    "error_max_tokens_zero": ("POST", CHAT, ASK | {"max_tokens": 0}),
    "error_unknown_model": ("POST", CHAT, ASK | {"model": "another"}),
    "error_too_long": ("POST", CHAT, ASK | {"messages": [{"role": "user", "content": "river " * MAX_MODEL_LEN}]}),
    "error_too_long_stream": ("POST", COMPLETION, {"prompt": [5] * (MAX_MODEL_LEN + 1), "stream": True}),
    "error_empty_prompt": ("POST", COMPLETION, {"prompt": ""}),
    "error_unknown_token": ("POST", COMPLETION, {"prompt": [5, 99999]}),
    "error_salt": ("POST", CHAT, ASK | {"cache_salt": ""}),
    "error_image": (
        "POST",
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
            ]
        },
    ),
}


def record_prompts(url: str) -> None:
    lines = []
    for name, (path, request) in PROMPTS.items():
        body = json.dumps(request, ensure_ascii=False).replace('"DUPLICATE messages"', '"messages"')
        steered = json.dumps(request | {"max_tokens": 1, "return_token_ids": True}).replace(
            "DUPLICATE messages", "messages"
        )
        answer = _good(exchange(url, "POST", path, steered.encode()), name).json()
        answers = request.get("n", 1)
        ids = (
            [c["prompt_token_ids"] for c in answer["choices"]][::answers]
            if path == COMPLETION
            else [answer["prompt_token_ids"]]
        )
        lines.append(json.dumps({"name": name, "path": path, "body": body, "prompt_token_ids": ids}))
    for name, (path, request) in RENDERED.items():
        body = json.dumps(request, ensure_ascii=False)
        rendered = _good(exchange(url, "POST", f"{path}/render", body.encode()), name).json()
        lines.append(
            json.dumps({"name": name, "path": path, "body": body, "prompt_token_ids": [rendered["token_ids"]]})
        )
    (DATA / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def record_apis(url: str) -> None:
    """Whole and streamed answers of /v1/responses and /v1/messages, with the text that was generated."""
    asks = {
        "responses": (RESPONSES, {"input": LONG, "max_output_tokens": 9}),
        "messages": (MESSAGES, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}),
    }
    answers = {}
    for name, (path, ask) in asks.items():
        for stream in (False, True):
            request = ask | {"model": SERVED_NAME, "temperature": 0, "stream": stream}
            answer = _good(exchange(url, "POST", path, request), name)
            answers[f"{name}{' stream' if stream else ''}"] = {
                "path": path,
                "request": json.dumps(request),
                "answer": answer.body.decode(),
            }
    (DATA / "apis.json").write_text(json.dumps(answers, indent=0) + "\n", encoding="utf-8")


def record_http(url: str) -> None:
    (DATA / "http").mkdir(parents=True, exist_ok=True)
    requests: dict[str, Any] = {}
    _good(exchange(url, "POST", "/reset_prefix_cache"), "reset")
    for name, (method, path, body) in HTTP.items():
        answer = exchange(url, method, path, body)
        if answer.status >= 400 and not name.startswith("error_"):
            raise RuntimeError(f"{name}: {answer.status} {answer.body.decode(errors='replace')}")
        (DATA / "http" / f"{name}.txt").write_bytes(answer.message())
        requests[name] = {"method": method, "path": path}
        if body is not None:  # as latin-1, so that any bytes survive
            requests[name]["body"] = (body if isinstance(body, bytes) else json.dumps(body).encode()).decode("latin-1")
    (DATA / "http" / "requests.json").write_text(json.dumps(requests, indent=0) + "\n", encoding="utf-8")


def record_refusals(replica: Replica) -> None:
    """A full queue, and a missing key: they need an engine started for it."""
    full = {"prompt": "The sea", "max_tokens": 200, "ignore_eos": True}
    key = {"Authorization": "Bearer let-me-in"}
    _keep("error_unauthorized", exchange(replica.url, "GET", "/v1/models"), 401)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: exchange(replica.url, "POST", COMPLETION, full, headers=key), range(8)))
    _keep("error_busy", next(a for a in answers if a.status != 200), 503)


def record_events(python: Path, replica: Replica, *, key: dict[str, str] | None = None) -> list[str]:
    """Traffic that shares prefixes, is salted, generates whole blocks, evicts, and clears the cache."""

    def post(path: str, **members: Any) -> Any:
        body = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **members}
        return _good(exchange(replica.url, "POST", path, body, headers=key), "traffic").json()

    shared = list(range(1000, 1096))
    post(COMPLETION, prompt=shared)
    post(COMPLETION, prompt=[*shared, *range(2000, 2040)])
    post(COMPLETION, prompt=shared, cache_salt="tenant-A")
    post(COMPLETION, prompt=list(range(3000, 3040)), max_tokens=60)
    messages = [{"role": "user", "content": "Name the rivers of Europe, one after another. " * 5}]
    said = post(CHAT, messages=messages, max_tokens=40)["choices"][0]["message"]["content"]
    post(CHAT, messages=[*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "More."}])
    for i in range(3):
        post(COMPLETION, prompt=[4 + i, *range(500, 700)])
    _good(exchange(replica.url, "POST", "/reset_prefix_cache", headers=key), "reset")
    post(COMPLETION, prompt=shared)
    time.sleep(0.3)  # the replay socket is served between publications
    script = str(HERE / "replay_events.py")
    output = subprocess.run([str(python), script, str(replica.replay_port)], check=True, capture_output=True, text=True)
    label = {"algorithm": replica.algorithm, "seed": replica.seed}
    batches = [label | _steady_events(json.loads(line)) for line in output.stdout.splitlines()]
    kinds = {event["type"] for batch in batches for event in batch["events"]}
    if kinds != {"BlockStored", "BlockRemoved", "AllBlocksCleared"}:
        raise RuntimeError(f"{replica.algorithm}: the traffic gave only {kinds}")
    return [json.dumps(batch, separators=(",", ":")) for batch in batches]


def _steady_events(batch: dict[str, Any]) -> dict[str, Any]:
    """The raw message of the first batches only, since it repeats the rest; its first item, the time, made equal."""
    payload = bytes.fromhex(batch.pop("payload"))
    if batch["seq"] <= 2:
        if payload[:2] != b"\x93\xcb":
            raise RuntimeError(
                f"a batch of events begins with {payload[:2].hex()}, no array of three with a time first"
            )
        batch["payload"] = (payload[:2] + struct.pack(">d", 1767225600.0) + payload[10:]).hex()
    return batch


def record_metrics(replica: Replica) -> None:
    text = _good(exchange(replica.url, "GET", "/metrics"), "metrics").body.decode()
    (DATA / "metrics.txt").write_text(
        re.sub(r"(?m)^(\S*_created(?:\{.*\})?) .*$", r"\1 1.7672256e+09", text), encoding="utf-8"
    )


def record_hashes(python: Path) -> None:
    output = subprocess.run([str(python), str(HERE / "hash_vectors.py")], check=True, capture_output=True, text=True)
    vectors = json.loads(output.stdout)
    lines = [f'"vllm":{json.dumps(vectors["vllm"])}']
    for part in ("cases", "engines"):
        rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in vectors[part])
        lines.append(f'"{part}":[\n{rows}]')
    (DATA / "hash_vectors.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def record_mistral(python: Path) -> None:
    script = str(HERE / "mistral_chats.py")
    output = subprocess.run([str(python), script], check=True, capture_output=True, text=True)
    (DATA / "mistral.jsonl").write_text(output.stdout, encoding="utf-8")


def record(directory: Path, replica: Replica, logs: Path) -> None:
    """Everything. `replica` is a running one; more are started for what it can't show."""
    DATA.mkdir(parents=True, exist_ok=True)
    python = vllm_python(directory)
    record_hashes(python)
    record_mistral(python)
    record_prompts(replica.url)
    record_apis(replica.url)
    record_http(replica.url)
    record_metrics(replica)
    key = ("--api-key", "let-me-in", "--max-num-queued-reqs", "2")
    others = [Replica(directory, logs, algorithm, seed, (*SMALL_POOL, *key)) for algorithm, seed in EVENT_ENGINES]
    others.append(Replica(directory, logs, flags=(*SMALL_POOL, *key)))
    lines = []
    for other in others:
        with running(other):
            lines += record_events(python, other, key={"Authorization": "Bearer let-me-in"})
            if other is others[-1]:
                record_refusals(other)
    (DATA / "kv_events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file in DATA.rglob("*"):
        if file.is_file() and str(directory).encode() in file.read_bytes():
            raise RuntimeError(f"{file} names a directory of this machine")


def _keep(name: str, answer: Answer, status: int) -> None:
    if answer.status != status:
        raise RuntimeError(f"{name}: {answer.status} instead of {status}")
    (DATA / "http" / f"{name}.txt").write_bytes(answer.message())


def _good(answer: Answer, name: str) -> Answer:
    if answer.status != 200:
        raise RuntimeError(f"{name}: {answer.status} {answer.body.decode(errors='replace')}")
    return answer


if __name__ == "__main__":
    sys.exit("this is a part of run.py")
