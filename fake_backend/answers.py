"""What the model says: deterministic text from a seed, or an echo, of a chosen length.

Answers are made of whole words whose token ids come back when the text is tokenized again, because the next turn of a
conversation finds an answer's blocks in the cache only then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random
from typing import Protocol

import xxhash

from router.prompt.tokens import Tokenizer

# Tokens that a greedy answer's next one follows from.
_CONTEXT = 32
_WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()


class AnswerSpecError(Exception):
    """``--answers`` names no distribution; one clear line."""


class Length(Protocol):
    """How many tokens an answer has, its end marker not counted."""

    def draw(self, random: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, random: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    mean: float
    sigma: float

    def draw(self, random: Random) -> int:
        return max(1, round(random.lognormvariate(log(self.mean) - self.sigma**2 / 2, self.sigma)))


@dataclass(frozen=True, slots=True)
class Style:
    """What ``--answers`` says: a length, and whether to repeat what was asked instead of drawing words."""

    length: Length
    echo: bool = False
    greedy: int = 0
    """Each token follows from those before it, as with a model at temperature 0; the mean length, 0 for not."""


def parse_style(text: str) -> Style:
    """``lognormal:MEAN:SIGMA``, ``uniform:LOW:HIGH``, ``fixed:TOKENS``, ``greedy:MEAN`` or ``echo``. Raises
    AnswerSpecError."""
    kind, *arguments = text.split(":")
    try:
        match kind, [float(argument) for argument in arguments]:
            case "fixed", [tokens] if tokens >= 1:
                return Style(Fixed(int(tokens)))
            case "uniform", [low, high] if 1 <= low <= high:
                return Style(Uniform(int(low), int(high)))
            case "lognormal", [mean, sigma] if mean >= 1 and sigma >= 0:
                return Style(Lognormal(mean, sigma))
            case "greedy", [mean] if mean >= 1:
                return Style(Fixed(int(mean)), greedy=int(mean))
            case "echo", []:
                return Style(Fixed(1), echo=True)
    except ValueError:
        pass
    raise AnswerSpecError(
        f"--answers must be lognormal:MEAN:SIGMA, uniform:LOW:HIGH, fixed:TOKENS, greedy:MEAN or echo, with lengths in "
        f"tokens of at least 1; got {text!r}"
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of its answer."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    seed: int | None = None
    given: tuple[tuple[int, ...], ...] | None = None
    """These ids, and no others: one answer's, or one for each of the n answers."""
    echo: tuple[int, ...] | None = None
    """What an echo repeats."""


@dataclass(slots=True)
class Answer:
    """A settled answer: ``ends[i]`` is how much of ``text`` may be shown once token i has come."""

    ids: list[int]
    text: str
    ends: list[int]
    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class _Word:
    ids: tuple[int, ...]
    pieces: tuple[str, ...]


class Answers:
    """Makes one replica's answers. The same seed, prompt and wish give the same answer, in whatever order asked."""

    def __init__(self, tokenizer: Tokenizer, style: Style, seed: int) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._seed = seed
        self._eos = min(tokenizer.eos_token_ids, default=None)
        self._first = _words(tokenizer, [word.capitalize() for word in _WORDS])
        self._next = _words(tokenizer, [" " + word for word in _WORDS])
        self._single = [word for word in self._next if len(word.ids) == 1]
        self._words = frozenset(word.ids[0] for word in self._single)
        if not self._single or not self._first:
            raise AnswerSpecError("the tokenizer has no token for any common English word, so it cannot make answers")

    def make(self, prompt: Sequence[int], wish: Wish, index: int = 0) -> Answer:
        """The answer to ``prompt``; ``index`` tells the n answers to one prompt apart."""
        digest = xxhash.xxh3_64_intdigest(repr((self._seed, wish.seed, index, len(prompt), prompt[-64:])).encode())
        random = Random(digest ^ xxhash.xxh3_64_intdigest(repr(prompt).encode()))
        if wish.given is not None:
            answer = self._spoken(list(wish.given[index % len(wish.given)]))
        elif self._style.echo and wish.echo:
            answer = self._spoken(list(wish.echo))
        elif self._style.greedy:
            return self._greedy(prompt, wish)
        else:
            length = self._style.length.draw(random)
            if wish.ignore_eos:
                length = wish.max_tokens
            answer = self._compose(random, max(min(length, wish.max_tokens), wish.min_tokens, 1))
        if wish.given is None and not wish.ignore_eos:
            self._end(answer)
        self._clip(answer, wish)
        return answer

    def _compose(self, random: Random, length: int) -> Answer:
        word = random.choice(self._first)
        ids, pieces = list(word.ids), list(word.pieces)
        while len(ids) < length:
            word = random.choice(self._next)
            if len(ids) + len(word.ids) > length:
                word = random.choice(self._single)
            ids += word.ids
            pieces += word.pieces
        if len(ids) > length:
            word = self._single[0]
            ids, pieces = [word.ids[0]] * length, [word.pieces[0]] * length
        ends: list[int] = []
        shown = 0
        for piece in pieces:
            shown += len(piece)
            ends.append(shown)
        return Answer(ids, "".join(pieces), ends, "length")

    def _greedy(self, prompt: Sequence[int], wish: Wish) -> Answer:
        """What follows from the last tokens alone: behind a part of an answer comes the rest of it."""
        context = list(prompt[-_CONTEXT:])
        answer = Answer([], "", [], "length")
        pieces: list[str] = []
        shown = 0
        while len(answer.ids) < wish.max_tokens:
            digest = xxhash.xxh3_64_intdigest(repr(context).encode(), self._seed)
            # Only what it said itself can be a whole answer.
            ends = context[-1] in self._words and (digest >> 32) % self._style.greedy == 0
            if ends and not wish.ignore_eos and len(answer.ids) >= wish.min_tokens:
                answer.text = "".join(pieces)
                self._end(answer)
                break
            word = self._single[digest % len(self._single)]
            pieces += word.pieces
            shown += len(word.pieces[0])
            answer.ids.append(word.ids[0])
            answer.ends.append(shown)
            context = [*context[-_CONTEXT + 1 :], word.ids[0]]
        answer.text = "".join(pieces)
        self._clip(answer, wish)
        return answer

    def _spoken(self, ids: list[int]) -> Answer:
        """Text of given ids, as it would appear token by token."""
        text, ends = detokenize(self._tokenizer, ids)
        return Answer(ids, text, ends, "length")

    def _end(self, answer: Answer) -> None:
        if self._eos is not None:
            answer.ids.append(self._eos)
            answer.ends.append(len(answer.text))
            answer.reason = "stop"

    def _clip(self, answer: Answer, wish: Wish) -> None:
        """Cut where max_tokens, a stop token or a stop string ends it; hold text back that may become a stop string."""
        if len(answer.ids) > wish.max_tokens:
            _cut(answer, wish.max_tokens, "length", None)
        eos = self._tokenizer.eos_token_ids
        for place, token in enumerate(answer.ids):
            if place + 1 < wish.min_tokens:
                continue
            if token in wish.stop_token_ids:
                _cut(answer, place + 1, "stop", token)
                break
            if wish.given is not None and token in eos and not wish.ignore_eos:
                answer.ends[place] = answer.ends[place - 1] if place else 0
                _cut(answer, place + 1, "stop", None)
                break
        found = _first_stop(answer, wish)
        if found is not None:
            place, at, stop = found
            _cut(answer, place + 1, "stop", stop)
            answer.text = answer.text[: at + len(stop) if wish.include_stop else at]
        held = max((len(stop) for stop in wish.stop), default=0) - 1
        if held > 0 and not wish.include_stop:
            answer.ends = [max(0, end - held) for end in answer.ends[:-1]] + answer.ends[-1:]
        answer.ends = [min(end, len(answer.text)) for end in answer.ends]
        if answer.ends:
            answer.ends[-1] = len(answer.text)


def _cut(answer: Answer, tokens: int, reason: str, stop_reason: str | int | None) -> None:
    del answer.ids[tokens:], answer.ends[tokens:]
    answer.text = answer.text[: answer.ends[-1]] if answer.ends else ""
    answer.reason, answer.stop_reason = reason, stop_reason


def _first_stop(answer: Answer, wish: Wish) -> tuple[int, int, str] | None:
    """(token after which a stop string is complete, where it starts in the text, the string)."""
    best: tuple[int, int, str] | None = None
    for stop in wish.stop:
        at = answer.text.find(stop)
        if at < 0 or not stop:
            continue
        complete = at + len(stop)
        place = next(i for i, end in enumerate(answer.ends) if end >= complete)
        if place + 1 >= wish.min_tokens and (best is None or place < best[0]):
            best = (place, at, stop)
    return best


def _words(tokenizer: Tokenizer, words: Sequence[str]) -> list[_Word]:
    """Those words whose tokens stay what they are between other words."""
    anchor = tokenizer.encode(" the", add_special_tokens=False)
    kept: list[_Word] = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False)
        behind = tokenizer.encode(word + " the", add_special_tokens=False)
        if not ids or len(ids) > 2 or behind != ids + anchor:
            continue
        text, ends = detokenize(tokenizer, ids)
        if text != word:
            continue
        starts = [0, *ends[:-1]]
        kept.append(_Word(tuple(ids), tuple(text[a:b] for a, b in zip(starts, ends, strict=True))))
    return kept


def detokenize(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of ids, and how much of it is settled after each: a character cut in two waits for its other half."""
    text = ""
    ends: list[int] = []
    start = 0
    shown = ""
    for place in range(len(ids)):
        window = tokenizer.decode(ids[start : place + 1])
        if not window.endswith("\ufffd") or place == len(ids) - 1:
            text += window[len(shown) :]
            shown = window
            if place - start >= 8:
                start = place
                shown = tokenizer.decode(ids[start : place + 1])
        ends.append(len(text))
    return text, ends
