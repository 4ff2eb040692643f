"""Where a text may be cut so that each piece has the tokens that it has in the whole."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_PIECE: Final = 64
"""Characters in a piece at the least: end-of-turn marks are kept with the turn's text, not by themselves."""

_MOST_MARKS: Final = 128
_FEW_MARKS: Final = 16  # so many are compared one by one


class Cutter:
    """Cuts texts before special tokens.

    A tokenizer looks for special tokens before anything else, and what stands between two of them goes through
    normalizer, pre-tokenizer and model by itself (Hugging Face tokenizers, `AddedVocabulary::extract_and_normalize`).
    So a text cut just before a special token has the same tokens in pieces as in one. `marks` are special tokens for
    which this is so.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = tuple(marks)
        self.longest = max(map(len, self.marks), default=0)
        """Characters in the longest mark."""
        self._few = self.marks if len(self.marks) <= _FEW_MARKS else ()
        self._first = _common_beginning(self.marks)[:1]
        longest_first = sorted(self.marks, key=len, reverse=True)
        rests = "|".join(re.escape(mark[len(self._first) :]) for mark in longest_first)
        # The look-ahead keeps what all marks begin with at one character, which the search is fastest for.
        self._mark = re.compile(f"{re.escape(self._first)}(?={rests})" if self._first else rests)

    def cut(self, text: str) -> list[str]:
        """The pieces of `text`, each but the last MIN_PIECE characters long at the least; [""] for no text.

        Where it is cut depends on nothing but the text before the cut, so that texts that begin alike are cut alike.
        """
        if not self.marks:
            return [text]
        pieces, start = [], 0
        while (at := self._find(text, start + MIN_PIECE)) >= 0:
            pieces.append(text[start:at])
            start = at
        pieces.append(text[start:])
        return pieces

    def _find(self, text: str, at: int) -> int:
        """The first mark at or behind `at`; -1 if there is none."""
        # A single character is found many times as fast as an expression: most texts have none of it but for marks.
        if self._first:
            at = text.find(self._first, at)
            if at < 0 or (self._few and text.startswith(self._few, at)):
                return at
        found = self._mark.search(text, at)
        return found.start() if found else -1


def marks_of(description: str, favourites: str) -> list[str]:
    """The special tokens before which texts may be cut, from a tokenizer's own description (tokenizer.json).

    `favourites`: a text in which the ones worth having stand, such as the chat template. None where the tokenizer has
    tokens that look at what stands beside them as whole words.
    """
    added: list[dict[str, Any]] = json.loads(description).get("added_tokens") or []
    if any(token.get("single_word") for token in added):
        return []
    # Normalized ones are looked for later, in the text between the others.
    first = [token for token in added if not token.get("normalized") and token.get("content")]
    candidates = [
        token["content"]
        for token in first
        if not token.get("lstrip") and not token.get("rstrip") and token["content"].strip() == token["content"]
    ]
    candidates.sort(key=lambda content: content not in favourites)
    contents = [token["content"] for token in first]
    return [
        mark
        for mark in candidates[:_MOST_MARKS]
        if not _laps(mark, mark) and not any(other != mark and _overlap(mark, other) for other in contents)
    ]


def holds(encode: Callable[[str], list[int]], cutter: Cutter) -> bool:
    """Whether the tokens of texts are those of their pieces, tried out on texts full of marks and white space."""
    rests = [
        "",
        " ",
        "\n",
        "\n\n",
        " a",
        "a ",
        "word",
        "\tTab",
        "é\u0301",
        "日本",
        "'s",
        "12",
        "  two  ",
        "<",
        "|>",
        "▁",
    ]
    rests += ["def f(x):\n    return x * 2\n", "x" * MIN_PIECE, " " * MIN_PIECE, "🙂" * 3]
    for i, mark in enumerate(cutter.marks):
        others = cutter.marks[i + 1 :] + cutter.marks[: i + 1]
        text = "".join(
            f"{rest}{mark}{rests[(i + j) % len(rests)]}{others[j % len(others)]}" for j, rest in enumerate(rests)
        )
        pieces = cutter.cut(text)
        if encode(text) != [token for piece in pieces for token in encode(piece)]:
            return False
        # At every mark, not only at those that are far enough from the one before.
        first = text.index(mark)
        if encode(text) != encode(text[:first]) + encode(text[first:]):
            return False
    return True


def _common_beginning(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    low, high = min(texts), max(texts)
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    return low[:same]


def _overlap(a: str, b: str) -> bool:
    return a in b or b in a or _laps(a, b) or _laps(b, a)


def _laps(a: str, b: str) -> bool:
    """Whether some end of `a`, shorter than it, is a beginning of `b`."""
    return any(a.endswith(b[:n]) for n in range(1, min(len(a), len(b) + 1)))
