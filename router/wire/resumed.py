"""The second half of an answer whose first half another replica gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.wire.attempts import Attempt, Ending, Observer, Outcome, Patience
from router.wire.stream import MAX_LINE_BYTES

if TYPE_CHECKING:
    from router.wire.front import Front
    from router.wire.http import Head, Headers, Request
    from router.wire.seam import Seam
    from router.wire.upstream import Pool


class Resumed(Attempt):
    """Sends the request that continues an answer, and passes on what comes as if the first replica had said it. Until
    then the client sees nothing of it, so that a failure here can go to yet another replica."""

    __slots__ = ("_rest", "_seam")

    def __init__(
        self,
        client: Front,
        request: Request,
        observer: Observer,
        patience: Patience,
        added: Headers | None,
        *,
        broken: Attempt,
        seam: Seam,
    ) -> None:
        """`broken`: the attempt after which the client was left waiting. `seam`: makes the answer follow its."""
        super().__init__(client, request, observer, patience, added)
        self._seam = seam
        self._rest = b""
        self._chunked = broken._chunked
        self._plain_events = True
        self.between_events = broken.between_events

    async def run(self, pool: Pool, body: bytes) -> Outcome:
        self._last = self._loop.time()
        self._beat()  # the client is in the middle of a stream
        return await super().run(pool, body)

    def head(self, head: Head) -> None:
        self._begun(head)
        assert self._connection is not None
        stream = head.kind.startswith(b"text/event-stream") and not head.encoded
        if head.status != 200 or not stream:
            why = f"it answered {head.status}" if head.status != 200 else "it did not answer with a stream"
            self._settle(Outcome(Ending.REFUSED, head.status, why, begun=head.status == 500))
            self._connection.leave(self)
            return
        self._observer.answering(head, self._last)
        self._client.go_on(self._connection, self)

    def body(self, piece: bytes, framed: bytes = b"") -> None:
        # Whole events only: where this one breaks off, too, the client was given just what was watched.
        events, end, self._rest = (self._rest + piece).rpartition(b"\n\n")
        if end:
            self._observer.feed(events + end, self._heard_at)
            if made := self._seam.feed(events + end):
                self._give(made)
        if self._seam.spoilt or len(self._rest) > MAX_LINE_BYTES:
            self._break_off("its answer cannot follow what the client has been given")
            assert self._connection is not None
            self._connection.leave(self)

    def complete(self) -> None:
        if self._seam.ended:
            super().complete()
        else:
            self._break_off("it ended its answer without saying so")
