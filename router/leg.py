"""One request at one replica, as the wire sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.wire.stream import Answer, EventWatch, FirstEvent, JsonWatch, Opening, Said, Verdict, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.choose.dispatch import Placement, SplitPlacement
    from router.fleet.replica import Replica
    from router.reading import Prompt
    from router.wire.attempts import Attempt
    from router.wire.http import Head, Headers, Request

REQUEST_ID = b"x-request-id"
RANK_HEADER = b"X-data-parallel-rank"


def asked_rank(request: Request) -> int | None:
    """The data-parallel rank that the client asks for (vLLM reads X-data-parallel-rank)."""
    value = request.rank
    return int(value) if value and value.isdigit() and len(value) < 6 else None


class Leg:
    """One request at one replica, as the wire sees it (an `Observer`): what to add to its answer, what that says."""

    __slots__ = (
        "_answer",
        "_begun",
        "_clock",
        "_first_token",
        "_opening",
        "_piece_at",
        "_rank_given",
        "_show_choice",
        "_streamed",
        "_watch",
        "attempt",
        "first_token_at",
        "may_move",
        "may_retry",
        "pace",
        "placement",
        "prompt",
        "request_id",
        "resumable",
        "sound",
        "split",
        "tells_its_end",
    )

    def __init__(
        self,
        prompt: Prompt,
        placement: Placement,
        first_token: Callable[[Leg], None],
        *,
        show_choice: bool,
        rank_given: bool,
        split: SplitPlacement | None = None,
    ) -> None:
        """`split`: of a request whose prompt another replica computes."""
        self.prompt = prompt
        self.split = split
        self._rank_given = rank_given
        self.request_id = b""
        """What the client knows it by."""
        self.first_token_at: float | None = None
        """When the first token of a stream came, by the loop's clock."""
        self.pace: Callable[[float], None] | None = None
        """Told the seconds between any two pieces after it."""
        self._piece_at = 0.0
        self.placement = placement
        self.may_retry: Callable[[int], bool] = lambda _: False
        self.may_move: Callable[[], bool] = lambda: False
        self.attempt: Attempt | None = None
        """The exchange that gives the client its answer."""
        self.resumable = False
        """Whether its answer may go on elsewhere if it breaks off."""
        self.tells_its_end = False
        """Whether a stream in answer to it says where it ends."""
        self.sound: Callable[[Replica], None] = lambda _: None
        self._first_token = first_token
        self._show_choice = show_choice
        self._watch: Watch | None = None
        self._answer: Answer | None = None
        self._streamed = False
        self._begun = FirstEvent()
        self._opening = Opening() if split is not None else None
        self._clock = asyncio.get_running_loop().time

    def added(self) -> Headers:
        """Headers for the replica: the rank that was chosen, unless the client itself named one."""
        rank = self.placement.rank
        return [] if rank is None or self._rank_given else [(RANK_HEADER, b"%d" % rank)]

    def retries(self, status: int) -> bool:
        return self.may_retry(status)

    def elsewhere(self) -> bool:
        return self.may_move()

    def resumes(self) -> bool:
        return self.resumable

    def whole(self) -> bool:
        return not self.tells_its_end or not isinstance(self._watch, EventWatch) or self._watch.whole

    def answering(self, head: Head) -> Headers:
        replica = self.placement.replica
        replica.heard_at = self._clock()
        if head.status < 500:
            self.sound(replica)
        stream = head.kind.startswith(b"text/event-stream")
        # Where KV has to arrive first, the role alone proves nothing: `by` tells.
        self._streamed = stream and head.status == 200 and self.split is None
        if head.status == 200 and self.prompt.ask.kind != "other" and not head.encoded:
            if stream:
                self._watch = EventWatch()
            elif head.kind.startswith(b"application/json"):
                self._watch = JsonWatch()
        shown: Headers = []
        if self.split is not None:
            # What the engines know it by may be another name.
            head.drop_id()
        if self.request_id and not head.tells_id:
            shown.append((b"X-Request-Id", self.request_id))
        if not self._show_choice:
            return shown
        shown += [
            (b"x-warmroute-replica", replica.name.encode("latin-1")),
            (b"x-warmroute-predicted-tokens", b"%d" % self.prefilled.hit),
        ]
        if self.prefilled is not self.placement:
            shown.append((b"x-warmroute-prefill", self.prefilled.replica.name.encode("latin-1")))
        return shown

    @property
    def prefilled(self) -> Placement:
        """Where the prompt is computed."""
        return self.split.prefill if self.split is not None and self.split.prefill is not None else self.placement

    def by(self, piece: bytes) -> Verdict:
        """What a stream begins with that is held back until its prompt's KV is known to have arrived (a `Hold`)."""
        assert self._opening is not None
        verdict = self._opening.by(piece)
        if verdict is Verdict.ANSWER:
            self._first_token(self)
        return verdict

    def feed(self, piece: bytes) -> None:
        now = self.placement.replica.heard_at = self._clock()
        if self.pace is not None:
            self.pace(now - self._piece_at)
        elif self._streamed and self._begun.by(piece):
            self._streamed = False
            self._first_token(self)
        self._piece_at = now
        if self._watch is not None:
            self._watch.feed(piece)

    def answer(self) -> Answer | None:
        """What the answer said, as far as it has come. A whole one is read once."""
        if self._answer is None and self._watch is not None:
            self._answer = self._watch.answer()
        return self._answer

    def said(self) -> Said | None:
        """What the client has been given; None where that was not watched."""
        return self._watch.said() if isinstance(self._watch, EventWatch) else None
