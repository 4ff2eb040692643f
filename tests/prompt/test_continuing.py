"""The request by which another engine goes on: the client's bytes but for what must differ, or a word why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_backend.settings import TINY
from router.prompt.chat import ChatTemplate
from router.prompt.continuing import CHAT, COMPLETIONS, UnfitError, continuation
from router.prompt.reader import Reader
from router.prompt.request import read
from router.prompt.tokens import Tokenizer

TOKENIZER = Tokenizer.load(TINY)
READER = Reader(TOKENIZER)
MESSAGES = [{"role": "user", "content": "Who are you? 你好"}]


def made(
    path: str,
    body: dict[str, Any] | bytes,
    text: str,
    *,
    events: int = 0,
    told: int | None = None,
    reader: Any = READER,
) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    value = json.loads(continuation(path, raw, text, reader, events=events, told=told).body)
    assert isinstance(value, dict)
    return value


def refused(path: str, body: dict[str, Any], text: str = "I am a keeper", **more: Any) -> str:
    with pytest.raises(UnfitError) as error:
        made(path, body, text, **more)
    return str(error.value)


def test_a_chat_goes_on_in_the_assistants_message_and_every_other_byte_stays() -> None:
    body = b'{ "model": "m",\n "messages" : [ {"content": "Who?", "role":"user"} ] , "stream":true, "max_tokens": 50 }'
    count = len(TOKENIZER.encode(' I "am"\n', False))
    assert continuation(CHAT, body, ' I "am"\n', READER, events=count, told=None).body == (
        b'{ "model": "m",\n "messages" : [ {"content": "Who?", "role":"user"},'
        b'{"role":"assistant","content":" I \\"am\\"\\n"}] , "stream":true, "max_tokens": %d'
        b',"add_generation_prompt":false,"continue_final_message":true }' % (50 - count)
    )


def test_a_text_goes_on_behind_the_prompt() -> None:
    count = len(TOKENIZER.encode(" keeper", False))
    assert made(COMPLETIONS, {"prompt": "I am a", "stream": True}, " keeper") == {
        "prompt": "I am a keeper",
        "stream": True,
        "max_tokens": 16 - count,  # what a completion ends at by itself
    }
    assert made(COMPLETIONS, {"prompt": "I am a", "max_tokens": None}, " keeper")["max_tokens"] is None


def test_token_ids_go_on_as_token_ids() -> None:
    ids = TOKENIZER.encode("I am a", True)
    more = TOKENIZER.encode(" keeper", False)
    assert made(COMPLETIONS, {"prompt": ids, "max_tokens": 50}, " keeper") == {
        "prompt": [*ids, *more],
        "max_tokens": 50 - len(more),
    }


def test_bounds_shrink_by_what_was_said() -> None:
    count = len(TOKENIZER.encode(" I am", False))
    body = {"messages": MESSAGES, "max_completion_tokens": 30, "max_tokens": 40, "min_tokens": 20}
    value = made(CHAT, body, " I am", events=count, told=count)
    assert (value["max_completion_tokens"], value["max_tokens"], value["min_tokens"]) == (
        30 - count,
        40 - count,
        20 - count,
    )
    assert made(CHAT, {"messages": MESSAGES, "min_tokens": 1}, " I am")["min_tokens"] == 0
    assert "max_tokens" not in made(CHAT, {"messages": MESSAGES}, " I am")


def test_a_message_that_was_continued_already_grows() -> None:
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    value = made(CHAT, body, " a keeper")
    assert value["messages"] == [*MESSAGES, {"role": "assistant", "content": "I am a keeper"}]


def test_where_nothing_was_said_the_same_bytes_go_again_whatever_they_ask() -> None:
    body = b'{"tools":[1],"n":2}'
    assert continuation(CHAT, body, "", None, events=0, told=None).body is body


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_the_engine_sees_the_prompt_and_the_text_or_there_is_no_continuation(text: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "The sea", "max_tokens": 5000}),
        (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 5000}),
    ]
    for path, body in bodies:
        raw = json.dumps(body).encode()
        try:
            goes_on = continuation(path, raw, text, READER, events=0, told=None)
        except UnfitError:
            continue
        (before,) = READER.tokenize(read(path, raw))
        (after,) = READER.tokenize(read(path, goes_on.body))
        assert after[: len(before)] == before
        assert len(after) - len(before) == goes_on.tokens
        assert TOKENIZER.decode(list(after[len(before) :])) == text


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"echo": True},
        {"return_token_ids": True},
        {"prompt_logprobs": 1},
        {"bad_words": ["a"]},
        {"truncate_prompt_tokens": 5},
        {"use_beam_search": True},
        {"vllm_xargs": {"a": 1}},
        {"stop": [5]},
        {"invented_tomorrow": False},
    ],
)
def test_what_looks_back_or_is_unknown_is_not_continued(change: dict[str, Any]) -> None:
    assert refused(CHAT, {"messages": MESSAGES} | change) == "form of the request"
    plain = dict.fromkeys(change)  # null asks for nothing
    assert made(CHAT, {"messages": MESSAGES} | plain, "I am")


def test_what_asks_for_nothing_is_continued() -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES,
        **{"n": 1, "presence_penalty": 0.0, "logprobs": False, "tools": [], "tool_choice": "none", "echo": False},
        **{"response_format": {"type": "text"}, "temperature": 0.7, "seed": 5, "top_p": 0.9, "user": "u"},
    }
    assert made(CHAT, body, "I am")["messages"][-1]["content"] == "I am"
    assert refused(COMPLETIONS, {"prompt": "a", "logprobs": 0}) == "form of the request"


def test_stop_strings_that_may_have_begun_are_not_continued() -> None:
    body = {"messages": MESSAGES}
    assert refused(CHAT, body | {"stop": "END"}) == "stop strings"  # the engine held text back
    assert made(CHAT, body | {"stop": ["\n", "."]}, "I am")  # of one character nothing is held back
    shown = body | {"stop": ["END"], "include_stop_str_in_output": True}
    assert made(CHAT, shown, "I am")
    assert refused(CHAT, shown, "the EN") == "stop strings"


def test_tokens_that_do_not_add_up_are_not_continued() -> None:
    count = len(TOKENIZER.encode("I am a keeper", False))
    assert refused(CHAT, {"messages": MESSAGES}, told=count + 1) == "tokens are not known"
    assert refused(CHAT, {"messages": MESSAGES}, events=count + 1) == "tokens are not known"
    assert refused(CHAT, {"messages": MESSAGES, "max_tokens": count}) == "tokens are not known"
    assert made(CHAT, {"messages": MESSAGES}, "I am a keeper", events=1)  # several tokens in one event


def test_a_token_across_the_prompts_end_is_not_continued() -> None:
    whole = TOKENIZER.encode("keeper", False)
    split = next(
        at
        for at in range(1, 6)
        if TOKENIZER.encode("keeper"[:at], False) != whole[: len(TOKENIZER.encode("keeper"[:at], False))]
    )
    assert refused(COMPLETIONS, {"prompt": "keeper"[:split]}, "keeper"[split:]) == "tokens are not known"


@pytest.mark.parametrize(
    "template",
    [
        # One that has the model think before it answers, and leaves the thoughts of earlier turns out.
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        # One that trims messages.
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ],
    ids=["thinks", "trims"],
)
def test_a_template_that_writes_something_else_is_not_continued(template: str) -> None:
    tokenizer = Tokenizer.load(TINY)
    tokenizer.chat_template = ChatTemplate({"default": template}, {})
    reader = Reader(tokenizer)
    for text in (" I am", "I am\n"):
        with pytest.raises(UnfitError, match="chat template"):
            continuation(CHAT, json.dumps({"messages": MESSAGES}).encode(), text, reader, events=0, told=None)


def test_without_a_tokenizer_or_a_readable_prompt_nothing_is_continued() -> None:
    assert refused(CHAT, {"messages": MESSAGES}, reader=None) == "no tokenizer"
    assert refused(CHAT, {"messages": MESSAGES}, reader=Reader(None)) == "no tokenizer"
    assert refused(CHAT, {"messages": []}) == "form of the request"
    assert refused(CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}) == "form of the request"
    assert refused(COMPLETIONS, {"prompt": ["a", "b"]}) == "form of the request"
