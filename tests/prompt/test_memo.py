"""What is remembered is used: new work only for what is new. And what is remembered stays within its bound."""

from __future__ import annotations

import json
import logging
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from router.prompt import fast
from router.prompt.blocks import NO_EXTRA, Extra, Hasher
from router.prompt.bodies import Bodies, marks
from router.prompt.cache import ENTRY_BYTES, Bounded
from router.prompt.memo import Memo, Row
from router.prompt.reader import Reader
from router.prompt.request import Ask, Beginning, read
from router.prompt.segments import MIN_PIECE, Cutter, holds, marks_of
from router.prompt.tokens import Tokenizer
from tests.prompt.test_incremental import CHAT, tokenizer


class Counting:
    """A reader over a memo, and what it had to tokenize."""

    def __init__(self, template: str, limit: int = 1 << 24) -> None:
        self.memo = Memo(limit)
        self.tokenizer = tokenizer(template)
        self.reader = Reader(self.tokenizer, self.memo)
        self.encoded: list[str] = []

    def read(self, *messages: Any, **members: Any) -> tuple[Ask, list[int]]:
        """The request as read, and the keys of its blocks."""
        body = json.dumps({"messages": messages, "model": "m", **members}).encode()
        found = marks(body)
        ask = read(CHAT, body, Beginning(found, Bodies(self.memo.bodies).find(body, found)))
        (row,) = self.reader.rows(ask)
        encode = row._encode
        assert encode is not None

        def counted(pieces: list[str]) -> Any:
            self.encoded += pieces
            return encode(pieces)

        row._encode = counted
        return ask, row.chain(self.reader.hasher("xxhash", "0"), 16, NO_EXTRA).keys


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


LONG = [said("user" if i % 2 == 0 else "assistant", f"{i} " + "word " * 400) for i in range(8)]


@pytest.mark.parametrize("template", ["chatml", "neighbours"])
def test_only_the_tail_of_a_body_is_read(template: str) -> None:
    counting = Counting(template)
    counting.read(*LONG)
    counting.encoded.clear()
    more = [said("assistant", "yes " * 50), said("user", "no " * 50)]
    ask, keys = counting.read(*LONG, *more)
    assert ask.messages == more
    assert [piece for piece in counting.encoded if "word" in piece] == []
    assert "".join(counting.encoded).count("yes ") == 50
    assert keys == Counting(template).read(*LONG, *more)[1]


def test_short_texts_are_not_kept_where_the_tokenizer_is_fast() -> None:
    counting = Counting("chatml")
    if not counting.tokenizer.fast:
        pytest.skip("fastokens is not installed")
    counting.read(said("system", "be brief " * 200), said("user", "ask " * 50))
    assert len(counting.memo.ids) == 2  # the long one, and the mark that is behind every chat
    counting.encoded.clear()
    counting.read(said("system", "be long " * 200), said("user", "ask " * 50))
    assert (len(counting.encoded), len(counting.memo.ids)) == (2, 3)
    # Where its beginning is the same, its blocks are known.
    counting.encoded.clear()
    counting.read(said("system", "be long " * 200), said("user", "ask " * 50), said("assistant", "well " * 50))
    assert not any("ask" in piece for piece in counting.encoded)


def test_text_is_tokenized_once_wherever_it_stands() -> None:
    counting = Counting("counting")
    counting.read(*LONG)
    counting.encoded.clear()
    counting.read(said("user", "another beginning " * 20), *LONG)
    assert [piece for piece in counting.encoded if "7 word" in piece] == []
    assert any("another beginning" in piece for piece in counting.encoded)


def test_what_is_behind_the_messages_may_change() -> None:
    counting = Counting("chatml")
    counting.read(*LONG)
    ask, _ = counting.read(*LONG, max_tokens=5, n=2, stream=True)
    assert (ask.messages, ask.max_tokens, ask.n, ask.stream) == ([], 5, 2, True)
    ask, _ = counting.read(*LONG, tools=[{"type": "function", "function": {"name": "f"}}])
    assert ask.messages == LONG  # all of it is written anew


def test_many_answers_to_one_beginning_do_not_displace_it() -> None:
    counting = Counting("chatml")
    counting.read(*LONG)
    for i in range(30):
        ask, _ = counting.read(*LONG, said("user", f"{i} "))
        assert len(ask.messages) == 1


def test_a_second_messages_member_is_the_one_that_counts() -> None:
    counting = Counting("chatml")
    counting.read(*LONG)
    body = (
        json.dumps({"messages": LONG, "model": "m"}).encode()[:-1]
        + b', "m\\u0065ssages": [{"role": "user", "content": "x"}]}'
    )
    found = marks(body)
    known = Bodies(counting.memo.bodies).find(body, found)
    assert known is not None
    assert read(CHAT, body, Beginning(found, known)).messages == [said("user", "x")]


def test_long_salts_are_not_held_on_to() -> None:
    memo, hasher = Memo(1 << 16), Hasher("xxhash", "0")
    tracemalloc.start()
    try:
        for number in range(100):
            salt = f"{number} " + "s" * 100_000
            row = Row(memo, [array("i", range(32))], base=b"")
            assert (
                row.chain(hasher, 16, Extra(cache_salt=salt)).keys
                == hasher.chain(range(32), 16, Extra(cache_salt=salt)).keys
            )
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_nothing_is_remembered_without_memory() -> None:
    counting = Counting("chatml", 0)
    counting.read(*LONG)
    ask, _ = counting.read(*LONG)
    assert ask.messages == LONG
    assert (len(counting.memo.ids), len(counting.memo.links), len(counting.memo.bodies)) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 500))), st.integers(0, 2000))
def test_bounded_memory_keeps_what_was_used_last(puts: list[tuple[int, int]], limit: int) -> None:
    kept: Bounded[int] = Bounded(limit)
    order: list[tuple[int, int]] = []
    for key, weight in puts:
        kept.put(key, weight, weight)
        order = [(k, w) for k, w in order if k != key] + [(key, weight + ENTRY_BYTES)]
        while sum(w for _, w in order) > limit:
            order.pop(0)
        assert kept.held == sum(w for _, w in order)
        assert len(kept) == len(order)
    for key, weight in list(order):
        assert kept.get(key) == weight - ENTRY_BYTES
    assert all(kept.get(key) is None for key in range(10) if key not in dict(order))


# -- cutting -----------------------------------------------------------------------------------------------------


def engine(*tokens: AddedToken | str, **parts: Any) -> Engine:
    vocabulary = {c: i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyz0123456789<>|_ ")} | {"▁a": 90, "ab": 91}
    made = Engine(models.BPE(vocabulary, [("▁", "a"), ("a", "b")], fuse_unk=False, unk_token=None))
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens([t if isinstance(t, AddedToken) else AddedToken(t, normalized=False) for t in tokens])
    return made


def marks_for(*tokens: AddedToken | str) -> list[str]:
    return marks_of(engine(*tokens).to_str(), "")


def test_marks_are_special_tokens_that_stand_for_themselves() -> None:
    assert marks_for("<a>", "<b>") == ["<a>", "<b>"]
    assert marks_for("<a>", AddedToken("<b>", normalized=True)) == ["<a>"]
    assert marks_for("<a>", AddedToken("<b>", normalized=False, rstrip=True)) == ["<a>"]
    assert marks_for("<a>", AddedToken("b", normalized=False, single_word=True)) == []
    assert marks_for("<a>", "<a><b>", "<c>") == ["<c>"]
    assert marks_for("<a>x", ">xb", "(c)") == ["(c)"]
    assert marks_for("aba", "<c>") == ["<c>"]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": normalizers.Prepend("▁")},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    ],
    ids=["bare", "prepend", "first", "always", "bytes"],
)
def test_pieces_have_the_tokens_of_the_whole(parts: dict[str, Any]) -> None:
    made = engine("<s>", "<|end|>", **parts)
    cutter = Cutter(marks_of(made.to_str(), ""))
    assert cutter.marks == ("<s>", "<|end|>")
    assert holds(lambda text: made.encode(text, add_special_tokens=False).ids, cutter)


def test_a_tokenizer_that_looks_across_marks_is_found_out() -> None:
    made = engine("<s>")
    cutter = Cutter(("<s>",))

    def across(text: str) -> list[int]:
        return [*made.encode(text, add_special_tokens=False).ids, len(text)]

    assert not holds(across, cutter)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "x" * 40, "\n", "é"])))
def test_texts_that_begin_alike_are_cut_alike(words: list[str]) -> None:
    cutter = tokenizer("chatml").cutter
    text = "".join(words)
    pieces = cutter.cut(text)
    assert "".join(pieces) == text
    assert all(len(piece) >= MIN_PIECE for piece in pieces[:-1])
    assert all(piece.startswith(cutter.marks) for piece in pieces[1:])
    longer = cutter.cut(text + "<|im_end|>")
    assert longer[: len(pieces) - 1] == pieces[:-1]


# -- the faster engine -------------------------------------------------------------------------------------------


def test_the_faster_engine_is_used_where_it_is_equal() -> None:
    pytest.importorskip("fastokens")
    assert tokenizer("chatml").fast


def test_a_faster_engine_that_differs_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it were an engine for another model."""
    fastokens = pytest.importorskip("fastokens")
    other = engine("<s>").to_str()

    class Other:
        @staticmethod
        def from_json_str(_: str) -> Any:
            return fastokens.Tokenizer.from_json_str(other)

    monkeypatch.setattr(fastokens, "Tokenizer", Other)
    with caplog.at_level(logging.INFO, "warmroute.prompt"):
        assert fast.load(tokenizer("chatml")._engine, "a model") is None
    assert "a model: fastokens" in caplog.text


def test_no_faster_engine_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("router.prompt.fast.importlib.import_module", missing)
    slow = Tokenizer("slow", tokenizer("chatml")._engine)
    assert not slow.fast
    texts = ["<|im_start|>user\nx", "é" * 70, ""]
    assert [list(ids) for ids in slow.encode_pieces(texts)] == [slow.encode(text, False) for text in texts]
    with pytest.raises(ValueError, match="lone surrogates"):
        slow.encode_pieces(["\ud800"])
    with pytest.raises(ValueError, match="lone surrogates"):
        tokenizer("chatml").encode_pieces(["\ud800"])


def test_a_piece_alone_has_the_ids_that_it_has_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tokenizer("chatml")
    texts = ["<|im_start|>user\nx", "é" * 70, "", "<|im_start|>assistant\nA whole answer, in words. 7\n\n"]
    expected = [list(ids) for ids in found.encode_pieces(texts)]
    assert [found.encode_piece(text) for text in texts] == expected
    with pytest.raises(ValueError, match="lone surrogates"):
        found.encode_piece("\ud800")
    monkeypatch.setattr(found, "_fast", None)
    assert [found.encode_piece(text) for text in texts] == expected
    with pytest.raises(ValueError, match="lone surrogates"):
        found.encode_piece("\ud800")


def test_what_stands_behind_a_text_is_not_lost_where_a_longer_one_began_alike() -> None:
    memo, hasher, after = Memo(1 << 20), Hasher("xxhash", "0"), array("i", [7])

    def encode(pieces: list[str]) -> list[array[int]]:
        return [array("i", map(ord, piece)) for piece in pieces]

    short, long = ["a" * MIN_PIECE], ["a" * MIN_PIECE, "b" * MIN_PIECE]
    for pieces in (long, short, long):
        row = Row(memo, pieces, base=b"", encode=encode, after=after)
        assert row.chain(hasher, 5, NO_EXTRA) == hasher.chain([*map(ord, "".join(pieces)), 7], 5)


def test_all_keys_are_held_once_at_the_end_of_each_conversation() -> None:
    counting = Counting("chatml")
    scratch = Counting("chatml", limit=0)

    def held() -> list[int]:
        links = [link for link, _ in counting.memo.links._entries.values()]
        assert counting.memo.links.held == sum(link.weight + ENTRY_BYTES for link in links)
        return [len(link._keys) for link in links if link._keys is not None]

    def read(*messages: Any) -> int:
        _, keys = counting.read(*messages)
        assert keys == scratch.read(*messages)[1]
        return len(keys)

    for turns in range(2, 9, 2):
        whole = read(*LONG[:turns])
        assert len(held()) == 1
        assert whole - 2 <= held()[0] <= whole
    # Others part from it midway: what they part from is held, too, and not what each of them adds.
    for other in range(20):
        part = read(*LONG[:4], said("user", f"{other} " * 100))
        assert len(held()) <= 2
    assert min(held()) < part < max(held())
    # One of them goes on: by itself, it is a conversation as the first one.
    branch = [*LONG[:4], said("user", "7 " * 100)]
    for _ in range(4):
        branch += [said("assistant", "yes " * 40), said("user", "no " * 40)]
        read(*branch)
        assert len(held()) == 3
    read(*LONG)
    read(*LONG, said("user", "three " * 100))
    assert len(held()) == 3


def test_what_a_conversation_stands_on_stays_as_long_as_it_goes_on() -> None:
    counting = Counting("chatml", limit=1 << 20)
    links = counting.memo.links
    begun = LONG[:4]
    _, first = counting.read(*begun)
    others = 0
    while links.written <= 8 * links.limit:
        # As much as fills the memory several times over, and it goes on all the while.
        counting.read(said("user", f"{others} " + "other " * 500))
        if others % 20 == 0:
            begun = [*begun, said("user", f"{others} " + "more " * 20), said("assistant", f"{others} " + "yes " * 20)]
        counting.read(*begun)
        others += 1
    assert links.held <= links.limit
    deepest = max((link for link, _ in links._entries.values()), key=lambda link: link.length)
    path = deepest.path()
    assert len(path) > 20
    assert [link for link in path if link.key not in links._entries] == []
    assert [key for link in reversed(path) for key in link.run.keys][: len(first) - 2] == first[:-2].tolist()


def test_what_a_prompt_stands_on_stays_as_long_as_it_is_sent_again() -> None:
    counting = Counting("chatml", limit=1 << 20)
    links = counting.memo.links
    counting.read(*LONG)
    others = 0
    while links.written <= 8 * links.limit:
        counting.read(said("user", f"{others} " + "other " * 500))
        counting.read(*LONG)
        others += 1
    deepest = max((link for link, _ in links._entries.values()), key=lambda link: link.length)
    assert len(deepest.path()) >= 8
    assert [link for link in deepest.path() if link.key not in links._entries] == []
