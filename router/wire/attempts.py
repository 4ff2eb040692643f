"""One request at one replica: what its answer becomes for the client, and what may be tried elsewhere.

A failure before the first byte reaches the client is invisible: the journey tries another replica. After it, the
only honest answers are the replica's own bytes, an error event, or a broken connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from router.wire import errors
from router.wire.http import Head, Headers, Request, request_head, response_head
from router.wire.stream import DONE, Verdict, failed_at
from router.wire.upstream import BrokenError, ExhaustedError, Pool, Sink, Upstream

if TYPE_CHECKING:
    import asyncio

    from router.wire.alarms import Alarm
    from router.wire.errand import Task
    from router.wire.front import Front


# What an event stream may carry at any place between events, and clients pass over.
COMMENT: Final = b": keep-alive\n\n"
# A connection that was closed while idle shows it within a round trip of being used again.
STALE_SECONDS = 1.0


class Ending:
    """How an attempt ended, in a word. No Enum: compiled, each mention of a member of one would be a search."""

    COMPLETE: Final = "complete"  # the answer, whatever its status, was passed on whole
    REFUSED: Final = "refused"  # the replica answered that it cannot; nothing was passed on
    UNREACHED: Final = "unreached"  # no connection, or it broke before the first byte of an answer
    SILENT: Final = "silent"  # nothing came within the bound
    BROKEN: Final = "broken"  # it broke in the middle; the client was told
    CUT: Final = "cut"  # it broke in the middle; the client was not told, since it may go on elsewhere
    STALLED: Final = "stalled"  # the client stopped reading it, and was cut
    EXHAUSTED: Final = "exhausted"  # this process has no connection left to try with


SHOWN: Final = frozenset({Ending.COMPLETE, Ending.BROKEN, Ending.CUT, Ending.STALLED})
"""Endings of an answer that the client has seen something of."""


class Outcome:
    """How it ended, and why, in words."""

    __slots__ = ("begun", "ending", "status", "why")

    def __init__(self, ending: str, status: int | None = None, why: str = "", begun: bool = False) -> None:
        self.ending = ending
        self.status = status
        self.why = why
        self.begun = begun
        """The replica had the whole request, so that its failure may be the request's doing."""


class Observer:
    """What the journey wants to know while bytes flow. Calls come from inside the read callback: be quick. This one
    wants to know nothing, and tries nothing again."""

    __slots__ = ()

    def retries(self, _status: int) -> bool:
        """Whether an answer of this status is dropped because another replica will be asked."""
        return False

    def elsewhere(self) -> bool:
        """Whether another replica could be asked instead."""
        return False

    def resumes(self) -> bool:
        """Whether an answer that breaks off may go on at another replica."""
        return False

    def whole(self) -> bool:
        """Whether a stream that has ended as HTTP also says of itself that it is all."""
        return True

    def answering(self, _head: Head, _now: float) -> bytes:
        """The answer's head is here and will be passed on; returns the lines to add to it. `_now`: by the loop."""
        return b""

    def feed(self, piece: bytes, now: float) -> None:
        """A piece of the answer's body, in order; likewise."""


class Edit(Protocol):
    """Changes what the client is shown of an answer's body."""

    def piece(self, piece: bytes) -> bytes:
        """What is shown now; what is missing of it comes later."""

    def rest(self) -> bytes:
        """What is left at the end."""


class Hold(Protocol):
    """Keeps the beginning of an event stream back, so that an error in it can still be answered by another attempt."""

    def by(self, piece: bytes) -> Verdict:
        """What the stream begins with, told of each piece until it is an answer or an error."""


class Patience:
    """Seconds without a byte before a replica is given up: before its answer begins, over all attempts of a request
    together, and within its answer. `keep_alive`: before the client of a stream is sent a comment; 0: never."""

    __slots__ = ("first_byte", "idle", "keep_alive")

    def __init__(self, first_byte: float, idle: float, keep_alive: float = 0.0) -> None:
        self.first_byte = first_byte
        self.idle = idle
        self.keep_alive = keep_alive


class Attempt(Sink):
    """Sends one request to one replica and passes the answer on. Use once."""

    __slots__ = (
        "_added",
        "_alarm",
        "_chunked",
        "_client",
        "_connection",
        "_edit",
        "_ended",
        "_held",
        "_hold",
        "_last",
        "_loop",
        "_observer",
        "_out",
        "_outcome",
        "_patience",
        "_plain_events",
        "_pulse",
        "_request",
        "_silent",
        "_status",
        "_waiting",
        "between_events",
    )

    def __init__(
        self,
        client: Front,
        request: Request,
        observer: Observer,
        patience: Patience,
        added: Headers | None = None,
        hold: Hold | None = None,
        edit: Edit | None = None,
    ) -> None:
        """`added`: headers for the replica beside the client's own. `hold`: whether the answer may be shown yet.
        `edit`: what is changed of it on the way."""
        self._client = client
        self._request = request
        self._added = added
        self._hold = hold
        self._edit = edit
        self._observer = observer
        self._patience = patience
        self._loop = client.loop
        self._outcome: Outcome | None = None
        self._waiting: asyncio.Future[None] | None = None  # `run` does, for the outcome
        self._ended: Task | None = None  # to be told once the outcome is there
        self._connection: Upstream | None = None
        self._alarm: Alarm | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._last = 0.0  # when it began, or the replica was heard
        self._silent = True
        self._status: int | None = None
        self._chunked = False
        self._plain_events = False
        self._out: list[bytes] = []
        self.between_events = True
        """Whether the client was given whole events, so that another may follow."""
        self._held = b""  # an error that the replica told, which the client has not seen

    def start(self, pool: Pool, body: bytes, ended: Task, now: float) -> bool:
        """Send the request, and tell `ended` that it is `answered` once `outcome` may be looked at. False where there
        is no connection to send it by: that is for `run` to wait for."""
        self._watch(now)
        connection = pool.take_idle(now)
        if connection is not None:
            self._ended = ended
            self._send(connection, pool, body, now)
        return connection is not None

    async def run(self, pool: Pool, body: bytes) -> Outcome:
        """Do what is left to be done; ends with the attempt. Cancelled, it leaves the replica."""
        self._ended = None
        try:
            if self._connection is None:
                now = self._loop.time()
                self._watch(now)
                self._send(pool.take_idle(now) or await pool.connect(), pool, body, self._loop.time())
            while True:
                if self._outcome is None:
                    self._waiting = self._loop.create_future()
                    await self._waiting
                if (outcome := self.outcome) is not None:
                    return outcome
                # It was closed while idle, as keep-alive allows at any moment: no sign of ill health. A fresh
                # connection to the same replica settles it.
                self._outcome = self._waiting = None
                self._send(await pool.connect(), pool, body, self._loop.time())
        except BrokenError as error:
            return Outcome(Ending.UNREACHED, why=str(error))
        except ExhaustedError:
            return Outcome(Ending.EXHAUSTED)
        finally:
            self.leave()

    def leave(self) -> None:
        """Nothing more is wanted of it. A replica that has not answered is left at once, so that it stops working for
        nobody."""
        self._ended = None
        if self._alarm is not None:
            self._alarm.discard(self)
        if self._pulse is not None:
            self._pulse.cancel()
        if self._connection is not None and self._outcome is None:
            self._connection.leave(self)

    def _watch(self, now: float) -> None:
        """One alarm for both bounds: it comes in time for the shorter one, and looks then which of them holds."""
        if self._alarm is None:
            self._last = now
            self._alarm = self._client.alarms.since(now, min(self._patience.first_byte, self._patience.idle), self)

    def _send(self, connection: Upstream, pool: Pool, body: bytes, now: float) -> None:
        self._connection = connection
        if self._outcome is not None:
            pool.give_back(connection, now)  # it came too late: the request was given up meanwhile
            return
        request = self._request
        head = request_head(request, len(body), pool.authority, pool.base, self._added)
        connection.send(head, body, self, now, head_only=request.method == b"HEAD")

    @property
    def sent(self) -> bool:
        """Whether a replica was sent the request, or a part of it."""
        return self._connection is not None

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None where it goes on.

        It does where a kept connection broke at once: then its end had been on its way before the request was. One that
        breaks later broke over the request, which may have been begun.
        """
        connection, outcome = self._connection, self._outcome
        stale = (
            outcome is not None
            and outcome.begun
            and outcome.ending == Ending.UNREACHED
            and connection is not None
            and connection.reused
            and not connection.answered
            and self._loop.time() - connection.sent_at < STALE_SECONDS
        )
        return None if stale else outcome

    # -- the answer, as upstream parses it -----------------------------------------------------------------------

    def _begun(self, head: Head) -> None:
        assert self._connection is not None
        self._silent = False
        self._last = self._connection.heard_at
        self._status = head.status

    def head(self, head: Head) -> None:
        self._begun(head)
        assert self._connection is not None
        if self._client.started:
            self._connection.leave(self)  # it was cut in this turn of the loop, and has been told so
            return
        if head.status >= 400 and self._observer.retries(head.status):
            # Others than 500 say of themselves that the request was not, or need not have been, worked on.
            self._settle(Outcome(Ending.REFUSED, head.status, f"it answered {head.status}", begun=head.status == 500))
            self._connection.leave(self)
            return
        extra = self._observer.answering(head, self._last)
        request = self._request
        bodiless = head.bodiless or request.method == b"HEAD"
        measured = head.measured
        self._chunked = not bodiless and not measured and request.http11
        # HTTP/1.0 knows no chunks: there the end of an unmeasured body is the end of the connection.
        close = not self._client.keep_alive or (not bodiless and not measured and not request.http11)
        if close:
            request.keep_alive = False
        # Into a compressed stream no plain event can be written, and into one of a told length none at all.
        plain = not (head.encoded or measured or bodiless)
        self._plain_events = plain and head.kind.startswith(b"text/event-stream")
        self._out.append(response_head(head, extra, chunked=self._chunked, close=close))
        if self._hold is None or not self._plain_events or head.status != 200:
            self._show()

    def _show(self) -> None:
        """From here on the client sees the answer, and no other attempt can take its place."""
        self._hold = None
        self._client.begin(valve=self._connection, sink=self, lasting=self._plain_events)
        self._beat()

    def body(self, piece: bytes, framed: bytes = b"") -> None:
        if self._hold is not None:
            verdict = self._hold.by(piece)
            if verdict is Verdict.ERROR:
                self._settle(Outcome(Ending.REFUSED, 200, "its stream began with an error", begun=True))
                assert self._connection is not None
                self._connection.leave(self)
                return
            if verdict is Verdict.ANSWER:
                self._show()
        if self._plain_events and (at := failed_at(piece)) >= 0 and self._observer.resumes():
            self._give_up(piece, at)
            return
        if self._edit is None:
            self._give(piece, framed)
        elif shown := self._edit.piece(piece):
            self._give(shown)
        self._observer.feed(piece, self._heard_at)

    def _give_rest(self) -> None:
        if self._edit is not None and (rest := self._edit.rest()):
            self._give(rest)

    def _give(self, piece: bytes, framed: bytes = b"") -> None:
        """Pass a piece of the body on, in this hop's framing. `framed`: that, where it is known."""
        if self._chunked and framed:
            self._out.append(framed)
        elif self._chunked:
            self._out += (b"%x\r\n" % len(piece), piece, b"\r\n")
        else:
            self._out.append(piece)
        self.between_events = piece.endswith(b"\n\n")

    def _give_up(self, piece: bytes, at: int) -> None:
        """The engine says, at `at`, that it failed over the answer: as if the replica had broken off there."""
        if at:
            self._give(piece[:at])
            self._observer.feed(piece[:at], self._heard_at)
        self._held = piece[at:]
        self._break_off("its engine failed")
        assert self._connection is not None
        self._connection.leave(self)

    @property
    def _heard_at(self) -> float:
        """When what is being passed on came."""
        assert self._connection is not None
        return self._connection.heard_at

    def flush(self) -> None:
        self._last = self._heard_at
        self._write()

    def _write(self) -> None:
        if self._out and self._hold is None:
            self._client.write(self._out[0] if len(self._out) == 1 else b"".join(self._out))
            self._out.clear()

    def complete(self) -> None:
        if self._hold is not None:
            self._show()
        self._give_rest()
        if self._takes_events and self._status == 200 and not self._observer.whole():
            self._break_off("it ended its stream before its answer was done")
            return
        self._end()
        if self._ended is None:
            self._settle(Outcome(Ending.COMPLETE, self._status))
        elif self._outcome is None:
            self._outcome = Outcome(Ending.COMPLETE, self._status)  # `parted` tells of it

    def parted(self) -> None:
        # At once, and not in the loop's next turn: it is the loop that calls here, told of what the replica sent.
        ended, self._ended = self._ended, None
        if ended is not None and self._outcome is not None:
            ended.answered()

    def broken(self, why: BrokenError) -> None:
        if self._silent or self._hold is not None:
            self._settle(Outcome(Ending.UNREACHED, why=str(why), begun=True))
        else:
            self._break_off(str(why))

    def lost(self, why: str) -> None:
        """The replica gives no sign of life. A request that waits for its first byte goes elsewhere; where there is no
        other, it waits on, since this one may wake up."""
        if self._outcome is not None:
            return
        if not self._silent and self._hold is None:
            self._break_off(why)
        elif self._observer.elsewhere():
            self._settle(Outcome(Ending.UNREACHED, why=why))
        else:
            return
        if self._connection is not None:
            self._connection.leave(self)

    def shut(self, refusal: errors.Refusal) -> None:
        if self._outcome is not None:
            self._client.abort()  # nobody is at work on it just now
            return
        self._cut_short(refusal.event())
        self._settle(Outcome(Ending.BROKEN, self._status, refusal.message))
        if self._connection is not None:
            self._connection.leave(self)

    def _break_off(self, why: str) -> None:
        """The client has part of an answer: it goes on elsewhere, or the client is told that it is only a part."""
        self._give_rest()
        if self._takes_events and self._observer.resumes():
            self.flush()
            self._client.adjourn()  # its connection may be at work for another client next
            self._settle(Outcome(Ending.CUT, self._status, why))
        else:
            self.tell(why)
            self._settle(Outcome(Ending.BROKEN, self._status, why))

    @property
    def _takes_events(self) -> bool:
        """Whether an event can be added to what the client was given."""
        return self._plain_events and (self._chunked or not self._request.http11)

    def tell(self, why: str) -> None:
        """Say to the client that its answer is only a part, and end it."""
        self._cut_short(self._held or errors.broken_stream(why).event())

    def _cut_short(self, event: bytes) -> None:
        """End before the end, with this event where there can be one."""
        if self._takes_events:
            self._give(event if self.between_events else b"\n\n" + event)
            self._end(close=True)
        else:
            self.flush()
            self._client.abort()

    def conclude(self) -> None:
        """Everything was said but that it was everything."""
        self._give(DONE)
        self._end()

    def _end(self, *, close: bool = False) -> None:
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        self.flush()
        self._client.finish(close=close)

    def _settle(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        if self._waiting is not None:
            if not self._waiting.done():
                self._waiting.set_result(None)
        elif self._ended is not None:
            self._loop.call_soon(self._ended.answered)
            self._ended = None

    # -- time ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """A sign of life for whoever stands between us and the client; none of the replica's, so that its own bounds
        hold as before."""
        period = self._patience.keep_alive
        if not period or not self._takes_events or self._outcome is not None:
            return
        due = period - (self._loop.time() - self._last)
        if due <= 0:
            due = period
            if self.between_events and not self._out and not self._client.stalled:
                self._give(COMMENT)
                self._write()
        self._pulse = self._loop.call_later(due, self._beat)

    def check_time(self) -> None:
        if self._outcome is not None:
            return
        bound = self._patience.first_byte if self._silent else self._patience.idle
        quiet = self._loop.time() - self._last
        if quiet < bound:
            self._alarm = self._client.alarms.after(min(bound - quiet, self._patience.idle), self)
            return
        if self._silent:
            self._settle(Outcome(Ending.SILENT, why=f"no answer within {bound:g} s (first_byte_timeout_seconds)"))
        elif self._hold is not None:
            self._settle(Outcome(Ending.SILENT, why=f"it sent nothing for {bound:g} s (idle_timeout_seconds)"))
        elif self._client.stalled:
            # Not the replica's fault: its bytes lie here unread.
            self._client.abort()
            self._settle(Outcome(Ending.STALLED, self._status, f"the client read nothing for {bound:g} s"))
        else:
            self._break_off(f"it sent nothing for {bound:g} s (idle_timeout_seconds)")
        if self._connection is not None:
            self._connection.leave(self)
