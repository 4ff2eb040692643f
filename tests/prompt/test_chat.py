from __future__ import annotations

from typing import Any

import pytest

from router.prompt.chat import ChatTemplate, TemplateError, conversation

USER = {"role": "user", "content": "hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}]}


def rendered(template: str, *messages: dict[str, Any], **arguments: Any) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **arguments)


@pytest.mark.parametrize(
    ("template", "seen"),
    [
        ("{{ messages[0].content }}", "a\nb"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }};{% endfor %}{% endfor %}", "a;b;;"),
        ("{% for m in messages %}{% for part in m.content | list %}{{ part.text }};{% endfor %}{% endfor %}", "a;b;;"),
        ("{% for m in messages[:1] %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}", "a;b;;"),
        (
            "{% set r = messages %}{% for m in r %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}",
            "a;b;;",
        ),
        ("{% set content = messages[0].content %}{% for p in content %}{{ p.text }};{% endfor %}", "a;b;;"),
        (
            "{% macro show(c) %}{% for p in c %}{{ p.text }};{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "a;b;;",
        ),
        (
            "{% macro show(x, c) %}{% for p in c %}{{ p.text }};{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(1, c=m.content) }}{% endfor %}",
            "a;b;;",
        ),
        # A loop in a macro that no call gives content: `content` is just a name there.
        (
            "{% macro m(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
            "{{ m('x') + messages[0].content }}",
            "xa\nb",
        ),
        ("{% for t in tools or [] %}{{ t }}{% endfor %}{{ messages[0].content }}", "a\nb"),
    ],
)
def test_the_template_decides_how_it_gets_parts(template: str, seen: str) -> None:
    assert rendered(template, PARTS) == seen


def test_blocks_are_trimmed_and_text_is_not_escaped() -> None:
    assert (
        rendered("  {% if true %}\n<{{ messages[0].content }}>\n  {% endif %}\nx", {"role": "u", "content": "<&>"})
        == "<<&>>\nx"
    )


def test_what_templates_may_use() -> None:
    assert (
        rendered("{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ tools is none }}{{ documents is none }}", USER)
        == "<s></s>|TrueTrue"
    )
    assert rendered("{{ {'b': 'é<', 'a': 1} | tojson }}", USER) == '{"b": "é<", "a": 1}'
    assert rendered("{{ [1] | tojson(indent=1) }}", USER) == "[\n 1\n]"
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER) == "01"
    assert rendered("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", USER) == "ahib"
    assert rendered("{{ strftime_now('%%') }}", USER) == "%"
    assert (
        rendered("{{ x }}{{ bos_token }}{{ y is defined }}", USER, extra={"x": 1, "bos_token": "B", "y": None})
        == "1BFalse"
    )
    assert (
        rendered(
            "{{ add_generation_prompt }}", USER, add_generation_prompt=False, extra={"add_generation_prompt": True}
        )
        == "False"
    )


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"type": "function", "function": {"name": "f"}}]) == "f"
    with pytest.raises(TemplateError, match="no default, only rag, tool_use"):
        ChatTemplate({"tool_use": "", "rag": ""}, {}).render([USER])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat: roles must alternate"),
        ("{% if %}", "isn't valid Jinja"),
        ("{{ messages[5].content }}", "refuses this chat"),
        ("{{ messages[0].content + 1 }}", "refuses this chat"),
        ("{{ 1 / 0 }}", "refuses this chat: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat"),
        ("{{ messages.append(1) }}", "refuses this chat"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deep"),
    ],
)
def test_a_failing_template_is_one_kind_of_error(template: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        rendered(template, USER)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "text",
        {},
        {"role": 1},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"text": "x"}},
        {"role": "user", "content": [{"type": "refusal", "refusal": 5}]},
        {"role": "user", "content": [{"type": ["image_url"], "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"text": "no type"}]},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
    ],
)
def test_what_no_chat_is_made_of(message: Any) -> None:
    with pytest.raises(TemplateError):
        conversation([message], "string")


def test_media_go_by_the_id_that_they_are_given() -> None:
    def name(part: dict[str, Any]) -> str:
        return rendered("{{ messages[0].content }}", {"role": "user", "content": [part]})

    one = {"type": "image_url", "image_url": {"url": "http://x/1"}}
    other = {"type": "image_url", "image_url": {"url": "http://x/2"}}
    assert name(one) != name(other)
    assert name(one | {"uuid": "a"}) == name(other | {"uuid": "a"}) == name({"type": "image_url", "uuid": "a"})
    assert name(one | {"uuid": "a"}) != name(one | {"uuid": "b"})


def test_a_rendering_leaves_the_request_alone() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [call]}]
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    )
    assert rendered(template, *messages, add_generation_prompt=False) == "x1"
    assert rendered(template, *messages, add_generation_prompt=False, continue_final_message=True) == "x"
    assert call["function"]["arguments"] == '{"a": 1}'
    assert messages[0]["content"] == [{"type": "text", "text": "x"}]


def test_continuing_needs_a_final_message_that_the_template_keeps() -> None:
    final = {"role": "assistant", "content": "so far "}
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered("{% for m in messages %}[{{ m.content }}]{% endfor %}", USER, final, **options) == "[hi][so far "
    assert (
        rendered("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", USER, final, **options) == "[hi][so far"
    )
    with pytest.raises(TemplateError, match="changes the final message"):
        rendered("{{ messages[0].content }}", USER, final, **options)
