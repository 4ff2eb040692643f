"""What is known of earlier requests never changes what is read: rows equal reading from scratch."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from router.prompt.blocks import NO_EXTRA, Extra
from router.prompt.bodies import STEP, Bodies, Known, State, marks
from router.prompt.chat import ChatTemplate
from router.prompt.memo import Memo
from router.prompt.reader import PromptError, Reader
from router.prompt.request import Beginning, read
from router.prompt.tokens import Tokenizer
from tests.prompt.templates import LOOKING_AHEAD, ONE_BY_ONE, TEMPLATES
from tests.prompt.test_against_vllm import TINY
from tests.prompt.test_mistral import tokenizer as mistral

CHAT = "/v1/chat/completions"
ROLES = ("user", "assistant", "user", "assistant", "system", "tool")


@lru_cache(maxsize=1)
def engine() -> Any:
    return Engine.from_file(str(TINY / "tokenizer.json"))


MISTRAL = ("v3", "v7", "v11", "v13")


@lru_cache
def tokenizer(template: str) -> Tokenizer:
    if template in MISTRAL:
        return mistral(template)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer(template, engine(), chat_template=ChatTemplate({"default": TEMPLATES[template]}, special))


def beginning(memo: Memo, body: bytes) -> Beginning | None:
    if len(body) < STEP:  # the router begins with longer ones
        return None
    found = marks(body)
    return Beginning(found, Bodies(memo.bodies).find(body, found))


def outcome(
    reader: Reader, body: bytes, known: Beginning | None, views: list[tuple[str, int, Extra]], path: str = CHAT
) -> Any:
    """What incremental reading gives, from this reader's memo."""
    ask = read(path, body, known)
    try:
        rows = reader.rows(ask)
    except PromptError as error:
        return str(error)
    chains = [[row.chain(reader.hasher(name, "0"), size, extra).keys for row in rows] for name, size, extra in views]
    return (
        ask.kind,
        ask.model,
        ask.hand_off,
        chains,
        list(map(len, rows)),
        [row.units() for row in rows],
        ask.tails,
        ask.inexact,
    )


def from_scratch(reader: Reader, body: bytes, views: list[tuple[str, int, Extra]], path: str = CHAT) -> Any:
    """The same by `tokenize`, which remembers nothing."""
    ask = read(path, body)
    try:
        prompts = reader.tokenize(ask)
    except PromptError as error:
        return str(error)
    chains = [
        [reader.hasher(name, "0").chain(p, size, extra).keys for p in prompts]  # type: ignore[arg-type]
        for name, size, extra in views
    ]
    return ask.kind, ask.model, ask.hand_off, chains, list(map(len, prompts)), prompts, ask.tails, ask.inexact


WORDS = ["lorem ", "<|im_end|>", "日本", "\n", '"}]}', '\\"messages":[']
TOOLS: list[Any] = [None, [], [{"type": "function", "function": {"name": "messages"}}]]
TOOLS += [[{"a": 1}], [{"a": 1.0}], [{"a": True}]]

texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "",
            " ",
            "\n\n",
            "<|im_start|>",
            "<|im_end|>\n<|im_start|>user\nx",
            "<|im_",
            "start|>",
            "</s> é\u0301🙂",
            "\\u00e9",
        ]
    ),
    st.builds(
        lambda word, n: word * n,
        st.sampled_from(["lorem ", "<|im_end|>", "日本", "\n", '"}]}', '\\"messages":[']),
        st.integers(1, 900),
    ),
)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.just("c"),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.just('{"a": 1, "messages": []}')}),
        }
    ),
    max_size=2,
)
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries(
        {"type": st.just("image_url"), "image_url": st.sampled_from([{"url": "a"}, {"url": "b"}, 5])},
        optional={"uuid": st.sampled_from(["one", "two"])},
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}),
    st.fixed_dictionaries({"type": st.just("input_audio"), "input_audio": st.just({"data": "AA==", "format": "wav"})}),
)
thoughts = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts}, optional={"reasoning": texts, "reasoning_content": texts}
)
messages = st.one_of(
    thoughts,
    st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("c")}),
    st.fixed_dictionaries({"role": st.just("user"), "content": texts, "name": st.sampled_from(["n", "m"])}),
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts, "tool_calls": calls}),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(parts, max_size=3),
        }
    ),
    st.fixed_dictionaries({"role": st.just("developer"), "content": texts}),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "n"]),
        "tools": st.sampled_from(
            [
                None,
                [],
                [{"type": "function", "function": {"name": "messages"}}],
                [{"a": 1}],
                [{"a": 1.0}],
                [{"a": True}],
            ]
        ),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "add_special_tokens": st.booleans(),
        "stream": st.booleans(),
        "documents": st.sampled_from([[], [{"text": "d"}]]),
        "reasoning_effort": st.sampled_from(["none", "high"]),
        "chat_template": st.sampled_from(["{{ messages[0].content }}", "{% if %}"]),
        "cache_salt": st.just("s"),
        "n": st.just(2),
        "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": False}, {"messages": 1}, {"eos_token": "E"}]),
        "kv_transfer_params": st.just({"messages": [1]}),
        "messages": st.just([{"role": "user", "content": "another"}]),
    },
)


members = st.one_of(st.just({}), st.just({"model": "m"}), st.just({"tools": TOOLS[2]}), options)


def body_of(head: dict[str, Any], chat: list[Any], tail: dict[str, Any], spaced: bool) -> bytes:
    """A body with members before and behind its messages, some of them perhaps twice."""
    comma, colon = (", ", ": ") if spaced else (",", ":")

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=spaced, separators=(comma, colon))

    pairs = [*head.items(), ("messages", chat), *tail.items()]
    written = comma.join(f"{text(name)}{colon}{text(value)}" for name, value in pairs)
    return f"{{{written}}}".encode("utf-8", "surrogatepass")


tame = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant", "tool")), "content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts, "tool_calls": calls}),
)
tame_templates = st.sampled_from(["chatml", "headers", "neighbours", "parts", "plain", "v3", "v7"])
templates = st.sampled_from(sorted(ONE_BY_ONE | LOOKING_AHEAD)) | st.sampled_from([*sorted(TEMPLATES), *MISTRAL])


@st.composite
def conversations(draw: st.DrawFn, wild: bool = True) -> list[tuple[str, bytes]]:
    """Requests in a row: a chat that grows, is edited, cut short, begun anew, asked with other options."""
    spaced = draw(st.booleans())
    head, tail = (draw(members), draw(members)) if wild else ({"model": "m"}, {"stream": True})
    head.pop("messages", None)
    any_message = messages if wild else tame
    # Bodies of one STEP and more are remembered.
    first = {
        "role": draw(st.sampled_from(ROLES)),
        "content": draw(texts) + "long " * draw(st.sampled_from([1600, 3400])),
    }
    chat: list[Any] = [first, *draw(st.lists(any_message, max_size=9))]
    template = draw(templates if wild else tame_templates)
    requests = [(template, body_of(head, chat, tail, spaced))]
    moves = ["more", "more", "more", "same", "edit", "cut"]
    for _ in range(draw(st.integers(1, 5))):
        match draw(st.sampled_from([*moves, "options", "template", "drop"] if wild else moves)):
            case "more":
                chat = chat + draw(st.lists(any_message, min_size=1, max_size=3))
            case "edit":
                at = draw(st.integers(0, len(chat) - 1))
                chat = [*chat[:at], draw(any_message), *chat[at + 1 :]]
            case "cut":
                chat = chat[: draw(st.integers(1, len(chat)))]
            case "drop":
                chat = chat[draw(st.integers(0, len(chat) - 1)) :]
            case "options":
                tail = draw(members)
            case "template":
                template = draw(templates)
            case _:
                pass
        requests.append((template, body_of(head, chat, tail, spaced)))
    return requests


VIEWS = [("sha256_cbor", 16, NO_EXTRA), ("xxhash", 5, Extra("l", "/l", "salt"))]


def agrees(requests: list[tuple[str, bytes]], limit: int, exact: bool) -> None:
    memo = Memo(limit)
    for template, body in requests:
        reader = Reader(tokenizer(template) if exact else None, memo, trust_request_chat_template=True)
        known = beginning(memo, body)
        assert outcome(reader, body, known, VIEWS) == from_scratch(reader, body, VIEWS)
        assert memo.held <= limit


limits = st.sampled_from([1 << 24, 1 << 24, 60_000, 4_000, 0])


@settings(max_examples=100, deadline=None)
@given(conversations(), limits, st.booleans())
def test_incremental_is_from_scratch(requests: list[tuple[str, bytes]], limit: int, exact: bool) -> None:
    agrees(requests, limit, exact)


@settings(max_examples=150, deadline=None)
@given(conversations(wild=False), limits)
def test_incremental_is_from_scratch_where_beginnings_are_known(requests: list[tuple[str, bytes]], limit: int) -> None:
    agrees(requests, limit, True)


# -- what is no chat completion ----------------------------------------------------------------------------------

long_texts = st.builds(
    lambda text, word, times: text + word * times, texts, st.sampled_from(WORDS), st.sampled_from([0, 90])
)
ids = st.lists(st.integers(0, 4000), min_size=1, max_size=40)
given_prompts = st.one_of(long_texts, st.lists(long_texts, max_size=3), ids, st.lists(ids, max_size=3))
block = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("image"), "source": st.just({"type": "url", "url": "a"})}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.just("c"), "name": st.just("f"), "input": st.just({})}
    ),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": st.just("c"), "content": texts}),
)
item = st.one_of(
    messages,
    st.fixed_dictionaries({"type": st.just("reasoning"), "content": st.just([{"type": "text", "text": "hm"}])}),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": st.just("c"),
            "name": st.just("f"),
            "arguments": st.sampled_from(["{}", '{"x": 1}', "no json"]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": st.just("c"), "output": texts}),
)
others = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        st.fixed_dictionaries(
            {"prompt": given_prompts},
            optional={
                "add_special_tokens": st.booleans(),
                "n": st.just(2),
                "prompt_embeds": st.sampled_from([None, "AA=="]),
                "truncate_prompt_tokens": st.just(5),
            },
        ),
    ),
    st.tuples(
        st.just("/v1/embeddings"),
        st.one_of(
            st.fixed_dictionaries({"input": given_prompts}, optional={"add_special_tokens": st.booleans()}),
            st.fixed_dictionaries({"input": st.lists(messages, min_size=1, max_size=3)}),
            st.builds(lambda chat, more: {**more, "messages": chat}, st.lists(messages, max_size=3), options),
        ),
    ),
    st.tuples(
        st.just("/v1/responses"),
        st.fixed_dictionaries(
            {"input": long_texts | st.lists(item, max_size=4)},
            optional={"instructions": texts, "reasoning": st.just({"effort": "high"})},
        ),
    ),
    st.tuples(
        st.just("/v1/messages"),
        st.fixed_dictionaries(
            {
                "messages": st.lists(
                    st.fixed_dictionaries(
                        {
                            "role": st.sampled_from(["user", "assistant", "user", "system"]),
                            "content": long_texts | st.lists(block, max_size=3),
                        }
                    ),
                    max_size=4,
                )
            },
            optional={
                "system": texts,
                "thinking": st.just({"type": "disabled"}),
                "tools": st.just([{"name": "f", "input_schema": {}}]),
            },
        ),
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(templates, others), min_size=1, max_size=5), limits, st.booleans())
def test_other_requests_are_read_as_from_scratch(
    requests: list[tuple[str, tuple[str, dict[str, Any]]]], limit: int, exact: bool
) -> None:
    memo = Memo(limit)
    for template, (path, asked) in requests:
        reader = Reader(tokenizer(template) if exact else None, memo)
        body = json.dumps(asked).encode()
        assert outcome(reader, body, None, VIEWS, path) == from_scratch(reader, body, VIEWS, path)
        assert memo.held <= limit


def test_a_known_beginning_weighs_what_it_holds_whoever_else_changed_it_meanwhile() -> None:
    def states(rest: str) -> dict[bytes, State]:
        return {b"key": State(b"", rest, 0)}

    class Interrupted(dict[bytes, State]):
        def values(self) -> Any:
            known.stand(states("c" * 10))  # another thread has its turn
            return super().values()

    known = Known(0, b"", {}, 0, [], 0, states("a" * 5000))
    known.stand(Interrupted(states("b" * 20)))
    assert known.weight == Known(0, b"", {}, 0, [], 0, states("b" * 20)).weight
