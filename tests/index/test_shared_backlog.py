from __future__ import annotations

from router.index.shared_backlog import Backlog, Entry, Recent
from router.index.shared_codec import AGAIN, ENDED, FORGET, RECORD, Seat, operation, pack_keys

SEATS = {"a": Seat(0, 1), "b": Seat(1, 5)}


def entry(replica: str, blocks: int, *, kind: int = RECORD, first: int = 0, prompt_end: int | None = None) -> Entry:
    keys = pack_keys(range(first, first + blocks))
    return Entry(kind, replica, 0, keys, blocks - 1 if prompt_end is None else prompt_end)


def seat(of: Entry) -> Seat | None:
    return SEATS.get(of.replica)


def test_keys_are_unsigned_and_big_endian() -> None:
    assert pack_keys([1, (1 << 64) - 2]) == b"\0" * 7 + b"\1" + b"\xff" * 7 + b"\xfe"


def test_the_head_of_a_write_is_as_the_script_reads_it() -> None:
    head = operation(ENDED, Seat(258, 3), 5, 16, 40, 30, 5000)
    assert head.hex() == "0201020000000300000000000500000010000000280000001e00001388"


def test_short_ones_go_together_and_a_long_one_ends_the_slice() -> None:
    backlog = Backlog(100_000)
    for each in (entry("a", 20), entry("b", 16), entry("a", 200), entry("b", 1)):
        backlog.push(each)
    parts = backlog.next_slice(seat, pages=8)
    assert [len(part.keys) // 8 for part in parts] == [20, 16, 80]
    assert backlog.told(parts, [100, 20, 200, 16, 300, 80]) == []
    assert backlog.blocks == 201
    parts = backlog.next_slice(seat, pages=8)
    assert [len(part.keys) // 8 for part in parts] == [120]
    assert parts[0].head == operation(RECORD, SEATS["a"], 300, 80, 200, 199, 0)
    backlog.told(parts, [300, 64])  # the store had enough before the end
    parts = backlog.next_slice(seat, pages=8)
    assert parts[0].head == operation(RECORD, SEATS["a"], 300, 144, 200, 199, 0)
    backlog.told(parts, [300, 56, 9, 1])
    assert len(backlog) == 0


def test_what_the_store_did_not_get_to_is_offered_again() -> None:
    backlog = Backlog(1000)
    for first in range(3):
        backlog.push(entry("a", 4, first=first))
    parts = backlog.next_slice(seat)
    backlog.told(parts, [50, 4])
    assert [part.keys for part in backlog.next_slice(seat)] == [part.keys for part in parts[1:]]


def test_an_epoch_that_is_over_is_told_and_its_entries_given_up() -> None:
    backlog = Backlog(10_000)
    backlog.push(entry("a", 2000))
    backlog.push(entry("b", 4))
    parts = backlog.next_slice(seat)
    assert backlog.told(parts, [-1, 1024]) == ["a"]
    assert [part.entry.replica for part in backlog.next_slice(seat)] == ["b"]


def test_replicas_without_a_seat_are_passed_over() -> None:
    backlog = Backlog(1000)
    for replica in ("gone", "a", "gone", "b"):
        backlog.push(entry(replica, 4))
    parts = backlog.next_slice(seat)
    assert [part.entry.replica for part in parts] == ["a", "b"]
    backlog.told(parts, [10, 4, 10, 4])
    assert backlog.next_slice(seat) == []
    assert len(backlog) == 0
    assert backlog.dropped_blocks == 0


def test_beyond_the_bound_the_oldest_are_dropped_and_counted() -> None:
    backlog = Backlog(100)
    for first in range(6):
        backlog.push(entry("a", 30, first=first * 30))
    assert (backlog.blocks, backlog.dropped_blocks) == (90, 90)
    assert backlog.next_slice(seat)[0].keys == pack_keys(range(90, 120))
    backlog.push(entry("a", 101))
    assert (backlog.blocks, backlog.dropped_blocks) == (0, 281)


def test_what_is_refused_is_given_up_and_counted() -> None:
    backlog = Backlog(10_000)
    backlog.push(entry("a", 2000))
    parts = backlog.next_slice(seat)
    backlog.told(parts, [10, 1024])
    backlog.refused(backlog.next_slice(seat))
    assert (len(backlog), backlog.dropped_blocks) == (0, 976)


def test_another_connection_is_told_from_the_beginning() -> None:
    backlog = Backlog(10_000)
    backlog.push(entry("a", 2000))
    backlog.told(backlog.next_slice(seat), [10, 1024])
    backlog.restart()
    assert backlog.next_slice(seat)[0].head == operation(RECORD, SEATS["a"], 0, 0, 2000, 1999, 0)


def test_an_answer_replaces_its_prompt_and_all_are_told_again_in_order() -> None:
    recent = Recent(10_000)
    recent.add(entry("a", 10))
    recent.add(entry("b", 10))
    recent.add(entry("a", 14, kind=ENDED, prompt_end=9))
    assert [(each.kind, each.replica, len(each.keys) // 8, each.prompt_end) for each in recent.again()] == [
        (AGAIN, "b", 10, 9),
        (AGAIN, "a", 14, 9),
    ]
    found = recent.find("a", pack_keys([9]))
    assert found is not None
    assert found.kind == ENDED
    recent.forget("a", pack_keys([9]))
    assert [each.replica for each in recent.again()] == ["b"]
    assert FORGET not in {each.kind for each in recent.again()}


def test_recent_ones_are_bounded_in_bytes() -> None:
    recent = Recent(1000)
    for first in range(50):
        recent.add(entry("a", 10, first=first * 10))
    kept = list(recent.again())
    assert len(kept) == 12
    assert kept[-1].keys == pack_keys(range(490, 500))
