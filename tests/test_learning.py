from __future__ import annotations

from pathlib import Path

import pytest

import fake_backend
from router.choose.dispatch import Dispatch
from router.choose.policies import policy
from router.fleet.discovery import Fleet
from router.fleet.links import Links
from router.fleet.rates import Rates
from router.fleet.replica import Card, State
from router.index.feedback import Feedback
from router.index.memory import Index
from router.learning import Learning
from router.leg import Leg
from router.prompt.reader import Reader
from router.prompt.readers import Readers
from router.reading import Reading
from router.telemetry import Telemetry
from router.wire.stream import Answer

TINY = Path(fake_backend.__file__).parent / "tiny"


async def _held(path: str, body: bytes, answer: Answer) -> tuple[int, int]:
    """Blocks of the prompt, and those held once it was answered."""
    fleet = Fleet(["http://a:1"])
    replica = fleet["a:1"]
    replica.state, replica.models = State.READY, {"m": Card("m", str(TINY))}
    index, readers = Index(), Readers(str(TINY), 1 << 20)
    index.size(replica.name, 1000)
    reading = Reading(fleet, readers, None)
    dispatch = Dispatch(index, Rates(8000.0), policy("cost", tie_band_ms=10.0))
    learning = Learning(
        reading=reading,
        dispatch=dispatch,
        feedback=Feedback(),
        telemetry=Telemetry(),
        load_changed=lambda: None,
        links=Links(),
    )
    ask, _ = await reading.ask(path, body)
    prompt = reading.prompt(ask, path, len(body))
    placement = dispatch.place(
        0.0,
        [replica],
        [reading.chains(prompt, replica)],
        prompt.tokens,
        answer_tokens=prompt.answer_tokens,
        visible=False,
    )
    leg = Leg(prompt, placement, lambda _: None, show_choice=False, rank_given=False)
    leg._answer = answer
    learning.answered(leg)
    reading.close()
    (chain,) = placement.chains
    return len(chain.keys), index.blocks(replica.name)


async def test_an_answer_comes_to_be_cached_but_for_its_last_token() -> None:
    words = " the cache" * 40
    prompt, held = await _held("/v1/completions", b'{"model": "m", "prompt": "one two"}', Answer(text=words))
    assert (prompt, held >= 5) == (0, True)
    unnamed = Answer(text=None, completion_tokens=65)
    assert await _held("/v1/completions", b'{"model": "m", "prompt": "one"}', unnamed) == (0, 4)


async def test_of_one_token_nothing_comes_to_be_cached() -> None:
    words = " the cache" * 40
    for path, body in (
        ("/v1/completions", b'{"model": "m", "prompt": "%b", "max_tokens": 1}'),
        ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "%b"}], "max_tokens": 1}'),
        ("/v1/embeddings", b'{"model": "m", "input": "%b"}'),
    ):
        prompt, held = await _held(path, body % words.encode(), Answer(text=words, completion_tokens=1))
        assert prompt == held > 2


async def test_an_answer_that_fills_no_block_leaves_what_it_leaves_where_it_is_read() -> None:
    for length in (4, 16):
        body = b'{"model": "m", "prompt": %s}' % str([5] * length).encode()
        for tokens in (1, 12, 13):
            read = await _held("/v1/completions", body, Answer(token_ids=[7] * tokens, completion_tokens=tokens))
            assert read == (length // 16, (length + tokens - 1) // 16)
            assert await _held("/v1/completions", body, Answer(text="?", completion_tokens=tokens)) == read


@pytest.mark.interpreted
async def test_an_answer_that_fills_no_block_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "answer", None)
    body = b'{"model": "m", "prompt": [1, 2, 3]}'
    assert await _held("/v1/completions", body, Answer(text=" yes", completion_tokens=13)) == (0, 0)
    for read in (Answer(text=" yes", completion_tokens=14), Answer(text=" yes")):
        with pytest.raises(TypeError):
            await _held("/v1/completions", body, read)
