"""Batches in any order, lost, late, repeated, of other processes: what is known is what one would know who missed
nothing, or it is in doubt."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.feed import SILENT_SECONDS, Feed, State
from router.index.known import Known
from router.index.naming import Mode, Naming
from router.prompt.blocks import Hasher
from router.prompt.hashing import Hashing

HASHER = Hasher("sha256_cbor")
SIZE = 2


def chain(*tokens: int) -> list[int]:
    return HASHER.chain(list(tokens), SIZE).keys.tolist()


def stored(tokens: Sequence[int], first: int = 0, **more: Any) -> dict[str, Any]:
    """The blocks of a prompt from `first` on."""
    keys = chain(*tokens)
    return {
        "type": "BlockStored", "block_hashes": keys[first:], "parent_block_hash": keys[first - 1] if first else None,
        "token_ids": list(tokens[first * SIZE : len(keys) * SIZE]), "block_size": SIZE, "lora_id": None,
        "medium": "GPU", "lora_name": None, **more,
    }  # fmt: skip


def removed(*keys: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU", "group_idx": 0, **more}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """What a publisher sends and replays. `began`: its batches' times count up from there."""

    def __init__(self, began: float = 100.0, keeps: int = 1000) -> None:
        self.began = began
        self.sent: list[bytes] = []
        self.keeps = keeps

    def batch(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        number = len(self.sent)
        self.sent.append(msgspec.msgpack.encode([self.began + number / 10, list(events), 0]))
        return number, self.sent[number]

    def replay(self, feed: Feed) -> None:
        """What a subscription does when a replay is wanted."""
        while feed.wanted:
            for number in range(max(feed.ask(), len(self.sent) - self.keeps), len(self.sent)):
                if not feed.replayed(number, self.sent[number]):
                    break
            else:
                feed.replay_ended()


class Listener:
    """A feed and what became of it."""

    def __init__(self, replayable: bool = True, capacity: int = 100) -> None:
        self.known = Known(capacity, capacity)
        self.naming = Naming(Hashing("sha256_cbor"), SIZE, lambda _adapter: None)
        self.processes = 0
        self.states: list[State] = []
        self.feed = Feed(
            self.known,
            self.naming,
            replayable=replayable,
            new_process=self._new_process,
            changed=lambda feed: self.states.append(feed.state),
        )

    def _new_process(self) -> None:
        self.processes += 1

    def hear(self, batch: tuple[int, bytes], now: float = 0.0) -> None:
        self.feed.live(*batch, now, 200.0)

    def state(self) -> State:
        return self.feed.state

    def depth(self, *tokens: int, now: float = 0.0) -> int:
        return self.known.depth(chain(*tokens), now)


def test_from_the_first_batch_on() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    assert listener.state() is State.UNPROVEN
    listener.hear(publisher.batch(stored((1, 2, 3, 4))))
    listener.hear(publisher.batch(stored((1, 2, 3, 4, 5, 6), 2)))
    assert (listener.feed.state, listener.depth(1, 2, 3, 4, 5, 6, 7, 8)) == (State.LIVE, 3)
    listener.hear(publisher.batch(removed(chain(1, 2, 3, 4, 5, 6)[2])))
    assert listener.depth(1, 2, 3, 4, 5, 6) == 2
    assert listener.states == [State.UNPROVEN, State.LIVE]
    assert listener.feed.lag == 200.0 - 100.2


@pytest.mark.fault("missed events")
def test_a_missed_batch_is_replayed_in_order_and_a_later_removal_wins() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    listener.hear(publisher.batch(stored((1, 2))))
    publisher.batch(stored((1, 2, 3, 4), 1))
    listener.hear(publisher.batch(removed(chain(1, 2, 3, 4)[1])))
    assert listener.feed.wanted
    listener.hear(publisher.batch(stored((5, 6))))  # held back
    assert listener.depth(5, 6) == 0
    publisher.replay(listener.feed)
    assert (listener.depth(1, 2, 3, 4), listener.depth(5, 6)) == (1, 1)
    assert (listener.feed.counts.gaps, listener.feed.counts.lost, listener.feed.state) == (1, 0, State.LIVE)


def test_a_late_listener_has_all_that_is_kept() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.batch(stored((1, 2)))
    publisher.batch(stored((3, 4)))
    publisher.replay(listener.feed)
    assert (listener.depth(1, 2), listener.depth(3, 4), listener.feed.state) == (1, 1, State.LIVE)


def test_history_that_is_not_kept_is_lost_until_the_cache_is_cleared() -> None:
    publisher, listener = Publisher(keeps=1), Listener()
    publisher.batch(stored((1, 2)))
    publisher.batch(stored((3, 4)))
    publisher.replay(listener.feed)
    assert listener.state() is State.LOST
    assert not listener.known.trusted
    assert listener.depth(3, 4) == 1
    listener.hear(publisher.batch(CLEARED, stored((5, 6))))
    assert listener.state() is State.LIVE
    assert (listener.depth(3, 4), listener.depth(5, 6)) == (0, 1)


def test_without_replay_a_gap_is_a_loss() -> None:
    publisher, listener = Publisher(), Listener(replayable=False)
    listener.hear(publisher.batch(stored((1, 2))))
    assert listener.state() is State.LIVE
    publisher.batch(stored((3, 4)))
    late = publisher.batch(stored((5, 6)))
    listener.hear(publisher.batch(stored((7, 8))))
    assert (listener.feed.state, listener.feed.counts.gaps) == (State.LOST, 1)
    assert [listener.depth(*each) for each in ((1, 2), (3, 4), (7, 8))] == [1, 0, 1]
    listener.hear(late)  # after a later one: its removals could undo what came since
    assert listener.depth(5, 6) == 0
    assert listener.processes == 0


def test_a_gap_that_replays_do_not_fill_is_given_up() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    listener.hear(publisher.batch(stored((1, 2))))
    listener.hear((5, publisher.batch(stored((3, 4)))[1]))
    asked = 0
    while listener.feed.wanted:
        asked += 1
        listener.feed.ask()
        listener.feed.replayed(0, publisher.sent[0])
        listener.feed.replay_ended()
    assert asked == 3
    assert (listener.feed.state, listener.depth(3, 4)) == (State.LOST, 1)


def test_a_replay_that_nobody_answers() -> None:
    publisher, listener = Publisher(), Listener()
    listener.feed.replay_failed("no answer")
    assert listener.feed.wanted  # nothing was heard: nothing is missing that is known of
    listener.hear(publisher.batch(stored((1, 2))))
    listener.feed.replay_failed("no answer")
    assert (listener.feed.state, listener.depth(1, 2)) == (State.LIVE, 1)  # it was the first one
    publisher.batch(stored((3, 4)))
    listener.hear(publisher.batch(stored((5, 6))))
    listener.feed.replay_failed("no answer")
    assert (listener.feed.state, listener.depth(5, 6)) == (State.LOST, 1)
    assert "no answer" in listener.feed.why


def test_another_process_leaves_nothing_of_the_old_one() -> None:
    for replayable in (True, False):
        old, new, listener = Publisher(), Publisher(began=200.0), Listener(replayable)
        old.replay(listener.feed) if replayable else None
        for number in range(5):
            listener.hear(old.batch(stored((number, 9))))
        listener.hear(new.batch(stored((7, 8))))
        assert listener.processes == 1
        new.replay(listener.feed)
        assert [listener.depth(number, 9) for number in range(5)] == [0] * 5
        assert (listener.depth(7, 8), listener.feed.state) == (1, State.LIVE)
        listener.hear((5, old.batch(stored((1, 9)))[1]))  # still on its way when the other one came
        assert listener.depth(1, 9) == 0


def test_another_process_that_is_further_on_is_known_by_the_last_batch() -> None:
    old, new, listener = Publisher(), Publisher(began=200.0), Listener()
    old.replay(listener.feed)
    for number in range(3):
        listener.hear(old.batch(stored((number, 9))))
    for number in range(6):
        new.batch(stored((number, 7)))
    new.replay(listener.feed)
    listener.hear((6, new.batch(stored((6, 7)))[1]))
    new.replay(listener.feed)
    assert listener.processes == 1
    assert [listener.depth(number, 9) for number in range(3)] == [0, 0, 0]
    assert [listener.depth(number, 7) for number in range(7)] == [1] * 7
    assert listener.state() is State.LIVE


def test_a_restart_known_from_elsewhere_counts_once() -> None:
    old, new, listener = Publisher(), Publisher(began=200.0), Listener()
    old.replay(listener.feed)
    listener.hear(old.batch(stored((1, 9))))
    listener.feed.restarted(150.0)
    assert listener.depth(1, 9) == 0
    listener.hear((1, old.batch(stored((2, 9)))[1]))
    new.replay(listener.feed)
    listener.hear(new.batch(stored((3, 7))))
    assert (listener.depth(2, 9), listener.depth(3, 7)) == (0, 1)
    listener.feed.restarted(150.0)  # the same news, later
    assert listener.depth(3, 7) == 1
    assert (listener.processes, listener.feed.counts.restarts) == (0, 1)


def test_a_restart_that_is_known_in_the_midst_of_a_replay() -> None:
    """What is still to come of the old process's answer is no history of the new one that was lost."""
    old, new, listener = Publisher(), Publisher(began=200.0), Listener()
    old.replay(listener.feed)
    for number in range(3):
        listener.hear(old.batch(stored((number, 9))))
    old.batch(stored((7, 9)))
    old.batch(stored((8, 9)))
    first = listener.feed.ask()
    assert listener.feed.replayed(first, old.sent[first])
    listener.feed.restarted(150.0)
    assert not listener.feed.replayed(first + 1, old.sent[first + 1])
    new.replay(listener.feed)
    listener.hear(new.batch(stored((3, 7))))
    assert (listener.feed.state, listener.feed.counts.lost) == (State.LIVE, 0)
    assert [listener.depth(7, 9), listener.depth(3, 7)] == [0, 1]


def test_a_publisher_that_falls_silent_is_doubted_until_it_speaks() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    listener.hear(publisher.batch(stored((1, 2))), now=10.0)
    listener.feed.tick(1000.0)
    assert listener.state() is State.LIVE  # nothing happens, so nothing is told
    keys = chain(5, 6)
    listener.known.place(keys, 1000.0, 1000.0)
    listener.known.answered(keys, 1, 1000.0)
    listener.feed.tick(1000.0 + SILENT_SECONDS)
    assert listener.state() is State.LIVE
    listener.feed.tick(1001.0 + SILENT_SECONDS)
    assert listener.state() is State.SILENT
    assert (listener.depth(1, 2, now=2000.0), listener.depth(5, 6, now=2000.0)) == (1, 0)
    listener.known.place(keys, 2000.0, 2000.0)
    assert listener.depth(5, 6, now=3000.0) == 1  # predicted again
    listener.hear(publisher.batch(stored((5, 6))), now=3000.0)
    assert listener.state() is State.LIVE
    assert (listener.depth(1, 2), listener.depth(5, 6)) == (1, 1)


def test_what_makes_no_sense_is_counted_and_costs_the_trust() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    listener.hear(publisher.batch(stored((1, 2))))
    listener.hear((1, b"junk"))
    assert (listener.feed.state, listener.feed.counts.malformed) == (State.LOST, 1)
    listener.hear((2, msgspec.msgpack.encode([150.0, [{"type": "BlockRemoved"}, stored((3, 4))], 0])))
    assert listener.feed.counts.malformed == 2
    assert listener.depth(3, 4) == 1


def test_windows_and_states_are_not_looked_at_and_odd_blocks_are_of_no_use() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    listener.hear(
        publisher.batch(
            stored((1, 2, 3, 4), group_idx=0, kv_cache_spec_kind="full_attention"),
            stored((1, 2), group_idx=1, kv_cache_spec_kind="sliding_window"),
            removed(chain(1, 2)[0], group_idx=1),
        )
    )
    assert (listener.depth(1, 2, 3, 4), listener.feed.state) == (2, State.LIVE)
    odd = stored((5, 6)) | {"block_size": 3, "token_ids": [5, 6, 7]}
    listener.hear(publisher.batch(odd))
    assert listener.state() is State.UNUSABLE


def test_more_blocks_than_there_are_cost_the_trust_and_no_memory() -> None:
    publisher, listener = Publisher(), Listener(capacity=10)
    publisher.replay(listener.feed)
    for number in range(200):
        listener.hear(publisher.batch(stored((number, 1))))
        assert len(listener.known) <= 11
    assert listener.state() is State.LOST


def test_an_unknown_seed() -> None:
    publisher, listener = Publisher(), Listener()
    publisher.replay(listener.feed)
    hidden = Hasher("sha256_cbor", "hidden").chain([1, 2, 3, 4], SIZE).keys.tolist()
    event = stored((1, 2, 3, 4)) | {"block_hashes": hidden}
    listener.hear(publisher.batch(event))
    assert (listener.naming.mode, listener.feed.state, listener.depth(1, 2, 3, 4)) == (Mode.TRANSLATED, State.LIVE, 2)
    listener.hear(publisher.batch(removed(hidden[1])))
    assert (listener.depth(1, 2, 3, 4), listener.naming.translated) == (1, 1)
    listener.hear(publisher.batch(CLEARED))
    assert (listener.depth(1, 2, 3, 4), listener.naming.translated) == (0, 0)


class Engine:
    """An honest cache, the slow way: copies of blocks by key."""

    def __init__(self) -> None:
        self.copies: collections.Counter[int] = collections.Counter()

    def depth(self, keys: list[int]) -> int:
        depth = 0
        while depth < len(keys) and self.copies[keys[depth]]:
            depth += 1
        return depth


PROMPTS = [tuple(range(start, start + length)) for start in (0, 10, 20) for length in (2, 4, 6, 8)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "restart"]),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 7),
        st.sampled_from(["sent", "sent", "sent", "lost", "twice", "late"]),
    ),
    max_size=60,
)


@given(STEPS, st.booleans(), st.sampled_from([3, 1000]))
@settings(max_examples=250, deadline=None)
def test_whatever_happens_on_the_way(steps: list[tuple[str, int, int, str]], hidden: bool, keeps: int) -> None:
    """After a replay all is known exactly, or the state says that it is not; and nothing outlives its process."""
    hasher = Hasher("sha256_cbor", "hidden") if hidden else HASHER
    publisher, listener, engine = Publisher(keeps=keeps), Listener(), Engine()
    publisher.replay(listener.feed)
    late: list[tuple[int, bytes]] = []
    for what, which, position, way in steps:
        tokens = PROMPTS[which]
        ours, theirs = chain(*tokens), hasher.chain(list(tokens), SIZE).keys.tolist()
        position = min(position, len(ours) - 1)
        if what == "restart":
            publisher, engine = Publisher(publisher.began + 1000.0, keeps), Engine()
            late.clear()
            listener.feed.reconnected()
            continue
        if what == "store":
            # An engine stores what is missing of a prompt behind what it has, or all of it once more.
            first = min(engine.depth(ours), position)
            event = stored(tokens, first) | {
                "block_hashes": theirs[first:],
                "parent_block_hash": theirs[first - 1] if first else None,
            }
            engine.copies.update(ours[first:])
        elif what == "remove":
            if not engine.copies[ours[position]]:
                continue
            event = removed(theirs[position])
            engine.copies[ours[position]] -= 1
        else:
            event = CLEARED
            engine.copies.clear()
        batch = publisher.batch(event)
        if way in ("sent", "twice"):
            for _ in range(2 if way == "twice" else 1):
                listener.hear(batch)
            for each in late:
                listener.hear(each)
            late.clear()
        elif way == "late":
            late.append(batch)
        if position % 3 == 0:
            publisher.replay(listener.feed)
    for _ in range(2):
        listener.feed.wanted = True  # as the check, once a second
        publisher.replay(listener.feed)
    if listener.feed.state is State.LIVE:
        for tokens in PROMPTS:
            assert listener.depth(*tokens) == engine.depth(chain(*tokens))
    else:
        assert not listener.known.trusted
    if keeps == 1000:
        assert listener.feed.state in (State.LIVE, State.UNPROVEN)
