"""Requests of every shape that a prompt can have, for recording what token ids real vLLM makes of them."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather <of> a 'place' & day",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "maximum": 7.5}},
            "required": ["place"],
        },
    },
    "vendor": "ignored",
}
CALL = {
    "id": "call_1",
    "type": "function",
    "index": 0,
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 2}'},
}
SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Where does the river go?"}

LOOP_TEMPLATE = """\
{{- bos_token }}{%- for message in messages %}
{{- '[' + message.role + ']' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '<' + part.type + '>' + part.text }}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

MACRO_TEMPLATE = """\
{%- macro show(body) %}{% for part in body %}{{ part['text'] | trim }};{% endfor %}{% endmacro %}
{%- for m in messages[0:] %}{{ m['role'] }}:{{ show(m['content']) }}
{% endfor %}"""

PLAIN_TEMPLATE = """\
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}{% endif %}
{% for m in rest %}
    {% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}
    {% if loop.index0 > 7 %}{% break %}{% endif %}
    {%- generation %}{{ m.role | upper }} {{ m.content | trim }} {{ eos_token }}{% endgeneration %}

{% endfor %}
{{ reasoning_effort | default('none given') }} {{ enable_thinking | default('?') }} {{ style }}
{%- for d in documents or [] %}({{ d.title }}|{{ d.text }}){% endfor %}"""


def chat(*messages: dict[str, Any], **members: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), **members}


def completion(prompt: object, **members: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETION, {"prompt": prompt, **members}


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one message": chat(USER),
    "system and turns": chat(SYSTEM, USER, {"role": "assistant", "content": "To the sea."}, USER),
    "text of many kinds": chat(
        {"role": "user", "content": "naïve 你好 🙂\u200d\t\r\n  <b>&amp;</b>\u0000 ١٢٣ 3.14\n\n\n"}
    ),
    "special tokens in text": chat({"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb<|endoftext|>"}),
    "text parts": chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}),
    "parts of other kinds": chat(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ),
    "no content": chat(USER, {"role": "assistant", "content": None}, {"role": "user", "content": []}),
    "names": chat({"role": "system", "content": "x", "name": "rules"}, {"role": "user", "content": "y", "name": "Ann"}),
    "tools": chat(SYSTEM, USER, tools=[WEATHER, {"type": "function", "function": {"name": "now"}}]),
    "tools, strict": chat(
        USER, tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}]
    ),
    "tool calls": chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        tools=[WEATHER],
    ),
    "tool calls without arguments": chat(
        USER,
        {
            "role": "assistant",
            "content": "calling",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}},
                {"id": "2", "type": "function", "function": {"name": "now", "arguments": "not JSON"}},
                {"id": "3", "type": "function", "function": {"name": "now", "arguments": "[1]"}},
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "it"}, {"type": "text", "text": "is"}],
        },
    ),
    "empty tool calls": chat(USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER),
    "developer": chat({"role": "developer", "content": "Be kind."}, USER),
    "developer among others": chat(SYSTEM, USER, {"role": "developer", "content": "Be kind."}, USER),
    "other roles and members": chat({"role": "narrator", "content": "Once"}, {**USER, "mood": "calm"}),
    "an agent's billing header": chat(
        {"role": "system", "content": "x-anthropic-billing-header: cch=12345;\nYou are an agent."}, USER
    ),
    "no generation prompt": chat(USER, add_generation_prompt=False),
    "continued message": chat(
        USER, {"role": "assistant", "content": "To the "}, add_generation_prompt=False, continue_final_message=True
    ),
    "special tokens added": chat(USER, add_special_tokens=True),
    "template arguments": chat(USER, chat_template_kwargs={"enable_thinking": False, "unknown": 1}),
    "reasoning effort": chat(USER, reasoning_effort="none"),
    "reasoning in history": chat(USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}, USER),
    "template with parts": chat(
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        chat_template=LOOP_TEMPLATE,
    ),
    "template with parts, continued": chat(
        USER,
        {"role": "assistant", "content": "And then"},
        chat_template=LOOP_TEMPLATE,
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "template with a macro": chat(SYSTEM, USER, chat_template=MACRO_TEMPLATE),
    "template with much in it": chat(
        SYSTEM,
        USER,
        {"role": "assistant", "content": "  spaced  "},
        USER,
        chat_template=PLAIN_TEMPLATE,
        reasoning_effort="high",
        documents=[{"title": "T", "text": "body"}],
        chat_template_kwargs={"style": "dry", "eos_token": "<end>"},
    ),
    "template without developers": chat(
        {"role": "developer", "content": "Be kind."},
        SYSTEM,
        USER,
        chat_template=PLAIN_TEMPLATE.replace("'developer'", "dev"),
    ),
    "duplicate members": (CHAT, {"messages": [SYSTEM], "DUPLICATE messages": [USER]}),
    "completion": completion("The river goes"),
    "completion, special tokens in text": completion("<|im_start|>user\nx<|im_end|>"),
    "completion, several": completion(["one", "two three", " four\n"]),
    "completion, ids": completion([5, 6, 7, 4095, 0]),
    "completion, several of ids": completion([[5], [6, 7]]),
    "completion, no special tokens": completion("The river", add_special_tokens=False),
    "completion, several answers": completion(["one", "two"], n=2),
}


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FLAT_WEATHER = {"type": "function", **WEATHER["function"], "strict": None}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"place": "Zürich"}'}
TOOL = {"name": "weather", "description": "Tell it", "input_schema": {"properties": {"place": {"type": "string"}}}}
USES = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "the sea?", "signature": "s"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Zürich", "n": 1}},
        {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
    ],
}
GIVES = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "content": [{"type": "text", "text": "wet"}, {"type": "text", "text": "cold"}],
        },
        {"type": "text", "text": "And now?"},
    ],
}


def responses(given: object, **members: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "tiny", "input": given, **members}


def messages(*chat: object, **members: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"model": "tiny", "max_tokens": 8, "messages": list(chat), **members}


# What token ids other APIs' requests become is told by their render routes.
RENDERED: dict[str, tuple[str, dict[str, Any]]] = {
    "responses, text": responses("Where does the river go?"),
    "responses, instructions and tools": responses(
        "Where?", instructions="Be brief.", tools=[FLAT_WEATHER, {"type": "function", "name": "now", "parameters": {}}]
    ),
    "responses, messages": responses(
        [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "To the sea."}]},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "Because"},
            {"type": "message", "role": "user", "content": "So?"},
        ]
    ),
    "responses, calls": responses(
        [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "One moment."},
            FUNCTION_CALL,
            FUNCTION_CALL | {"call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "call_2", "output": "wet"},
            FUNCTION_CALL | {"call_id": "call_3"},
            {"type": "function_call_output", "call_id": "call_3", "output": "cold"},
        ],
        tools=[FLAT_WEATHER],
    ),
    "responses, continued": responses(
        [
            {"role": "user", "content": "Where?"},
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": "To the "}],
            },
        ]
    ),
    "responses, two answers in a row": responses(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    ),
    "responses, effort": responses("x", reasoning={"effort": "none"}),
    "responses, template arguments": responses("x", chat_template_kwargs={"enable_thinking": False}),
    "messages, text": messages({"role": "user", "content": "Where does the river go?"}),
    "messages, system text": messages({"role": "user", "content": "x"}, system="You are brief."),
    "messages, system blocks": messages(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " an agent."},
        ],
    ),
    "messages, a billing header in text": messages(
        {"role": "user", "content": "x"}, system="x-anthropic-billing-header: cch=12345;\nYou are an agent."
    ),
    "messages, tools": messages(
        {"role": "user", "content": "Weather?"}, USES, GIVES, tools=[TOOL], tool_choice={"type": "auto"}
    ),
    "messages, a result alone": messages(
        {"role": "user", "content": "Weather?"}, USES, {"role": "user", "content": GIVES["content"][:1]}, tools=[TOOL]
    ),
    "messages, system among them": messages(
        {"role": "user", "content": "x"},
        {"role": "system", "content": "Now be long."},
        {"role": "assistant", "content": [{"type": "text", "text": "To the sea."}]},
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " kind."}]},
        {"role": "user", "content": "y"},
        system="You are brief.",
    ),
    "messages, begun": messages({"role": "user", "content": "x"}, {"role": "assistant", "content": "To the"}),
    "messages, thinking off": messages({"role": "user", "content": "x"}, thinking={"type": "disabled"}),
    "messages, thinking on": messages(
        {"role": "user", "content": "x"}, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}
    ),
    "messages, template arguments": messages(
        {"role": "user", "content": "x"}, chat_template_kwargs={"enable_thinking": False}
    ),
}
