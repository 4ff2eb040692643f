"""/v1/responses and /v1/messages as the chat that vLLM makes of them.

vLLM entrypoints/openai/responses/utils.py `construct_input_messages`, entrypoints/anthropic/serving.py
`to_chat_completion_request`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class UnreadableError(Exception):
    """The request has something of which only the engine knows what it becomes."""


@dataclass(slots=True)
class AsChat:
    """What the chat endpoint would have been asked."""

    messages: list[Any]
    tools: list[Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool = False
    thinking_off: bool = False
    """The template decides by which effort this is said (`Reader`)."""
    system_anywhere: bool = False
    """System messages may stand among the others; a template that takes them first only gets them joined."""


# -- /v1/responses -----------------------------------------------------------------------------------------------


def responses(value: dict[str, Any]) -> AsChat:
    """Raises UnreadableError."""
    if value.get("previous_response_id") is not None or value.get("prompt") is not None:
        raise UnreadableError("its history is at the engine")
    if value.get("truncation") not in (None, "disabled"):
        raise UnreadableError("the engine may cut it")
    given = value.get("input")
    messages: list[Any] = []
    if instructions := value.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        items: list[dict[str, Any]] = []
        for item in given:
            _add_item(items, item)
        messages += items
    else:
        raise UnreadableError("its input is neither text nor a list")
    reasoning = value.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return AsChat(messages, _responses_tools(value.get("tools")), effort, _is_partial(given))


def _is_partial(given: object) -> bool:
    last = given[-1] if isinstance(given, list) and given else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in ("in_progress", "incomplete")
    )


def _add_item(messages: list[dict[str, Any]], item: object) -> None:
    """Add an item of `input`; what an assistant said, thought and called in turn becomes one message."""
    if not isinstance(item, dict):
        raise UnreadableError("an item of its input is no object")
    kind = item.get("type")
    last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call_of(item)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last["tool_calls"] = [*(last.get("tool_calls") or []), call]
    elif kind == "reasoning":
        _add_to(messages, last, "reasoning", _thoughts(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _add_to(messages, last, "content", text)
    elif "role" in item:
        messages.append(dict(item))
    else:
        raise UnreadableError(f"an item of its input is of an unknown type: {kind!r:.40}")


def _add_to(messages: list[dict[str, Any]], last: dict[str, Any] | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _call_of(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    elif item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise UnreadableError("a call has no name or arguments")
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _thoughts(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnreadableError("its reasoning is encrypted")
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            if isinstance(parts[0], dict) and isinstance(text := parts[0].get("text"), str):
                return text
            raise UnreadableError("its reasoning is no text")
    return ""


def _first_text(content: object) -> str | None:
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _responses_tools(tools: object) -> list[Any] | None:
    if not isinstance(tools, list) or not tools:
        return None
    shown = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            shown.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
        elif kind == "namespace":
            inner = [each for each in tool.get("tools") or [] if isinstance(each, dict)]
            for each in (each for each in inner if each.get("type") == "function"):
                function = {k: v for k, v in each.items() if k != "type"}
                function["name"] = f"{tool.get('name')}__{each.get('name')}"
                shown.append({"type": "function", "function": function})
        elif kind == "custom":
            raise UnreadableError("it has custom tools")
        # Other kinds run elsewhere; the model isn't shown them.
    return shown


# -- /v1/messages ------------------------------------------------------------------------------------------------

_BILLING = "x-anthropic-billing-header"


def messages(value: dict[str, Any]) -> AsChat:
    """Raises UnreadableError."""
    chat: list[Any] = []
    if (system := _system_text(value.get("system"), whole=True)) is not None:
        chat.append({"role": "system", "content": system})
    given = value.get("messages")
    if not isinstance(given, list) or not given:
        raise UnreadableError("it has no messages")
    inline = False
    for message in given:
        if not isinstance(message, dict):
            raise UnreadableError("a message is no object")
        if message.get("role") == "system":
            inline = True
            if (text := _system_text(message.get("content"), whole=False)) is not None:
                chat.append({"role": "system", "content": text})
        else:
            _add_message(chat, message)
    thinking, config = value.get("thinking"), value.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    off = isinstance(thinking, dict) and thinking.get("type") == "disabled"
    return AsChat(chat, _messages_tools(value.get("tools")), effort, thinking_off=off, system_anywhere=inline)


def _system_text(system: object, *, whole: bool) -> str | None:
    """`whole`: a text that begins with an agent's billing header is left for later; blocks that do are dropped."""
    if not system:
        return None
    if isinstance(system, str):
        return None if system.startswith(_BILLING) and not whole else system
    if not isinstance(system, list):
        raise UnreadableError("its system prompt is neither text nor blocks")
    texts = []
    for block in system:
        if not isinstance(block, dict) or block.get("type") in ("tool_addition", "tool_removal"):
            raise UnreadableError("its tools change on the way")
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str) and not text.startswith(_BILLING):
            texts.append(text)
    return "".join(texts) or None


def _add_message(chat: list[Any], message: dict[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    seen: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        chat.append({**seen, "content": content})
        return
    if not isinstance(content, list):
        raise UnreadableError("a message has no content")
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        if not isinstance(block, dict):
            raise UnreadableError("a block is no object")
        match block.get("type"):
            case "text":
                if block.get("text"):
                    parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append({"type": "image_url", "image_url": block.get("source")})
            case "thinking":
                if isinstance(block.get("thinking"), str):
                    thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id") or "", "type": "function", "function": function})
            case "tool_result" if role == "user":
                _add_result(chat, block)
            case "tool_result":
                raise UnreadableError("an assistant gives a tool's result")
            case "redacted_thinking" | "tool_reference":
                pass
            case kind:
                raise UnreadableError(f"a block is of an unknown type: {kind!r:.40}")
    if thoughts:
        seen["reasoning"] = "".join(thoughts)
    if calls:
        seen["tool_calls"] = calls
    if parts:
        seen["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or "content" in seen:
        chat.append(seen)


def _add_result(chat: list[Any], block: dict[str, Any]) -> None:
    content = block.get("content")
    text = content if isinstance(content, str) else ""
    images: list[dict[str, Any]] = []
    if isinstance(content, list):
        items = [item for item in content if isinstance(item, dict)]
        if any(item.get("type") == "tool_reference" for item in items):
            raise UnreadableError("a tool's result names tools")
        text = "\n".join(str(item.get("text", "")) for item in items if item.get("type") == "text")
        images = [
            {"type": "image_url", "image_url": item.get("source")} for item in items if item.get("type") == "image"
        ]
    chat.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
    if images:
        chat.append({"role": "user", "content": images})


def _messages_tools(tools: object) -> list[Any] | None:
    if not isinstance(tools, list):
        return None
    shown = []
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(schema := tool.get("input_schema"), dict):
            raise UnreadableError("a tool has no input schema")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": tool.get("strict"),
            "defer_loading": tool.get("defer_loading"),
        }
        shown.append({"type": "function", "function": function})
    return shown
