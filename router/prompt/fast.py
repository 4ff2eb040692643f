"""A faster tokenizer in place of the reference one, where it is installed and proves to be its equal."""

from __future__ import annotations

import importlib
import logging
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("warmroute.prompt")

MANY_WORDS = 16_384

_TEXTS = (
    "",
    " ",
    "\n",
    "   \n\n \t\r\n  x",
    "Hello, world! It's the user's 2nd question: what isn't 3.14159e-10?",
    "WE'RE i'M we'll they'd don't\u2019s I\u2019m",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n\n\nclass A:\n\tpass\n",
    '{"role": "user", "content": [1, 2.50, -3e8, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "Fünf große Äpfel, Straße, naïve café, Dvořák, Łódź, ĳsselmeer",
    "e\u0301 ﬁ Å K ½ ① ﷺ \u200b\u200d\ufeff\u00a0\u3000x",
    "Москва слезам не верит. Ελλάδα, Καλημέρα. שלום עולם مرحبا بالعالم ١٢٣",
    "你好，世界！今天是2026年。日本語の文章、カタカナとひらがな。한국어 문장입니다. ไทยภาษา हिन्दी भाषा",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji 👍🏽 text ✨✨✨",
    "a" * 300 + " " * 300 + "1234567890" * 30 + "\n" * 50 + "=" * 100 + "-_" * 60,
    "https://example.org/path?q=a%20b&c=d#frag user@example.org C:\\dir\\file.txt /usr/lib/x.so.6",
    "\x00\x01\x7f\x80 control \u2028\u2029 \ud7ff\ue000\uffff \U0010ffff",
)


def load(reference: tokenizers.Tokenizer, name: str) -> Any | None:
    """The `fastokens` engine for the same model; None where it is not installed, or differs (which is logged)."""
    try:
        module = importlib.import_module("fastokens")
    except ImportError:
        return None
    try:
        engine = module.Tokenizer.from_json_str(reference.to_str())
        different = _difference(reference, engine)
    except Exception as error:
        log.info("%s: fastokens cannot be used: %s", name, " ".join(str(error).split()) or type(error).__name__)
        return None
    if different is not None:
        log.warning("%s: fastokens is not used, its tokens differ for %.80r", name, different)
        return None
    engine.encode(_many_words())
    return engine


def _many_words() -> str:
    """More words that are no tokens than the engine meets without help of its large cache, 32 MiB, which it makes then:
    at the start, rather than under some request or other."""
    chance = random.Random(0)
    return " ".join(["".join(chance.choices("abcdefghijklmnop", k=8)) for _ in range(MANY_WORDS)])


def _difference(reference: tokenizers.Tokenizer, engine: Any) -> str | None:
    """A text to which the two give different tokens; None if none was found."""
    texts = [*_TEXTS, *_made_up(reference)]
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        if engine.encode(text).ids != encoding.ids:
            return text
    return None


def _made_up(reference: tokenizers.Tokenizer) -> list[str]:
    """Texts of the model's own tokens, special ones among them, and of characters from everywhere in Unicode."""
    chance = random.Random(0)
    size = reference.get_vocab_size(with_added_tokens=True)
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    texts = []
    for _ in range(40):
        ids = [chance.randrange(size) for _ in range(100)]
        texts.append(reference.decode(ids, skip_special_tokens=False))
        texts.append("".join(reference.id_to_token(i) or "" for i in ids))
    for end in (0x80, 0x250, 0x3000, 0xD800, 0x11000):
        texts += ["".join(chr(chance.randrange(1, end)) for _ in range(60)) for _ in range(20)]
    for _ in range(40):
        words = [
            chance.choice(added) if added and chance.random() < 0.4 else chance.choice(_TEXTS)[:20] for _ in range(12)
        ]
        texts.append("".join(words))
    return [text.encode("utf-8", "ignore").decode() for text in texts]
