from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.request import CARRIERS, HAND_OFF_KEYS, Ask, read, without_hand_off

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**members: Any) -> Ask:
    return read(CHAT, json.dumps({"messages": MESSAGES, **members}).encode())


def test_a_chat() -> None:
    ask = chat(
        model="m",
        stream=True,
        max_tokens=5,
        n=2,
        cache_salt="s",
        stream_options={"include_usage": True},
        tools=[{"a": 1}],
    )
    assert (ask.kind, ask.model, ask.stream, ask.max_tokens, ask.n, ask.cache_salt) == ("chat", "m", True, 5, 2, "s")
    assert (ask.include_usage, ask.messages, ask.tools, ask.hand_off) == (True, MESSAGES, [{"a": 1}], False)
    assert (ask.add_generation_prompt, ask.continue_final_message, ask.add_special_tokens) == (True, False, False)


def test_a_completion() -> None:
    ask = read(COMPLETION + "?x=1", b'{"prompt": "hi", "max_tokens": 3, "add_special_tokens": false}')
    assert (ask.kind, ask.prompts, ask.max_tokens, ask.add_special_tokens) == ("completion", ["hi"], 3, False)
    assert read(COMPLETION, b'{"prompt": "hi"}').add_special_tokens is True


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_completion_has_one_prompt_or_several(prompt: Any, prompts: Any) -> None:
    ask = read(COMPLETION, json.dumps({"prompt": prompt}).encode())
    assert (ask.kind, ask.prompts) == ("completion", prompts)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 5, {}, ["a", 1], [1, "a"], [[1], "a"], [-1], [2**31], [1.5], [True], [[1], [-1]], [None]]
)
def test_a_prompt_that_is_none_goes_by_load(prompt: Any) -> None:
    assert read(COMPLETION, json.dumps({"prompt": prompt}).encode()).kind == "other"


@pytest.mark.parametrize(
    ("members", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 1.5}, None),
    ],
)
def test_the_bound_on_an_answer(members: dict[str, Any], max_tokens: int | None) -> None:
    assert chat(**members).max_tokens == max_tokens


@pytest.mark.interpreted
def test_members_of_other_types_keep_their_defaults() -> None:
    ask = chat(
        model=1, stream=None, n=None, cache_salt=5, tools={}, stream_options=[], chat_template_kwargs=[], documents=0
    )
    expected = Ask(kind="chat", messages=MESSAGES, add_special_tokens=False)
    names = [name for name in dir(expected) if not name.startswith("_") and not callable(getattr(expected, name))]
    assert {name: getattr(ask, name) for name in names} == {name: getattr(expected, name) for name in names}


@pytest.mark.parametrize(
    "path", ["/v1/embeddings/x", "/v1/responses", "/", "/v1/chat/completions/batch", "/V1/completions"]
)
def test_other_paths_have_no_prompt(path: str) -> None:
    ask = read(path, b'{"model": "m", "prompt": "x", "messages": [{"role": "user"}], "stream": true}')
    assert (ask.kind, ask.model, ask.stream) == ("other", "m", True)


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b', "text_2": ["a", {"model": "x", "kv_transfer_params": 1}]',
        b', "text_2": "\\ud800"',
        b', "text_2": NaN',
        b', "text_2": 1e999',
        b', "seed": 123456789012345678901234567890',
        b', "mod\\u0065l": "other"',
        b', "text_2": ' + b"[" * 1100 + b"]" * 1100,
        b', "vllm_xargs": {"ec_transfer_params": {}}',
        b', "kv\\u005ftransfer_params": {}',
        b', "kv_transfer_params": null, "n": 3, "max_completion_tokens": 7, "stream_options": {"include_usage": true}',
        b', "stream": 1, "n": "3", "max_tokens": 1.0, "cache_salt": 5',
    ],
    ids=range(12),
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_without_a_prompt_to_read_a_body_says_the_same(rest: bytes, encoding: str) -> None:
    text = (b'{"model": "m", "text_1": "a", "stream": true, "max_tokens": 9, "cache_salt": "s"' + rest + b"}").decode()
    body = text.encode(encoding)
    seen, expected = read("/v1/score", body), read("/v1/embeddings", body)
    for name in ("kind", "model", "stream", "include_usage", "cache_salt", "hand_off", "truncate_prompt_tokens"):
        assert getattr(seen, name) == getattr(expected, name), name
    chat = read(CHAT, body)
    assert (seen.max_tokens, seen.n) == (chat.max_tokens, chat.n)


@pytest.mark.parametrize("name", sorted(HAND_OFF_KEYS | CARRIERS))
def test_no_path_hides_a_hand_off(name: str) -> None:
    value = {"kv_transfer_params": {}} if name in CARRIERS else {}
    assert read("/v1/score", json.dumps({"text_1": "a", name: value}).encode()).hand_off


DEEP = b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"null",
        b"true",
        b'"text"',
        b'{"model":',
        b'{"model": "m"',
        b"{'model': 1}",
        DEEP,
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "caf\xe9"}]}',
        b"\xff\xfe\x00",
        b"\x00\x01\x02",
        b'{"messages": []}',
        b'{"messages": {"role": "user"}}',
        b'{"messages": [{"role": "user", "content": "a\nb"}]}',
    ],
    ids=range(16),
)
def test_what_cannot_be_read_goes_by_load(body: bytes) -> None:
    ask = read(CHAT, body)
    assert (ask.kind, ask.hand_off) == ("other", False)
    assert without_hand_off(body) == body


@given(st.binary(max_size=64))
def test_no_bytes_are_too_strange(body: bytes) -> None:
    assert read(CHAT, body).kind == "other"
    assert without_hand_off(body) == body


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "\ud800"),
        (b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "x"}]}', "x"),
        ('{"messages": [{"role": "user", "content": "é"}]}'.encode("utf-16"), "é"),
        ('{"messages": [{"role": "user", "content": "é"}]}'.encode("utf-16-be"), "é"),
        ('{"messages": [{"role": "user", "content": "é"}]}'.encode("utf-32"), "é"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "x"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 123456789012345678901234567890}', "x"),
        (b'{"messages": [{"role": "user", "content": "x"}], "x": 1e999}', "x"),
        (b'{"messages": [1], "messages": [{"role": "user", "content": "x"}]}', "x"),
    ],
)
def test_what_only_a_lenient_parser_reads(body: bytes, content: str) -> None:
    ask = read(CHAT, body)
    assert (ask.kind, ask.messages) == ("chat", [{"role": "user", "content": content}])
    assert without_hand_off(body) == body


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('{"kv_transfer_params": {"a": 1}}', "{}"),
        ('{ "kv_transfer_params" : {"a": 1} }', "{  }"),
        ('{"kv_transfer_params": null, "b": 1}', '{ "b": 1}'),
        ('{"a": 1, "kv_transfer_params": {"x": "},{"}, "b": 2}', '{"a": 1,  "b": 2}'),
        ('{"a": 1 , "kv_transfer_params":[1,[2,{"y":3}]]\n}', '{"a": 1  \n}'),
        ('{"kv_transfer_params":1,"ec_transfer_params":2}', "{}"),
        ('{"kv_transfer_params":1,"ec_transfer_params":2,"a":3}', '{"a":3}'),
        ('{"a":3,"kv_transfer_params":1,"ec_transfer_params":2}', '{"a":3}'),
        ('{"kv_transfer_params":1,"a":3,"ec_transfer_params":2}', '{"a":3}'),
        ('{"kv_transfer_params":1,"a":3,"kv_transfer_params":2,"b":4,"kv_transfer_params":"\\"}"}', '{"a":3,"b":4}'),
        ('{"kv_\\u0074ransfer_params": 1, "a": 2}', '{ "a": 2}'),
        ('{"\\u006b\\u0076_transfer_params": 1, "a": 2}', '{ "a": 2}'),
        ('{"a":"é\\ud800","kv_transfer_params":NaN}', '{"a":"é\\ud800"}'),
        ('\r\n\t {"kv_transfer_params":-1.5e3,"a":1}\n', '\r\n\t {"a":1}\n'),
        ('{"a":123456789012345678901234567890,"kv_transfer_params":true}', '{"a":123456789012345678901234567890}'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_hand_off_is_cut_out_and_nothing_else(body: str, left: str, encoding: str) -> None:
    sent = body.encode(encoding)
    assert read(CHAT, sent).hand_off
    assert without_hand_off(sent) == left.encode(encoding)
    assert not read(CHAT, left.encode(encoding)).hand_off


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": {"kv_transfer_params": 1}}',
        b'{"a": "kv_transfer_params"}',
        b'{"a": "\\"kv_transfer_params\\": 1"}',
        b'{"messages": [{"role": "user", "content": "\\",\\"kv_transfer_params\\":{"}]}',
        b'[{"kv_transfer_params": 1}]',
        b'{"kv_transfer_params2": 1, "KV_transfer_params": 2}',
        b'{"kv_transfer_params',
        b'x{"kv_transfer_params": 1}',
    ],
)
def test_what_only_looks_like_a_hand_off_stays(body: bytes) -> None:
    assert not read(CHAT, body).hand_off
    assert without_hand_off(body) == body


def test_nesting_too_deep_for_the_parser_hides_no_hand_off() -> None:
    body = b'{"a":' + b"[" * 3000 + b"]" * 3000 + b',"kv_transfer_params":{"do_remote_prefill":true}}'
    assert read(CHAT, body).hand_off
    assert without_hand_off(body) == b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["kv_transfer_params", "ec_transfer_params", "a", "b", 'k"v', "kv_transfer_params "])
blanks = st.text(" \t\r\n", max_size=2)


@given(st.lists(st.tuples(keys, values, blanks, blanks, blanks, blanks, st.booleans()), max_size=6), blanks)
def test_any_object_keeps_its_other_members_byte_for_byte(members: list[Any], blank: str) -> None:
    def written(key: str, value: Any, a: str, b: str, c: str, d: str, escape: bool) -> str:
        name = json.dumps(key)
        if escape:
            name = '"' + "".join(f"\\u{ord(ch):04x}" for ch in key) + '"'
        return f"{a}{name}{b}:{c}{json.dumps(value, ensure_ascii=escape)}{d}"

    hand_offs = ("kv_transfer_params", "ec_transfer_params")
    body = (blank + "{" + ",".join(written(*m) for m in members) + "}" + blank).encode("utf-8", "surrogatepass")
    left = without_hand_off(body)
    pairs = json.loads(left, object_pairs_hook=list)
    kept = [m for m in members if m[0] not in hand_offs]
    expected = "{" + ",".join(written(*m) for m in kept) + "}"
    assert [p[0] for p in pairs] == [m[0] for m in kept]
    assert b"".join(left.split()) == b"".join(expected.encode("utf-8", "surrogatepass").split())
    assert read(CHAT, body).hand_off == (len(kept) < len(members))
    assert not read(CHAT, left).hand_off
