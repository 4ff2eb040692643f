"""Chats in mistral's own format as vLLM writes them, for every version of it.

Runs in vLLM's own environment and prints a JSON object a line:

    DIR/venv/bin/python tests/real_vllm/mistral_chats.py

{"body" (of /v1/chat/completions), "prompt_token_ids": {version: ids, null where vLLM refuses the request}}. Needs no
engine and no weights: it takes a request's way through vLLM's renderer, with the small tokenizers of
tests/prompt/tekken.py.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.mistral import safe_apply_chat_template
from vllm.tokenizers import mistral

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.prompt.tekken import VERSIONS, tekken

TEXTS = ("hi", "the user and the weather ", " [INST] the </s> <s>", "é\n\nabcd", "", "a b  c")
ARGUMENTS = ('{"x": 1.50, "é": "\\u00e9"}', "{}", "", "no json", "[1, 2]", '{"nested": {"a": [1, null, true]}}')
IDS = ("abcdefghi", "call_0123456789", "ABCDEFGHI", "chatcmpl-tool-123456789abc")
PARTS = ({"type": "text", "text": "so "}, {"type": "text", "text": "be it "})
RESULTS = ("the result", '{"t": 21.0, "u": "\\u00e9"}', "", "[1,2]", "7")
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    [{"type": "function", "function": {"name": "weather", "description": "the weathér", "parameters": WEATHER}}],
    [
        {"type": "function", "function": {"name": "a", "strict": True, "parameters": WEATHER}},
        {"type": "function", "function": {"name": "b", "description": None}},
    ],
)


def call(chance: Random, call_id: str) -> dict[str, Any]:
    function = {"name": chance.choice(["weather", "a"]), "arguments": chance.choice(ARGUMENTS)}
    return {"id": call_id, "type": "function", "function": function}


def content(chance: Random) -> Any:
    if chance.random() < 0.7:
        return chance.choice(TEXTS)
    return [{"type": "text", "text": chance.choice(TEXTS)} for _ in range(chance.randrange(1, 4))]


def calls(chance: Random) -> list[dict[str, Any]]:
    """A round of calls and their results."""
    ids = chance.sample(IDS, chance.randrange(1, 4))
    says = chance.choice([None, "", "", "the call "])
    asked = {"role": "assistant", "content": says, "tool_calls": [call(chance, each) for each in ids]}
    results = [{"role": "tool", "tool_call_id": each, "content": chance.choice(RESULTS)} for each in ids]
    if chance.random() < 0.4:
        results.reverse()
    if chance.random() < 0.2:
        results[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    return [asked, *results]


def answers(chance: Random) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"role": "assistant", "content": content(chance) or "yes "}
    if chance.random() < 0.2:
        said[chance.choice(["reasoning", "reasoning_content"])] = "the thought "
    if chance.random() < 0.05:
        said["content"] = [{"type": "thinking", "thinking": "the", "closed": chance.random() < 0.5}, *PARTS]
    return [said, {"role": "assistant", "content": "and more"}] if chance.random() < 0.1 else [said]


def chats(chance: Random) -> list[dict[str, Any]]:
    systems = [chance.choice(["system", "system", "developer"]) for _ in range(chance.choice([0, 1, 1, 2]))]
    chat: list[dict[str, Any]] = [{"role": role, "content": content(chance)} for role in systems]
    for _ in range(chance.randrange(1, 4)):
        chat.append({"role": "user", "content": content(chance)})
        if chance.random() < 0.15:
            chat.append({"role": "system", "content": content(chance)})
            chat.append({"role": "user", "content": content(chance)})
        if chance.random() < 0.2:
            chat.append({"role": "user", "content": content(chance)})
        for _ in range(chance.choice([0, 0, 1, 2])):
            chat += calls(chance)
        chat += answers(chance)
    if chance.random() < 0.75:
        chat.append({"role": "user", "content": content(chance)})
        if chance.random() < 0.3:
            chat += calls(chance)
    return chat


def bodies() -> list[dict[str, Any]]:
    """Most of them are such as the engine takes, by every version."""
    chance = Random(0)
    made: list[dict[str, Any]] = []
    for _ in range(90):
        body: dict[str, Any] = {"model": "m"}
        chat = chats(chance)
        if chance.random() < 0.4:
            body["tools"] = chance.choice(TOOLS)
        if chat[-1]["role"] == "assistant":
            body["add_generation_prompt"] = False
            body["continue_final_message"] = chance.random() < 0.9
        if chance.random() < 0.15:
            body["reasoning_effort"] = chance.choice(["none", "high", "low"])
        made.append({**body, "messages": chat})
    return made


def rendered(tokenizer: mistral.MistralTokenizer, body: dict[str, Any]) -> list[int] | None:
    """As OnlineRenderer.render_chat and MistralRenderer.render_messages do."""
    try:
        request = ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
        mistral.maybe_serialize_tool_calls(request)
        mistral.truncate_tool_call_ids(request)
        mistral.validate_request_params(request)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": True})
        model = SimpleNamespace(
            multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=False, allowed_local_media_path=""
        )
        parse_chat_messages(request.messages, model, content_format="string")
        return safe_apply_chat_template(tokenizer, request.messages, **params.get_apply_chat_template_kwargs())
    except Exception as error:  # whatever it is, a client would be told so
        sys.stderr.write(f"{type(error).__name__}: {error}"[:200] + "\n")
        return None


def main() -> None:
    logging.disable(logging.WARNING)
    tokenizers = {}
    for version in VERSIONS:
        with TemporaryDirectory() as directory:
            (Path(directory) / "tekken.json").write_text(json.dumps(tekken(version)))
            tokenizers[version] = mistral.MistralTokenizer.from_pretrained(directory)
    for body in bodies():
        ids = {version: rendered(tokenizer, body) for version, tokenizer in tokenizers.items()}
        row = {"body": body, "prompt_token_ids": ids}
        sys.stdout.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
