"""What the router itself has sent to a replica and not got back yet: the freshest load there is.

A request is booked in the same breath in which its replica is chosen, released from prefill at its first token, and
closed once at its end, however it ends. Load read from a replica's metrics is seconds old; choosing by it alone
costs 23-63 % of mean TTFT. No clock here: `now` is in seconds, of any monotonic clock.
"""

from __future__ import annotations

import math
from typing import Final

# Placement looks at the work routed lately; a minute is a few turns of a conversation.
ROUTED_WINDOW_SECONDS: Final = 60.0
# Sooner after the first request nothing is said of how many there are a second.
LEAST_SEEN_SECONDS: Final = 10.0


class Stage:
    """Where a booked request is. Only forwards."""

    ELSEWHERE: Final = 0
    """Another replica computes its prompt; here it only will be decoded."""
    PREFILL: Final = 1
    DECODE: Final = 2
    CLOSED: Final = 3


class Booking:
    """One request at one replica.

    `since`: when it was booked; None once it was taken back. `visible`: the first token will be seen (a stream).
    Otherwise prefill is presumed done after `prefill_ms` at its turn. `sequences`: what it is to the engine, one for
    each prompt and answer. `fetches`: bytes of KV on their way here. `holds`: tokens of KV that it takes here.
    """

    __slots__ = (
        "ahead",
        "behind",
        "fetches",
        "holds",
        "load",
        "prefill_ms",
        "sequences",
        "since",
        "stage",
        "visible",
        "work",
    )

    def __init__(
        self,
        load: Load,
        since: float,
        prefill_ms: float,
        visible: bool,
        work: float = 0.0,
        sequences: int = 1,
        stage: int = Stage.PREFILL,
        fetches: float = 0.0,
        holds: int = 0,
    ) -> None:
        self.load = load
        self.since: float | None = since
        self.prefill_ms = prefill_ms
        self.visible = visible
        self.work = work
        self.sequences = sequences
        self.stage = stage
        self.fetches = fetches
        self.holds = holds
        self.ahead: Booking | None = None
        """Whose prefill was booked just before, of those that are not done."""
        self.behind: Booking | None = None

    def first_token(self, now: float) -> None:
        if self.stage == Stage.PREFILL:
            self.load.leave_prefill(self, now)
        elif self.stage == Stage.ELSEWHERE:
            self.load.arrived(self)
        else:
            return
        self.stage = Stage.DECODE
        self.load.begin_answer(self, now)

    def close(self, now: float) -> None:
        """The request is over. Safe to call twice; counts once."""
        if self.stage == Stage.PREFILL:
            self.load.leave_prefill(self, now)
        elif self.stage == Stage.DECODE:
            self.load.end_answer(self, now)
        elif self.stage == Stage.ELSEWHERE:
            self.load.arrived(self)
        else:
            return
        self.stage = Stage.CLOSED
        self.load.in_flight -= self.sequences
        self.load.holding -= self.holds

    def take_back(self, now: float) -> None:
        """The work was never done here. Safe to call twice."""
        if self.since is not None:
            self.load.take_back(self, self.since, now)
            self.since = None


class Load:
    """What one incarnation of a replica has been given. A restarted replica gets a new one, so that the end of an old
    request can never be counted against the new process."""

    __slots__ = (
        "_decoded",
        "_fetched",
        "_first",
        "_freed",
        "_head_since",
        "_last",
        "_prefills_ms",
        "_queued_ms",
        "_routed",
        "_routed_at",
        "_since",
        "_squares",
        "decoding",
        "expected",
        "fetching",
        "holding",
        "in_flight",
        "prefills",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        self.decoding = 0
        self.fetching = 0.0
        """Bytes of KV that requests have still to fetch from other replicas."""
        self.expected = 0
        """Requests whose prompts other replicas compute for it, and that have no first token yet."""
        self.holding = 0
        """Tokens of KV that requests in flight hold here, or will."""
        self.prefills = 0
        """How many it was ever given."""
        self._first: Booking | None = (
            None  # whose prefills are not done, in order of booking: each knows its neighbours
        )
        self._last: Booking | None = None
        self._queued_ms = 0.0
        self._head_since = 0.0
        self._routed = 0.0
        self._prefills_ms = 0.0  # of the prefills among it: the sum
        self._squares = 0.0  # and the sum of squares
        self._fetched = 0.0  # bytes that came from elsewhere for it
        self._freed = 0.0  # tokens of KV that answers held which have ended
        self._decoded = 0.0  # seconds, of all answers together
        self._routed_at = 0.0
        self._since: float | None = None

    def book(
        self, now: float, *, prefill_ms: float, work: float, visible: bool, sequences: int = 1, holds: int = 0
    ) -> Booking:
        """Take a request on. `work`: all it will be for the replica, in prefilled tokens' worth (a rate would change
        with what is learned, and old work would weigh more than new)."""
        booking = Booking(self, now, prefill_ms, visible, work, sequences, holds=holds)
        if self._last is None:
            self._first = booking
            self._head_since = now
            self._queued_ms = 0.0
        else:
            booking.ahead = self._last
            self._last.behind = booking
        self._last = booking
        self._queued_ms += prefill_ms
        self.in_flight += sequences
        self.holding += holds
        self.prefills += 1
        self._route(now, work, prefill_ms)
        return booking

    def book_decode(
        self, now: float, *, work: float, fetches: float = 0.0, sequences: int = 1, holds: int = 0
    ) -> Booking:
        """Take on a request whose prompt another replica computes: in flight, but nobody waits here for its prefill.
        `fetches`: bytes of KV that come from there."""
        self.in_flight += sequences
        self.holding += holds
        self.fetching += fetches
        self.expected += 1
        self._route(now, work, fetches=fetches)
        return Booking(self, now, 0.0, True, work, sequences, Stage.ELSEWHERE, fetches, holds)

    def waiting_ms(self, now: float) -> float:
        """How long a request that came now would wait for the prefills before it: their sum, less the time the first
        of them has been worked on."""
        while (head := self._first) is not None:
            worked_ms = (now - self._head_since) * 1000
            if head.visible or worked_ms < head.prefill_ms:
                return max(0.0, self._queued_ms - min(head.prefill_ms, worked_ms))
            # Nobody will tell us of its first token: it has had its time.
            turn = self._head_since + head.prefill_ms / 1000
            head.first_token(turn)
        return 0.0

    def head_ms(self, now: float) -> float:
        """What the first prefill in the queue still takes: so much of `waiting_ms` passes by itself."""
        if not self.waiting_ms(now) or (head := self._first) is None:
            return 0.0
        return max(0.0, head.prefill_ms - (now - self._head_since) * 1000)

    def routed(self, now: float) -> float:
        """Work routed here, in prefilled tokens' worth, decayed over `ROUTED_WINDOW_SECONDS`."""
        return self._routed * math.exp(-(now - self._routed_at) / ROUTED_WINDOW_SECONDS)

    def prefilling(self, now: float) -> tuple[float, float]:
        """Of the prefills given lately: the share of the time that they take, 0 up, and how long what comes at any one
        moment waits, on average, for the one under way, if there is one (the mean residual service, ms)."""
        share = self._kept(now) / (self._seen(now) * 1000)
        return self._prefills_ms * share, self._squares * share / 2

    def fetched(self, now: float) -> float:
        """Bytes a second of KV from other replicas, lately."""
        return self._fetched * self._kept(now) / self._seen(now)

    def freed(self, now: float) -> float:
        """Tokens of KV a second that answers held which ended lately."""
        return self._freed * self._kept(now) / self._seen(now)

    def answering(self, now: float) -> float:
        """How many it decoded at a time lately, on average."""
        return self._decoded_by(self._kept(now)) / self._seen(now)

    def begin_answer(self, booking: Booking, now: float) -> None:
        self._fade(now)
        self.decoding += booking.sequences

    def end_answer(self, booking: Booking, now: float) -> None:
        self._fade(now)
        self._freed += booking.holds
        self.decoding -= booking.sequences

    def take_back(self, booking: Booking, since: float, now: float) -> None:
        """Work that was routed here `since` and went elsewhere: what has not faded of it by itself."""
        left = math.exp(-(now - since) / ROUTED_WINDOW_SECONDS)
        self._route(now, booking.work, booking.prefill_ms, booking.fetches, share=-left)

    def _route(
        self, now: float, work: float, prefill_ms: float = 0.0, fetches: float = 0.0, *, share: float = 1.0
    ) -> None:
        """`share`: how much of it counts; what is taken back counts below 0."""
        if self._since is None:
            self._since = now
        self._fade(now)
        # Never below 0, which rounding could bring about.
        self._routed = max(0.0, self._routed + share * work)
        self._prefills_ms = max(0.0, self._prefills_ms + share * prefill_ms)
        self._squares = max(0.0, self._squares + share * prefill_ms * prefill_ms)
        self._fetched = max(0.0, self._fetched + share * fetches)

    def _fade(self, now: float) -> None:
        """Bring all that is over the last minute to this moment."""
        kept = self._kept(now)
        self._decoded = self._decoded_by(kept)
        self._routed *= kept
        self._prefills_ms *= kept
        self._squares *= kept
        self._fetched *= kept
        self._freed *= kept
        self._routed_at = now

    def _decoded_by(self, kept: float) -> float:
        return self._decoded * kept + self.decoding * ROUTED_WINDOW_SECONDS * (1 - kept)

    def _seen(self, now: float) -> float:
        """Seconds that decayed sums are over: all of the window only after it has been filled."""
        age = 0.0 if self._since is None else now - self._since
        return ROUTED_WINDOW_SECONDS * (1 - math.exp(-max(age, LEAST_SEEN_SECONDS) / ROUTED_WINDOW_SECONDS))

    def _kept(self, now: float) -> float:
        return math.exp(-(now - self._routed_at) / ROUTED_WINDOW_SECONDS)

    def arrived(self, booking: Booking) -> None:
        self.fetching -= booking.fetches
        self.expected -= 1

    def leave_prefill(self, booking: Booking, now: float) -> None:
        ahead, behind = booking.ahead, booking.behind
        booking.ahead = booking.behind = None
        if ahead is None:
            self._first, self._head_since = behind, now
        else:
            ahead.behind = behind
        if behind is None:
            self._last = ahead
        else:
            behind.ahead = ahead
        self._queued_ms -= booking.prefill_ms
