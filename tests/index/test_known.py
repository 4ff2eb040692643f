"""What one engine is known, presumed or about to hold."""

from __future__ import annotations

from router.index.gone import MOST_BLOCKS
from router.index.known import Known
from router.index.memory import Index, Match
from router.index.soon import PRESENT_SECONDS


def known(capacity: int = 100) -> Known:
    cache = Known(capacity, capacity)
    cache.trust()
    return cache


def gpu(cache: Known, keys: list[int], parent: int | None = None, group: int = 0, scale: int = 1) -> None:
    cache.stored(keys, parent, medium="GPU", group=group, scale=scale)


def gone(cache: Known, *keys: int, medium: str = "GPU", group: int | None = 0) -> list[int]:
    return cache.removed(list(keys), medium=medium, group=group)


def test_events_alone_tell_what_is_held() -> None:
    cache = known()
    gpu(cache, [1, 2, 3])
    assert cache.depth([1, 2, 3, 4], 0.0) == 3
    gone(cache, 3)
    assert cache.depth([1, 2, 3, 4], 0.0) == 2
    gone(cache, 1)
    assert cache.depth([1, 2, 3, 4], 0.0) == 0
    assert len(cache) == 1


def test_a_prompt_is_present_from_the_decision_on_for_a_while() -> None:
    cache = known()
    gpu(cache, [1])
    cache.place([1, 2, 3], now=10.0, until=12.0)
    assert cache.depth([1, 2, 3, 4], 10.0) == 3
    assert cache.depth([1, 2, 3, 4], 12.0 + PRESENT_SECONDS - 0.1) == 3
    assert cache.depth([1, 2, 3, 4], 12.0 + PRESENT_SECONDS) == 1
    assert len(cache._soon) == 0


def test_what_was_told_since_is_no_longer_about_to_be() -> None:
    cache = known()
    cache.place([1, 2], now=0.0, until=0.0)
    gpu(cache, [1, 2])
    gone(cache, 2)
    assert cache.depth([1, 2], 1.0) == 1


def test_what_was_dropped_lately_is_not_to_come_of_what_was_promised_before() -> None:
    cache = known()
    gpu(cache, [1, 2, 3, 4])
    assert cache.promised([1, 2, 3, 4, 5], 4, 5) == 5
    gone(cache, 3, 4)
    assert cache.promised([1, 2, 3, 4, 5], 2, 5) == 2
    assert cache.promised([1, 2, 9, 8, 4], 2, 5) == 4
    # After a while others' promises are of a later time.
    cache.tick(PRESENT_SECONDS)
    cache.tick(1.5 * PRESENT_SECONDS)
    assert cache.promised([1, 2, 3, 4, 5], 2, 5) == 2
    cache.tick(2 * PRESENT_SECONDS)
    assert cache.promised([1, 2, 3, 4, 5], 2, 5) == 5
    gone(cache, 2)
    cache.restart()
    assert cache.promised([1, 2, 3, 4, 5], 1, 5) == 5


def test_what_was_dropped_lately_is_bounded() -> None:
    cache = known(capacity=2 * MOST_BLOCKS + 2)
    keys = list(range(2 * MOST_BLOCKS + 2))
    gpu(cache, keys)
    for key in keys:
        gone(cache, key)
    assert len(cache._gone._lately) + len(cache._gone._before) <= 2 * MOST_BLOCKS
    assert cache.promised(keys, len(keys) - MOST_BLOCKS, len(keys)) == len(keys) - MOST_BLOCKS


def test_a_prompt_that_was_not_computed_is_forgotten_unless_the_engine_told_of_it() -> None:
    cache = known()
    cache.place([1, 2], now=0.0, until=0.0)
    gpu(cache, [1])
    cache.forget([1, 2])
    assert cache.depth([1, 2], 0.0) == 1


def test_what_is_about_to_be_is_bounded() -> None:
    cache = known(capacity=10)
    for start in range(0, 1000, 5):
        cache.place(list(range(start, start + 5)), now=0.0, until=0.0)
    assert len(cache._soon) == 10
    assert len(cache._turns) <= 10
    cache.place(list(range(5000, 5050)), now=0.0, until=0.0)
    assert len(cache._soon) == 50


def test_lower_tiers_go_on_where_the_device_ends() -> None:
    cache = known()
    gpu(cache, [1, 2, 3, 4])
    cache.stored([2, 3, 4, 9], None, medium="CPU", group=0, scale=1)
    cache.stored([3], None, medium="CPU", group=0, scale=1)
    gone(cache, 4)
    assert gone(cache, 3) == []  # still offloaded
    assert cache.depth([1, 2, 3, 4, 5], 0.0) == 4
    assert gone(cache, 3, medium="CPU") == []
    assert cache.depth([1, 2, 3, 4, 5], 0.0) == 4
    assert gone(cache, 3, medium="CPU") == [3]
    assert cache.depth([1, 2, 3, 4, 5], 0.0) == 2
    # A tier never fills a hole before the device's end.
    gone(cache, 1)
    assert cache.depth([1, 2, 3, 4, 5], 0.0) == 0


def test_every_group_of_full_attention_must_have_a_block() -> None:
    cache = known()
    gpu(cache, [1, 2, 3], group=0)
    gpu(cache, [1, 2], group=2)
    assert cache.depth([1, 2, 3], 0.0) == 2
    gone(cache, 2, group=0)
    assert cache.depth([1, 2, 3], 0.0) == 1
    gone(cache, 1, group=None)
    assert cache.depth([1, 2, 3], 0.0) == 0


def test_a_group_of_larger_blocks_is_named_by_its_last_small_ones() -> None:
    cache = known()
    gpu(cache, [2, 4], scale=2)
    assert cache.depth([1, 2, 3, 4, 5, 6], 0.0) == 4
    assert cache.depth([1, 2, 3], 0.0) == 2
    assert cache.depth([1], 0.0) == 0


def test_doubt_keeps_what_was_known_as_the_first_to_be_forgotten() -> None:
    cache = known(capacity=6)
    gpu(cache, [1, 2, 3, 4])
    cache.doubt()
    assert not cache.trusted
    assert cache.depth([1, 2, 3, 4], 0.0) == 4
    cache.place([7, 8, 9, 10], now=0.0, until=0.0)
    assert cache.depth([7, 8, 9, 10], 100.0) == 4
    assert cache.depth([1, 2, 3, 4], 100.0) == 2  # the tail went first
    gone(cache, 10)
    gone(cache, 9)
    assert cache.depth([7, 8, 9, 10], 100.0) == 2  # events still correct it
    gpu(cache, [9, 10], 8)
    assert cache.depth([7, 8, 9, 10], 100.0) == 4


def test_a_restart_leaves_nothing() -> None:
    cache = known()
    gpu(cache, [1, 2])
    cache.stored([3], None, medium="CPU", group=0, scale=1)
    cache.place([1, 2, 3, 4], now=0.0, until=0.0)
    cache.restart()
    assert cache.depth([1, 2, 3, 4], 0.0) == 0
    assert len(cache) == 0


def test_events_that_tell_of_more_than_there_is() -> None:
    cache = known(capacity=4)
    gpu(cache, [1, 2, 3, 4])
    assert not cache.overfull
    gpu(cache, [1])
    assert cache.overfull


def test_turns_end_and_are_gone_on_with() -> None:
    cache = known()
    cache.place([1, 2], now=0.0, until=0.0)
    assert not cache.ends_a_turn(2)
    gpu(cache, [1, 2, 3, 4])
    cache.answered([1, 2, 3, 4], prompt_blocks=2, now=0.0)
    assert [cache.ends_a_turn(key) for key in (1, 2, 3, 4)] == [False, True, True, True]
    cache.place([1, 2, 3, 9], now=1.0, until=1.0)
    assert [cache.ends_a_turn(key) for key in (1, 2, 3, 4)] == [False, False, False, True]
    cache.answered([1, 2, 3, 9], prompt_blocks=4, now=1.0)
    assert cache.ends_a_turn(9)
    cache.place([1, 2, 3, 9], now=2.0, until=2.0)
    cache.answered([1, 2, 3, 9], prompt_blocks=4, now=2.0)
    assert not cache.ends_a_turn(9)  # two ended here
    gone(cache, 4)
    assert not cache.ends_a_turn(4)


def test_what_shared_blocks_go_on_from_is_shared_too() -> None:
    cache = known()
    cache.place([1, 2, 3], now=0.0, until=0.0)
    cache.place([1, 2], now=0.0, until=0.0)
    cache.answered([1, 2, 3, 4, 5], prompt_blocks=3, now=0.0)
    cache.answered([1, 2, 3, 4, 6], prompt_blocks=2, now=0.0)  # it answers in the other's words
    assert [cache.ends_a_turn(key) for key in (1, 2, 3, 4, 5, 6)] == [False, False, False, False, True, True]


def test_of_a_long_conversation_only_the_last_turn_waits() -> None:
    cache = known()
    keys: list[int] = []
    for turn in range(6):
        keys = [*keys, 10 * turn + 1, 10 * turn + 2]
        cache.place(keys, now=0.0, until=0.0)
        assert not any(cache.ends_a_turn(key) for key in keys)
        prompt, keys = len(keys), [*keys, 10 * turn + 3, 10 * turn + 4]
        gpu(cache, keys[prompt - 2 :], keys[prompt - 3] if turn else None)
        cache.answered(keys, prompt_blocks=prompt, now=0.0)
        assert [key for key in keys if cache.ends_a_turn(key)] == keys[prompt - 1 :]


def test_prompts_that_were_answered_and_never_told_of() -> None:
    cache = known()
    cache.place([1, 2], now=5.0, until=5.0)
    cache.answered([1, 2], prompt_blocks=2, now=5.0)
    assert cache.unconfirmed_since(45.0) == 40.0
    gpu(cache, [1, 2])
    assert cache.unconfirmed_since(45.0) == 0.0
    cache.answered([1, 2, 3], prompt_blocks=2, now=6.0)
    assert cache.unconfirmed_since(46.0) == 0.0


def test_both_kinds_in_one_index() -> None:
    index = Index()
    for name in ("told", "silent"):
        index.size(name, 100)
        index.record(name, [1, 2])
    (cache,) = index.listen("told", [0], 100).values()
    assert index.match("told", [1, 2, 3]) == Match(2, False)  # presumed until events are here
    cache.restart()
    gpu(cache, [1])
    cache.trust()
    assert index.match("told", [1, 2, 3]) == Match(1, False)
    assert index.match("silent", [1, 2, 3]) == Match(2, False)
    assert (index.blocks("told"), index.blocks("silent")) == (1, 2)
    index.record("told", [1, 2], now=1.0, until=1.0)
    index.record("told", [1, 2], ended=True, prompt_blocks=2)
    assert index.match("told", [1, 2, 3], now=2.0) == Match(2, True)
    index.forget("told", [2])
    assert index.match("told", [1, 2, 3], now=2.0) == Match(1, False)
    index.predict("told")
    assert index.match("told", [1, 2, 3]) == Match(0, False)
    assert index.known("told") == {}
    index.remove("told")
    assert "told" not in index
    assert "silent" in index


def test_ranks_are_told_apart_and_taken_in_turn() -> None:
    index = Index()
    index.size("a", 100)
    ranks = index.listen("a", [0, 1], 100)
    for cache in ranks.values():
        cache.trust()
    gpu(ranks[1], [1, 2])
    assert index.match("a", [1, 2, 3]) == Match(2, False, 1)
    assert index.match("a", [1, 2, 3], rank=0) == Match(0, False, 0)
    assert index.match("a", [7]) == Match(0, False, 0)
    index.record("a", [7], rank=0)
    assert index.match("a", [8]) == Match(0, False, 1)
    assert index.match("a", [7]) == Match(1, False, 0)
    assert index.match("a", [], rank=5) == Match(0, False, 5)
    index.restart("a")
    assert index.match("a", [1, 2, 3]).depth == 0
