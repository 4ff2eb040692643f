"""One publisher's KV events, applied to what its engine is known to hold. No I/O: bytes come in, with the time.

The order of things is `Sequence`'s, the meaning of names `Naming`'s, the holdings are `Known`'s. What a subscription
must do is said by `wanted`: a replay, before anything else that is published can be applied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from router.index.events import Cleared, Event, EventError, Removed, Stored, read_batch, time_of
from router.index.known import DEVICE, FULL_ATTENTION
from router.index.naming import Mode
from router.index.sequence import Sequence, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.index.known import Known
    from router.index.naming import Naming

SILENT_SECONDS = 30.0
"""Requests end and nothing is heard for so long: the publisher is lost, or was never one."""
HELD_BATCHES = 1024
"""Live batches that wait for a replay. What comes beyond them is a gap, to be replayed again."""
HELD_BYTES = 64 * 1024 * 1024
REPLAYS_FOR_A_GAP = 3
"""A gap that is still there after so many replays will not be filled."""


class State(Enum):
    """How far an engine's events can be trusted."""

    JOINING = "connecting"
    LIVE = "live"
    UNPROVEN = "connected, waiting for a first block to prove the hashes by"
    LOST = "history lost"
    SILENT = "silent"
    UNUSABLE = "of no use"


@dataclass(slots=True)
class Counts:
    """What was seen so far."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    malformed: int = 0
    repeated: int = 0
    gaps: int = 0
    replays: int = 0
    lost: int = 0
    restarts: int = 0


class Feed:
    """`replayable`: missed batches can be had. `new_process` is called when batches are those of another process,
    `changed` when the state or the naming is another than before."""

    def __init__(
        self,
        known: Known,
        naming: Naming,
        *,
        replayable: bool,
        new_process: Callable[[], None],
        changed: Callable[[Feed], None],
    ) -> None:
        self.known = known
        self.naming = naming
        self.counts = Counts()
        self.wanted = replayable
        """A replay has to come before anything else."""
        self.heard_at: float | None = None
        self.lag: float | None = None
        """Seconds from the last batch's time to its arrival, by two clocks."""
        self.why = ""
        """What is wrong, for people."""
        self._sequence = Sequence()
        self._replayable = replayable
        self._new_process = new_process
        self._changed = changed
        self._reported: object = None
        self._joined = False
        self._complete = False  # nothing that happened since the process began, or was cleared, is unknown
        self._silent = False
        self._usable = True
        self.first: float | None = None
        """The time of the process's very first batch, if that was heard: whoever heard it knows the process by it."""
        self._began: float | None = None  # the time of the first batch that was heard of this process
        self._floor = 0.0  # batches from before this time are another process's, late
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._asked_for: tuple[int, int] = (-1, 0)  # what was missing when a replay was last wanted, and how often
        self._ignored: set[int] = set()  # groups that are not looked at

    @property
    def holding(self) -> bool:
        """What was published waits for a replay."""
        return bool(self._held)

    @property
    def state(self) -> State:
        if not self._usable:
            return State.UNUSABLE
        if not self._joined:
            return State.JOINING
        if not self._complete:
            return State.LOST
        if self._silent:
            return State.SILENT
        return State.UNPROVEN if self.naming.mode is Mode.UNPROVEN else State.LIVE

    # -- batches ------------------------------------------------------------------------------------------------

    def live(self, number: int, payload: bytes, now: float, wall: float) -> None:
        """A batch as it was published. `wall`: unix seconds."""
        self.heard_at = now
        at = time_of(payload)
        if at is not None:
            self.lag = max(0.0, wall - at)
        self._live(number, payload)
        self._report()

    def _live(self, number: int, payload: bytes) -> None:
        at = time_of(payload)
        if at is not None and at < self._floor:
            self.counts.repeated += 1
            return
        if self.wanted:
            self._hold(number, payload)
            return
        match self._sequence.live(number, payload):
            case Verdict.NEXT:
                self._join()
                self._apply(number, payload)
            case Verdict.OLD:
                self.counts.repeated += 1
            case Verdict.OTHER:
                self._other_process()
                self._from_the_start(number, payload)
            case _:
                self.counts.gaps += self._joined
                self._gap(number, payload)

    def _join(self) -> None:
        if not self._joined:
            self._joined = self._complete = True

    def _from_the_start(self, number: int, payload: bytes) -> None:
        """A new process's batch, the first that was heard of it."""
        if self._replayable:
            self.wanted = True
            self._hold(number, payload)
        else:
            self._live(number, payload)

    def _gap(self, number: int, payload: bytes) -> None:
        missing, times = self._asked_for
        times = times + 1 if missing == self._sequence.next else 1
        self._asked_for = (self._sequence.next, times)
        if self._replayable and times <= REPLAYS_FOR_A_GAP:
            self.wanted = True
            self._hold(number, payload)
        else:
            hint = (
                ""
                if self._replayable
                else "; a replay_endpoint in the engine's --kv-events-config would bring them back"
            )
            self._skip(number, payload, hint)

    def _skip(self, number: int, payload: bytes, why: str) -> None:
        """Give up what is missing before a batch."""
        self._join()
        self._lose(f"{number - self._sequence.next} batches were missed{why}")
        self._apply(number, payload)

    def _hold(self, number: int, payload: bytes) -> None:
        if len(self._held) < HELD_BATCHES and self._held_bytes + len(payload) <= HELD_BYTES:
            self._held.append((number, payload))
            self._held_bytes += len(payload)

    def reconnected(self) -> None:
        """Another connection may be to another process, and what came first on it is missed: ask before going on."""
        if self._joined and self._replayable:
            self.wanted = True

    # -- replay -------------------------------------------------------------------------------------------------

    def ask(self) -> int:
        """A replay begins: the number to ask from."""
        self.counts.replays += 1
        return self._sequence.ask()

    def replayed(self, number: int, payload: bytes) -> bool:
        """A batch of the replay. False: it is another process's, and a replay from 0 is wanted."""
        at = time_of(payload)
        if number > self._sequence.next and at is not None and at < self._floor:
            return False  # an answer to what was asked of the earlier process
        verdict = self._sequence.replayed(number, payload)
        if verdict is Verdict.OTHER:
            self._other_process()
            self._report()
            return False
        if verdict is Verdict.LOST:
            self._skip(number, payload, " and are no longer kept for replay")
        elif verdict is Verdict.NEXT:
            self._join()
            self._apply(number, payload)
        return True

    def replay_ended(self) -> None:
        """The publisher said that this was all."""
        if self._sequence.replay_ended() is Verdict.OTHER:
            self._other_process()
        else:
            self._join()
            self._go_on()
        self._report()

    def replay_failed(self, why: str) -> None:
        """No answer. Without it what is missing is lost; a replay that was not needed is no loss."""
        if self.wanted:
            if self._held:
                number, payload = self._held.popleft()
                if number > self._sequence.next:
                    self._skip(number, payload, f" and cannot be replayed: {why}")
                else:
                    self._held.appendleft((number, payload))
                self._go_on()
            else:
                self.why = f"no replay: {why}"
        self._report()

    def _go_on(self) -> None:
        self.wanted = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        for number, payload in held:
            self._live(number, payload)
        self._settle()

    # -- what they mean -----------------------------------------------------------------------------------------

    def restarted(self, began: float | None) -> None:
        """It is known from elsewhere that the engine's process is another, begun at `began`, unix seconds, if known."""
        if began is None or self._began is None or self._began < began:
            self._floor = max(self._floor, began or 0.0)
            self._other_process(told=True)
            self._report()

    def _other_process(self, *, told: bool = False) -> None:
        self._sequence.restart()
        self._joined = self._complete = self._silent = False
        self._began = self.first = None
        self._asked_for = (-1, 0)
        self._ignored.clear()
        self._usable, self.why = True, ""
        self._held.clear()
        self._held_bytes = 0
        self.wanted = self._replayable
        self.known.restart()
        self.naming.forget()
        self.counts.restarts += 1
        if not told:
            self._new_process()

    def tick(self, now: float) -> None:
        """Now and then: is the publisher still there?"""
        self.known.tick(now)
        quiet = self.heard_at is None or now - self.heard_at > SILENT_SECONDS
        if self._joined and not self._silent and quiet and self.known.unconfirmed_since(now) > SILENT_SECONDS:
            self._silent = True
            self.why = f"requests end, but nothing is published for {SILENT_SECONDS:g} s"
            self._settle()
            self._report()

    def _apply(self, number: int, payload: bytes) -> None:
        self._sequence.taken(number, payload)
        self.counts.batches += 1
        if self._silent:
            self._silent, self.why = False, ""
        try:
            batch = read_batch(payload)
        except EventError as error:
            self.counts.malformed += 1
            self._lose(f"a batch that makes no sense: {error}")
            return
        if self._began is None:
            self._began = self._floor = batch.at
        if number == 0:
            self.first = batch.at
        if batch.malformed:
            self.counts.malformed += batch.malformed
            self._lose("an event that makes no sense")
        for event in batch.events:
            self._happened(event)
        if self.known.overfull:
            self._lose("it tells of more blocks than it has")
        self._settle()

    def _happened(self, event: Event) -> None:
        match event:
            case Stored():
                self.counts.stored += len(event.keys)
                self._stored(event)
            case Removed():
                self.counts.removed += len(event.keys)
                if event.medium != DEVICE or event.group not in self._ignored:
                    keys = self.naming.removed(event.keys)
                    gone = self.known.removed(keys, medium=event.medium, group=event.group)
                    self.naming.drop(event.keys, gone)
            case Cleared():
                self.counts.cleared += 1
                self.known.cleared()
                self.naming.clear()
                # Whatever was missed before, all there is to know is known now.
                self._complete = True

    def _stored(self, event: Stored) -> None:
        if not event.keys:
            return
        scale = 1
        if event.medium == DEVICE:
            if event.kind not in FULL_ATTENTION:
                self._ignored.add(event.group)
                return
            scale, rest = divmod(event.block_size, self.naming.block_size)
            if rest or not scale or (scale > 1 and self.naming.mode is Mode.TRANSLATED):
                self._usable = False
                self.why = f"its blocks of {event.block_size} tokens do not fit hashes of {self.naming.block_size}"
                return
        mode = self.naming.mode
        named = self.naming.stored(event)
        if self.naming.mode is Mode.TRANSLATED is not mode:
            self.known.doubt()  # what came before is there under the engine's names
        if named is not None:
            keys, parent = named
            self.known.stored(keys, parent, medium=event.medium, group=event.group, scale=scale)

    def _lose(self, why: str) -> None:
        """Something of what happened is not known."""
        if self._complete:
            self.why = why
        self.counts.lost += 1
        self._complete = False
        self.known.doubt()

    def _settle(self) -> None:
        """Whether the events alone tell what is held."""
        if self.state is State.LIVE:
            self.why = ""
            self.known.trust()
        else:
            self.known.presume()

    def _report(self) -> None:
        now = (self.state, self.naming.mode, self.naming.hashing)
        if now != self._reported:
            self._reported = now
            self._changed(self)
