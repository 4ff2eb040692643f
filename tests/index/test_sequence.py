"""Which batch comes next, which is old, and whose it is."""

from __future__ import annotations

from router.index.sequence import Sequence, Verdict


def taken(*payloads: bytes, start: int = 0) -> Sequence:
    sequence = Sequence()
    for number, payload in enumerate(payloads, start):
        sequence.taken(number, payload)
    return sequence


def test_in_order() -> None:
    sequence = Sequence()
    for number in range(3):
        assert sequence.live(number, b"%d" % number) is Verdict.NEXT
        sequence.taken(number, b"%d" % number)
    assert sequence.next == 3


def test_a_gap_and_what_fills_it() -> None:
    sequence = taken(b"0", b"1")
    assert sequence.live(3, b"3") is Verdict.GAP
    assert sequence.ask() == 1
    assert sequence.replayed(1, b"1") is Verdict.OLD
    assert sequence.replayed(2, b"2") is Verdict.NEXT
    sequence.taken(2, b"2")
    assert sequence.replayed(3, b"3") is Verdict.NEXT
    sequence.taken(3, b"3")
    assert sequence.replay_ended() is Verdict.NEXT
    assert sequence.live(3, b"3") is Verdict.OLD
    assert sequence.live(2, b"2") is Verdict.OLD  # late, after the replay


def test_the_same_number_with_another_payload_is_another_process() -> None:
    sequence = taken(b"0", b"1", b"2")
    assert sequence.live(1, b"1") is Verdict.OLD
    assert sequence.live(0, b"new") is Verdict.OTHER
    assert sequence.ask() == 2
    assert sequence.replayed(2, b"new") is Verdict.OTHER


def test_a_replay_that_knows_less_than_was_seen_is_another_process() -> None:
    sequence = taken(b"0", b"1", b"2")
    sequence.ask()
    assert sequence.replay_ended() is Verdict.OTHER


def test_a_replay_without_the_last_one_proves_nothing() -> None:
    sequence = taken(b"0", b"1", b"2")
    sequence.ask()
    assert sequence.replayed(3, b"3") is Verdict.LOST
    sequence.ask()
    assert sequence.replayed(9, b"9") is Verdict.LOST


def test_a_first_replay_needs_no_proof() -> None:
    sequence = Sequence()
    assert sequence.ask() == 0
    assert sequence.replayed(0, b"0") is Verdict.NEXT
    sequence.restart()
    sequence.ask()
    assert sequence.replay_ended() is Verdict.NEXT
    sequence.ask()
    assert sequence.replayed(5, b"5") is Verdict.LOST


def test_batches_taken_while_a_check_is_answered() -> None:
    sequence = taken(b"0", b"1")
    assert sequence.ask() == 1
    sequence.taken(2, b"2")
    assert [sequence.replayed(n, b"%d" % n) for n in (1, 2)] == [Verdict.OLD, Verdict.OLD]
    assert sequence.replay_ended() is Verdict.NEXT


def test_what_was_given_up_may_still_come() -> None:
    sequence = taken(b"0")
    sequence.taken(3, b"3")
    assert sequence.live(2, b"2") is Verdict.OLD
    assert sequence.live(4, b"4") is Verdict.NEXT


def test_memory_is_bounded_and_what_is_older_is_taken_for_another_process() -> None:
    sequence = taken(*(b"%d" % n for n in range(10_000)))
    assert sequence.live(9_000, b"9000") is Verdict.OLD
    assert sequence.live(0, b"0") is Verdict.OTHER
    sequence.taken(10**15, b"far")
    assert len(sequence._skipped) <= 4096
