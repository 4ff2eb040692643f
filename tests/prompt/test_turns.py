"""Templates that write message by message are told from those that don't."""

from __future__ import annotations

import pytest

from router.prompt.chat import ChatTemplate
from router.prompt.turns import Turns, stand_in
from tests.prompt.templates import LOOKING_AHEAD, NOT, ONE_BY_ONE


def turns(source: str) -> Turns | None:
    template = ChatTemplate({"default": source}, {})
    template.prove()
    return template.turns(None)


@pytest.mark.parametrize("name", sorted(ONE_BY_ONE))
def test_message_by_message(name: str) -> None:
    assert turns(ONE_BY_ONE[name]) == Turns(lookahead=False)


@pytest.mark.parametrize("name", sorted(LOOKING_AHEAD))
def test_with_a_look_at_the_next_message(name: str) -> None:
    assert turns(LOOKING_AHEAD[name]) == Turns(lookahead=True)


@pytest.mark.parametrize("name", sorted(NOT))
def test_not_message_by_message(name: str) -> None:
    assert turns(NOT[name]) is None


LOOP = "{%% for m in messages %%}<|im_start|>{{ m.role }}{{ m.content }}%s{%% endfor %%}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP % "{{ loop.length }}",
        LOOP % "{{ loop.revindex }}",
        LOOP % "{% if loop.index0 > 3 %}x{% endif %}",
        LOOP % "{% if loop.index0 % 3 %}x{% endif %}",
        LOOP % "{{ messages[2].role }}",
        LOOP % "{{ messages[-1].role }}",
        LOOP % "{{ messages[loop.index0 - 3].role }}",
        LOOP % "{% if loop.changed(m.role) %}x{% endif %}",
        LOOP % "{% if add_generation_prompt %}x{% endif %}",
        LOOP % "{{ strftime_now('%S') }}",
        LOOP % "{% if m.content == 'end' %}{% break %}{% endif %}",
        LOOP % "{{ [1, 2, 3] | random }}",
        "{% if add_generation_prompt %}x{% endif %}" + LOOP % "",
        "{{ messages[-1].content }}" + LOOP % "",
        "{{ messages | map(attribute='role') | join }}" + LOOP % "",
        "{% set ns = namespace(all=messages) %}{{ ns.all | length }}" + LOOP % "",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages[2:] %}{{ m.content }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}" + LOOP % "{{ c.next() }}",
        "{% set xs = ['a', 'b'] | map('upper') %}" + LOOP % "{% for x in xs %}{{ x }}{% endfor %}",
        "{% set text %}" + LOOP % "" + "{% endset %}{{ text | trim }}",
        "{% macro all() %}" + LOOP % "" + "{% endmacro %}{{ all() }}",
        LOOP % "" + LOOP % "",
        "{% set messages = messages[::-1] %}" + LOOP % "",
        "{{ raise_exception('never') }}" + LOOP % "",
        "no messages at all",
    ],
)
def test_what_carries_knowledge_between_messages_is_refused(source: str) -> None:
    assert turns(source) is None


@pytest.mark.parametrize(
    "source",
    [
        LOOP % "{% if loop.index0 == 0 %}x{% endif %}{% if loop.index % 2 == 0 %}y{% endif %}{{ loop.first }}",
        LOOP % "{{ loop.previtem.role if loop.previtem is defined }}",
        LOOP % "{{ messages[0].content }}",
        LOOP % "" + "{{ messages[-1].role }}{% if add_generation_prompt %}x{% endif %}",
        "{{ strftime_now('%Y') }}" + LOOP % "",
        "{% set ns = namespace(n=0) %}{% for t in tools or [] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        + LOOP % "",
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
        + LOOP % "",
    ],
)
def test_what_carries_none_is_not(source: str) -> None:
    assert turns(source) == Turns(lookahead=False)


def test_a_stand_in_keeps_both_ends_and_parity() -> None:
    assert stand_in([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    assert stand_in([1, 2, 3, 4, 5, 6, 7]) == [1, 2, 3, 4, 5, 6, 7]
    assert stand_in([1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 5, 6, 7, 8]
    assert stand_in([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [1, 2, 5, 6, 7, 8, 9]
    whole: list[int] = []
    short: list[int] = []
    for number in range(20):
        whole.append(number)
        short = stand_in([*short, number])
        assert short == stand_in(whole)
