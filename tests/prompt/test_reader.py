from __future__ import annotations

import json
from typing import Any

import pytest

from router.prompt.blocks import ByteHasher, Hasher
from router.prompt.chat import ChatTemplate
from router.prompt.reader import PromptError, Reader
from router.prompt.request import Ask, read
from router.prompt.tokens import Tokenizer
from tests.prompt.templates import PARTS
from tests.prompt.test_against_vllm import TINY

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
IMAGE = {
    "role": "user",
    "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,x"}}],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def chat(*messages: Any, **members: Any) -> Ask:
    return read(CHAT, json.dumps({"messages": messages, **members}).encode())


def completion(prompt: Any, **members: Any) -> Ask:
    return read(COMPLETION, json.dumps({"prompt": prompt, **members}).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_two_modes(tokenizer: Tokenizer) -> None:
    exact, plain = Reader(tokenizer), Reader(None)
    assert (exact.exact, exact.mode, exact.block_tokens(16)) == (True, f"tokens: {TINY}", 16)
    assert (plain.exact, plain.mode, plain.block_tokens(16)) == (False, "bytes, 4 per token", 64)
    assert isinstance(exact.hasher("sha256", "0"), Hasher)
    assert isinstance(plain.hasher("sha256", "0"), ByteHasher)
    hasher = exact.hasher("xxhash", "7")
    assert isinstance(hasher, Hasher)
    assert (hasher.algorithm, hasher.seed) == ("xxhash", "7")


@pytest.mark.parametrize("exact", [True, False])
def test_the_next_turn_begins_with_this_turn_and_its_answer(tokenizer: Tokenizer, exact: bool) -> None:
    reader = Reader(tokenizer if exact else None)
    first = chat({"role": "system", "content": "Be brief."}, user("Where?"))
    (prompt,) = reader.tokenize(first)
    answer = reader.answer(first, "To the sea, as they say.", finish_reason="stop")
    (following,) = reader.tokenize(chat(*first.messages, said("To the sea, as they say."), user("Why?")))
    begun = prompt + answer  # type: ignore[operator]
    assert following[: len(begun)] == begun
    assert len(following) > len(begun)


def test_a_turn_is_no_beginning_of_another_chat_without_a_tokenizer() -> None:
    reader = Reader(None)
    (one,) = reader.tokenize(chat(user("ab"), add_generation_prompt=False))
    (other,) = reader.tokenize(chat(user("abc"), add_generation_prompt=False))
    (two,) = reader.tokenize(chat(user("ab"), said("c"), add_generation_prompt=False))
    assert not other.startswith(one)  # type: ignore[arg-type]
    assert two.startswith(one)  # type: ignore[arg-type]


def test_everything_that_may_differ_does_so_without_a_tokenizer() -> None:
    reader = Reader(None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = [
        chat(user("x")),
        chat(said("x")),
        chat(user("x"), tools=[{"type": "function", "function": {"name": "f"}}]),
        chat(user("x"), tools=[{"type": "function", "function": {"name": "g"}}]),
        chat({**user("x"), "name": "Ann"}),
        chat({**said("x"), "tool_calls": [call]}),
        chat(IMAGE),
        chat(user("x"), add_generation_prompt=False),
        chat(said("x"), continue_final_message=True, add_generation_prompt=False),
        completion("x"),
        completion([120]),
    ]
    assert len({reader.tokenize(ask)[0] for ask in asks}) == len(asks)


def test_completions_without_a_tokenizer_are_bytes() -> None:
    reader = Reader(None)
    assert reader.tokenize(completion(["a", "é", "\ud800"])) == [b"a", "é".encode(), b"\xed\xa0\x80"]
    assert reader.tokenize(completion([1, 258])) == [b"\x01\0\0\0\x02\x01\0\0"]
    assert reader.answer(completion("a"), "é") == "é".encode()
    assert reader.answer(completion("a"), None) is None


def test_what_cannot_be_read(tokenizer: Tokenizer) -> None:
    exact = Reader(tokenizer)
    cases: list[tuple[Reader, Ask, str]] = [
        (exact, read("/v1/rerank", b'{"input": "x"}'), "no prompt"),
        (exact, chat(user("\ud800")), "lone surrogates"),
        (exact, completion("\ud800"), "lone surrogates"),
        (exact, chat({"role": "user", "content": [{"type": "novel"}]}), "only text and media can be read here"),
        (exact, chat("x"), "a message is an object with a role"),
        (exact, chat(user("x"), chat_template="x"), "brings its own chat template"),
        (exact, chat(user("x"), chat_template_kwargs={"chat_template": "x"}), "steers the engine's own rendering"),
        (exact, completion("x", truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        (Reader(None), chat("x"), "a message is an object"),
    ]
    for reader, ask, why in cases:
        with pytest.raises(PromptError, match=why):
            reader.tokenize(ask)


def test_without_a_chat_template_chats_are_told_apart_by_what_they_say(tokenizer: Tokenizer) -> None:
    bare = Reader(Tokenizer("bare", tokenizer._engine))
    assert bare.mode == "tokens: bare (it has no chat template: chats only by likeness)"
    assert bare.tokenize(completion("x")) == Reader(tokenizer).tokenize(completion("x"))
    first, other = chat(user("where " * 9)), chat(user("why " * 9))
    (one,), (two,) = bare.tokenize(first), bare.tokenize(other)
    assert one != two
    assert first.inexact
    (following,) = bare.tokenize(chat(user("where " * 9), said("there"), user("why?")))
    assert isinstance(one, list)
    assert following[: len(one)] == one
    (row,) = bare.rows(chat(user("where " * 9)))
    assert row.units() == one


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_prompt_is_exact_up_to_its_first_image(tokenizer: Tokenizer) -> None:
    """The engine puts the image before the message's text where the template asks for one text."""
    reader = Reader(tokenizer)
    before = tokenizer.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", False)
    system = {"role": "system", "content": "Be brief."}

    def read_of(*parts: Any) -> list[int]:
        ask = chat(system, {"role": "user", "content": list(parts)}, user("And now?"))
        (ids,) = reader.tokenize(ask)
        assert ask.inexact
        assert isinstance(ids, list)
        return ids

    one, other = read_of("see", picture("data:,x")), read_of("see", picture("data:,y"))
    assert one[: len(before)] == other[: len(before)] == before
    assert one != other
    assert one == read_of(picture("data:,x"), "see")
    ask = chat(user("x"))
    reader.tokenize(ask)
    assert not ask.inexact


def test_a_template_with_parts_has_its_images_in_their_places(tokenizer: Tokenizer) -> None:
    template = ChatTemplate({"default": PARTS}, {})
    reader = Reader(Tokenizer("parts", tokenizer._engine, chat_template=template))
    (ids,) = reader.tokenize(chat({"role": "user", "content": ["a sight: ", picture("data:,x"), "not b"]}))
    before = tokenizer.encode("<|im_start|>user" + "a sight: ", False)
    assert ids[: len(before)] == before


def test_a_trusted_template_is_used(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer, trust_request_chat_template=True)
    assert reader.tokenize(chat(user("x"), chat_template="{{ messages[0].content }}")) == [tokenizer.encode("x", False)]


def test_an_answer_per_prompt(tokenizer: Tokenizer) -> None:
    """Two prompts and two answers to each: choices 0 and 1 belong to the first prompt."""
    reader = Reader(tokenizer)
    ask = completion(["re", "x"], n=2)
    reader.tokenize(ask)
    alone = tokenizer.encode("turn y", False)
    assert len(tokenizer.encode("return", False)) == 1  # not what was generated, then: the prompt ends with "re"
    assert reader.answer(ask, "turn y", choice=1) == alone
    assert reader.answer(ask, "\ud800", choice=2) is None
    assert reader.answer(ask, "turn y", choice=3, finish_reason="length") == tokenizer.encode("xturn y", False)[1:-1]


def test_an_answer_goes_on_with_a_text_and_begins_none() -> None:
    """Tokenizers of the SentencePiece kind mark a text's beginning like a space; an answer's beginning has no mark."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers

    vocabulary = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4, "[": 5, "]": 6}
    engine = Engine(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")]))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    engine.add_special_tokens(["[", "]"])
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}]{% endfor %}"}, {})
    reader = Reader(Tokenizer("▁", engine, chat_template=template))
    ask = chat(user("a"))
    assert reader.tokenize(ask) == [[3, 6]]
    assert engine.encode("b", add_special_tokens=False).ids == [4]
    assert reader.answer(ask, "b") == [2]


def test_given_token_ids_need_no_text(tokenizer: Tokenizer) -> None:
    reader = Reader(tokenizer)
    ask = completion([5, 6, 7])
    assert reader.tokenize(ask) == [[5, 6, 7]]
    assert reader.answer(ask, "ignored", [8, 9, 2]) == [8, 9]
    assert reader.answer(ask, None, []) == []
    assert reader.answer(ask, None) is None
    assert reader.answer(ask, "\ud800") is None
