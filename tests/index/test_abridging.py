"""What is left out of records that neighbours are told is put back by them, and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index import abridging as module
from router.index.abridging import MOST_KEYS, Abridger
from router.index.news import Record, decoded, encoded


def told(records: Iterable[Record]) -> list[Record]:
    """As they arrive."""
    said = msgspec.msgpack.Encoder(enc_hook=encoded).encode(list(records))
    return msgspec.msgpack.Decoder(list[Record], dec_hook=decoded).decode(said)


def chain(*path: int) -> array[int]:
    """Keys that name all that comes before them."""
    return array("Q", [hash(path[: end + 1]) & (2**64 - 1) for end in range(len(path))])


def placed(keys: array[int]) -> Record:
    return Record("gpu1", keys)


def answered(keys: array[int], prompt: array[int]) -> Record:
    return Record("gpu1", keys, ended=True, prompt_blocks=len(prompt))


def test_a_key_is_told_once_while_it_is_remembered() -> None:
    teller, hearer = Abridger(), Abridger()
    system = list(range(10))
    first, second = chain(*system, 1), chain(*system, 2, 3)
    whole = array("Q", [*first, 2**64 - 1])
    wanted = [first, second, whole, second]
    records = [placed(first), placed(second), answered(whole, first), answered(second, second)]
    teller.shorten(records)
    assert [len(record.keys) for record in records] == [11, 2, 1, 0]
    assert len(teller) == 0
    heard = told(records)
    assert hearer.restore(heard)
    assert [record.keys for record in heard] == wanted
    assert [len(first), len(second)] == [11, 12]  # the lists themselves are whole
    again = [answered(first, first), placed(first)]
    teller.shorten(again)
    assert [(record.common, record.prompt) for record in again] == [(10, None), (11, None)]
    heard = told(again)
    assert hearer.restore(heard)
    assert [record.keys for record in heard] == [first, first]


def test_two_that_wait_with_one_prompt_are_told_apart() -> None:
    teller, hearer = Abridger(), Abridger()
    keys = chain(1, 2, 3)
    records = [placed(keys), placed(chain(4)), placed(keys), placed(chain(5)), answered(keys, keys)]
    records += [placed(chain(6)), answered(keys, keys)]
    wanted = [record.keys for record in records]
    teller.shorten(records)
    heard = told(records)
    assert hearer.restore(heard)
    assert [record.keys for record in heard] == wanted


def test_what_was_taken_back_waits_no_more() -> None:
    teller, hearer = Abridger(), Abridger()
    keys = chain(1, 2, 3)
    for end in (teller, hearer):
        end.restore([placed(keys[:])])
    records = [Record("gpu1", keys[1:], forgotten=True), placed(keys)]
    teller.shorten(records[:1])
    assert records[0].keys == keys[1:]
    assert len(teller) == 0
    assert hearer.restore(told(records[:1]))
    assert len(hearer) == 0


@pytest.mark.parametrize(
    "record",
    [
        Record("gpu1", array("Q"), ended=True, prompt_blocks=1, prompt=9),
        Record("gpu1", array("Q", [1]), common=3),
        Record("gpu1", array("Q", [1]), common=-1),
    ],
)
def test_what_goes_on_after_something_unknown_is_refused(record: Record) -> None:
    hearer = Abridger()
    assert hearer.restore([placed(array("Q", [1, 2]))])
    assert not hearer.restore([record])


def test_what_waits_is_bounded_and_what_is_dropped_is_told_whole() -> None:
    teller, hearer = Abridger(), Abridger()
    prompts = [array("Q", range(begin, begin + MOST_KEYS // 8)) for begin in range(0, 20 * MOST_KEYS, MOST_KEYS)]
    prompts.append(array("Q", range(2**63, 2**63 + MOST_KEYS + 1)))
    for prompt in prompts:
        records = [placed(prompt)]
        teller.shorten(records)
        assert hearer.restore(told(records))
        assert len(teller) == len(hearer) <= MOST_KEYS
    for prompt in reversed(prompts):
        records = [answered(prompt, prompt)]
        teller.shorten(records)
        heard = told(records)
        assert hearer.restore(heard)
        assert heard[0].keys == prompt


steps = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "answer", "answer", "forget", "lose", "join"]),
        st.lists(st.integers(0, 2), max_size=6),
        st.lists(st.integers(0, 2), max_size=2),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps)
def test_every_neighbour_that_is_told_hears_what_was_recorded(
    steps: list[tuple[str, list[int], list[int], bool]],
) -> None:
    """One is told all, another loses some messages, a third one comes later: what they hear is whole."""
    teller, always, sometimes = Abridger(), Abridger(), Abridger()
    third: Abridger | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_KEYS", 12)  # of no effect once compiled
        pending: list[Record] = []
        for what, path, more, tell in steps:
            keys = chain(*path)
            if what == "place":
                pending.append(placed(keys))
            elif what == "answer":
                pending.append(answered(chain(*path, *more), keys))
            elif what == "forget":
                pending.append(Record("gpu1", keys[len(more) :], forgotten=True))
            elif what == "join":
                teller.clear()
                third = Abridger()
            if not tell:
                continue
            wanted = [record.keys for record in pending]
            teller.shorten(pending)
            neighbours = [always, *([third] if third is not None else [])]
            if what == "lose":
                teller.clear()
            else:
                neighbours.append(sometimes)
            for hearer in neighbours:
                heard = told(pending)
                assert hearer.restore(heard)
                assert [record.keys for record in heard] == wanted
            pending = []
