from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_backend.answers import Answers, Wish, detokenize, parse_style
from fake_backend.settings import TINY
from router.prompt.tokens import Tokenizer

TOKENIZER = Tokenizer.load(TINY)
ANSWERS = Answers(TOKENIZER, parse_style("lognormal:60:0.8"), 0)
(EOS,) = TOKENIZER.eos_token_ids


def shown(text: str, ends: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


@given(prompt=st.lists(st.integers(0, 4000), min_size=1, max_size=20), most=st.integers(1, 300))
def test_answers_survive_being_tokenized_again(prompt: list[int], most: int) -> None:
    answer = ANSWERS.make(prompt, Wish(most))
    ids = answer.ids[:-1] if answer.reason == "stop" else answer.ids
    assert TOKENIZER.encode(answer.text, False) == ids
    assert len(answer.ids) <= most
    assert (answer.reason == "stop") == (answer.ids[-1] == EOS)
    assert "".join(shown(answer.text, answer.ends)) == answer.text
    assert len(answer.ends) == len(answer.ids)


def test_the_same_question_gets_the_same_answer_and_another_seed_another_one() -> None:
    one, again = ANSWERS.make([5, 6], Wish(50)), ANSWERS.make([5, 6], Wish(50))
    assert one == again
    assert ANSWERS.make([5, 6], Wish(50), index=1).text != one.text
    assert ANSWERS.make([5, 6], Wish(50, seed=9)).text != one.text
    assert ANSWERS.make([5, 7], Wish(50)).text != one.text
    assert Answers(TOKENIZER, parse_style("lognormal:60:0.8"), 1).make([5, 6], Wish(50)).text != one.text


def test_lengths() -> None:
    def lengths(style: str, **wish: int) -> list[int]:
        answers = Answers(TOKENIZER, parse_style(style), 0)
        return [len(answers.make([n], Wish(**({"max_tokens": 5000} | wish))).ids) - 1 for n in range(200)]

    assert set(lengths("fixed:40")) == {40}
    assert set(lengths("uniform:3:6")) == {3, 4, 5, 6}
    drawn = lengths("lognormal:100:0.5")
    assert 85 < sum(drawn) / len(drawn) < 115
    assert min(lengths("fixed:4", min_tokens=9)) == 9


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    answer = ANSWERS.make([1], Wish(500, ignore_eos=True))
    assert (len(answer.ids), answer.reason) == (500, "length")
    assert EOS not in answer.ids


def test_a_stop_string_ends_the_text_before_it_and_is_never_shown_in_part() -> None:
    free = ANSWERS.make([1], Wish(500, ignore_eos=True))
    stop = free.text[40:46]
    answer = ANSWERS.make([1], Wish(500, ignore_eos=True, stop=(stop,)))
    assert answer.text == free.text[: free.text.index(stop)]
    assert (answer.reason, answer.stop_reason) == ("stop", stop)
    assert answer.ids == free.ids[: len(answer.ids)]
    for end in answer.ends[:-1]:
        assert end <= len(answer.text)
        assert stop not in free.text[: end + len(stop) - 1]
    kept = ANSWERS.make([1], Wish(500, ignore_eos=True, stop=(stop,), include_stop=True))
    assert kept.text == answer.text + stop


def test_a_stop_token_ends_the_answer_and_counts() -> None:
    free = ANSWERS.make([1], Wish(500, ignore_eos=True))
    token = free.ids[7]
    answer = ANSWERS.make([1], Wish(500, ignore_eos=True, stop_token_ids=(token,)))
    assert answer.ids == free.ids[: free.ids.index(token) + 1]
    assert (answer.reason, answer.stop_reason) == ("stop", token)


def test_an_echo_repeats_what_it_was_told() -> None:
    echo = Answers(TOKENIZER, parse_style("echo"), 0)
    told = tuple(TOKENIZER.encode("The sea is not full.", False))
    answer = echo.make([1, 2], Wish(100, echo=told))
    assert (answer.text, answer.ids[:-1], answer.reason) == ("The sea is not full.", list(told), "stop")


@pytest.mark.parametrize("text", ["héllo wörld", "你好🙂é", "a\n\n b", "👩‍👩‍👧"])
def test_characters_cut_in_two_wait_for_their_other_half(text: str) -> None:
    ids = TOKENIZER.encode(text, False)
    whole, ends = detokenize(TOKENIZER, ids)
    assert whole == text
    assert all("\ufffd" not in piece for piece in shown(whole, ends))


def test_long_texts_keep_their_pieces() -> None:
    text = "你好 the sea 🙂 is not full. " * 20
    ids = TOKENIZER.encode(text, False)
    assert detokenize(TOKENIZER, ids)[0] == text
