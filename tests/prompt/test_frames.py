from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_backend
from router.prompt.chat import ChatTemplate, TemplateError, _Compiled
from tests.prompt.templates import TEMPLATES

TINY = (Path(fake_backend.__file__).parent / "tiny" / "chat_template.jinja").read_text()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FRAMED = {
    name: source for name, source in (TEMPLATES | {"tiny": TINY}).items() if name not in ("parts", "old thoughts go")
}

text = st.text("ab <|>\n\u2003\ue0f3-0{}%\\1é", max_size=12) | st.just("x-anthropic-billing-header: a\nb")
chats = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "critic"]), text), max_size=10)


def proven(source: str, *, framed: bool = True) -> ChatTemplate:
    template = ChatTemplate({"default": source}, SPECIAL)
    template.prove()
    if not framed:
        template._compile(None, None).verbatim = False
    return template


PROVEN = {name: proven(source) for name, source in (TEMPLATES | {"tiny": TINY}).items()}
UNFRAMED = {name: proven(source, framed=False) for name, source in (TEMPLATES | {"tiny": TINY}).items()}


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def rendered(template: ChatTemplate, chat: list[tuple[str, str]], begin: bool) -> str | None:
    try:
        return template.render(messages_of(chat), add_generation_prompt=begin)
    except TemplateError:
        return None


def rendered_in_parts(template: ChatTemplate, chat: list[tuple[str, str]], begin: bool) -> list[str] | None:
    try:
        return template.render_parts(messages_of(chat), add_generation_prompt=begin)
    except TemplateError:
        return None


@given(st.sampled_from(sorted(PROVEN)), st.lists(st.tuples(chats, st.booleans()), max_size=4))
def test_a_frame_gives_what_the_template_gives(name: str, asked: list[tuple[list[tuple[str, str]], bool]]) -> None:
    template = PROVEN[name]
    plain = ChatTemplate({"default": (TEMPLATES | {"tiny": TINY})[name]}, SPECIAL)  # not proven: no frames
    for chat, begin in asked:
        right = rendered(plain, chat, begin)
        assert rendered(template, chat, begin) == right
        assert rendered(template, chat, begin) == right  # from the frame that the first one left


@given(st.sampled_from(sorted(PROVEN)), st.lists(st.tuples(chats, st.booleans()), max_size=4))
def test_so_do_the_frames_of_its_parts(name: str, asked: list[tuple[list[tuple[str, str]], bool]]) -> None:
    template = PROVEN[name]
    unframed = UNFRAMED[name]
    for chat, begin in asked:
        right = rendered_in_parts(unframed, chat, begin)
        assert rendered_in_parts(template, chat, begin) == right
        assert rendered_in_parts(template, chat, begin) == right
        for last in range(len(right or ())):
            assert right is not None
            parts = template.render_parts(messages_of(chat), add_generation_prompt=begin, last=last)
            assert parts is not None
            assert (len(parts), parts[0]) == (len(right), right[0])
            assert parts[len(parts) - last :] == right[len(right) - last :]


@pytest.mark.interpreted
def test_the_parts_of_chats_of_the_same_roles_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = proven(FRAMED["tiny"])
    roles = ("system", *("user", "assistant") * 5, "user")
    template.render_parts(messages_of([(role, "one") for role in roles]))
    monkeypatch.setattr(_Compiled, "render_parts", None)
    parts = template.render_parts(messages_of([(role, "two") for role in roles]))
    assert parts is not None
    assert len(parts) == len(roles) + 2
    assert all("two" in part for part in parts[1:-1])


@pytest.mark.interpreted
def test_chats_of_the_same_roles_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FRAMED:
        template = proven(FRAMED[name])
        first = [{"role": "user", "content": "one"}]
        template.render(first)
        with monkeypatch.context() as patched:
            patched.setattr(_Compiled, "render", None)
            template.render([{"role": "user", "content": " two\n"}])
            with pytest.raises(TypeError):
                template.render([{"role": "user", "content": ""}])  # says nothing, and templates may ask that
            with pytest.raises(TypeError):
                template.render([*first, *first])
            with pytest.raises(TypeError):
                template.render(first, extra={"enable_thinking": False})
            with pytest.raises(TypeError):
                template.render([{"role": "user", "content": "one", "name": "n"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | trim + 'x' }}{% endfor %}",
        "{% for m in messages[1:] %}{{ 'x' ~ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content or '' }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content %}{{ m.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if 'tools' in m %}x{% endif %}{{ messages[loop.index0 - 1].role }}{% endfor %}",
        "{% set a = messages[0].content %}{% set b = a + 'x' %}{{ b }}{{ messages | length }}",
        "{{ (messages[0].content if messages[0].content else 'x') + 'y' }}",
    ],
)
def test_contents_that_are_only_written_have_a_frame(source: str) -> None:
    assert proven(source)._compile(None, None).verbatim


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{% for m in messages %}{{ m.items() | list }}{% endfor %}",
        "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
        "{% for m in messages %}{{ m['get']('content') }}{% endfor %}",
        "{% for m in messages %}{{ m[m.role] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim('x') }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
        "{% for m in messages %}{% if m.content | trim %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% if 'x' in m.content %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'x' %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content + 'x' %}x{% endif %}{% endfor %}",
        "{% for m in messages if m.content %}x{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
        "{% for m in messages %}{% set t %}{{ m.content }}{% endset %}{{ t | length }}{% endfor %}",
        "{% for m in messages %}{% set t = m.content %}{{ t | length }}{% endfor %}",
        "{% for m in messages %}{% set t = m.content %}{% if t %}{{ t }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set t = m.content %}{% set u = t + 'x' %}{{ u[0] }}{% endfor %}",
        "{% for m in messages %}{% set m = m.content %}{{ 'x' in m }}{% endfor %}",
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = m.content %}{% endfor %}{{ ns.t[0] }}",
        "{% macro show(t) %}{{ t[0] }}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show() %}{{ messages[0].content }}{% endmacro %}{{ show()[0] }}",
        "{% for m in messages %}{{ loop.previtem.content[0] }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m.content) }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content[0] }}{% endfor %}",
        "{% for m in [messages[0]] %}{{ m.content[0] }}{% endfor %}",
        "{{ messages | map(attribute='content') | first | first }}",
        "{{ messages[:1] }}",
        "{{ messages }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%H') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ [1, 2] | random }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ lipsum() }}",
    ],
)
def test_contents_that_may_do_more_have_none(source: str) -> None:
    assert not proven(source)._compile(None, None).verbatim


def test_a_content_that_is_stripped_may_stand_right_before_one_that_is_not() -> None:
    source = "{% for m in messages %}{{ m.content | trim if m.role == 'system' else m.content }}{% endfor %}"
    template, plain = proven(source), ChatTemplate({"default": source}, SPECIAL)
    for system, user in (("a", "b"), (" a ", " b ")):
        chat = [("system", system), ("user", user)]
        assert rendered(template, chat, True) == rendered(plain, chat, True)
    assert template._frames


def test_a_template_that_writes_the_spaces_of_stand_ins_itself_has_no_frames() -> None:
    source = "{% for m in messages %}\u2003{{ m.content | trim }}{% endfor %}"
    template, plain = proven(source), ChatTemplate({"default": source}, SPECIAL)
    for content in ("\u2003a", "b"):
        assert rendered(template, [("user", content)], True) == rendered(plain, [("user", content)], True)
    assert not template._frames


def test_few_frames_are_kept() -> None:
    template = proven(FRAMED["tiny"])
    roles = ("system", "user", "assistant", "tool")
    for number in range(200):
        template.render([{"role": roles[number // 4**place % 4], "content": "x"} for place in range(4)])
    assert 0 < len(template._frames) <= 64
