"""One request at one replica, as the wire sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from router.wire.attempts import Observer
from router.wire.stream import Answer, EventWatch, FirstEvent, JsonWatch, Opening, Said, UsageWatch, Verdict, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.choose.dispatch import Placement, SplitPlacement
    from router.fleet.replica import Replica
    from router.reading import Prompt
    from router.series import Times
    from router.wire.attempts import Attempt
    from router.wire.http import Head, Headers, Request

RANK_HEADER: Final = b"X-data-parallel-rank"


def asked_rank(request: Request) -> int | None:
    """The data-parallel rank that the client asks for (vLLM reads X-data-parallel-rank)."""
    value = request.rank
    return int(value) if value and value.isdigit() and len(value) < 6 else None


class Way(ABC):
    """The request's whole way, as far as a leg of it asks or tells."""

    __slots__ = ()

    @abstractmethod
    def may_retry(self, status: int) -> bool:
        """Whether an answer of this status is dropped because another replica will be asked."""

    @abstractmethod
    def may_move(self) -> bool:
        """Whether a replica that is alive could be asked instead."""

    @abstractmethod
    def sound(self, replica: Replica) -> None:
        """An answer has begun that blames nobody but perhaps the client."""


class Leg(Observer):
    """One request at one replica, as the wire sees it: what to add to its answer, what that says."""

    __slots__ = (
        "_answer",
        "_begun",
        "_first_token",
        "_opening",
        "_piece_at",
        "_rank_given",
        "_show_choice",
        "_watch",
        "attempt",
        "first_token_at",
        "pace",
        "placement",
        "prompt",
        "request_id",
        "resumable",
        "split",
        "tells_its_end",
        "vectors",
        "way",
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
        self.pace: Times | None = None
        """Told the seconds between any two pieces after it."""
        self._piece_at = 0.0
        self.placement = placement
        self.attempt: Attempt | None = None
        """The exchange that gives the client its answer."""
        self.resumable = False
        """Whether its answer may go on elsewhere if it breaks off."""
        self.tells_its_end = False
        """Whether a stream in answer to it says where it ends."""
        self.vectors = False
        """Whether its answer is vectors, and no text."""
        self.way: Way | None = None
        self._first_token = first_token
        self._show_choice = show_choice
        self._watch: Watch | None = None
        self._answer: Answer | None = None
        self._begun: FirstEvent | None = None  # of a stream, until it has
        self._opening = Opening() if split is not None else None

    def added(self) -> Headers | None:
        """Headers for the replica: the rank that was chosen, unless the client itself named one."""
        rank = self.placement.rank
        return None if rank is None or self._rank_given else [(RANK_HEADER, b"%d" % rank)]

    def retries(self, status: int) -> bool:
        return self.way is not None and self.way.may_retry(status)

    def elsewhere(self) -> bool:
        return self.way is not None and self.way.may_move()

    def resumes(self) -> bool:
        return self.resumable

    def whole(self) -> bool:
        return not self.tells_its_end or not isinstance(self._watch, EventWatch) or self._watch.whole

    def answering(self, head: Head, now: float) -> bytes:
        replica = self.placement.replica
        replica.heard_at = now
        if head.status < 500 and self.way is not None:
            self.way.sound(replica)
        stream = head.kind.startswith(b"text/event-stream")
        if stream and head.status == 200 and self.split is None:
            # Where KV has to arrive first, the role alone proves nothing: `by` tells.
            self._begun = FirstEvent()
        if head.status == 200 and self.prompt.ask.kind != "other" and not head.encoded:
            if stream:
                self._watch = EventWatch()
            elif head.kind.startswith(b"application/json"):
                self._watch = UsageWatch() if self.vectors else JsonWatch()
        if self.split is not None:
            # What the engines know it by may be another name.
            head.drop_id()
        shown = b""
        if self.request_id and not head.tells_id:
            shown = b"X-Request-Id: %b\r\n" % self.request_id
        if not self._show_choice:
            return shown
        name, prefilled = replica.name.encode("latin-1"), self.prefilled
        shown = b"%bx-warmroute-replica: %b\r\nx-warmroute-predicted-tokens: %d\r\n" % (shown, name, prefilled.hit)
        if prefilled is self.placement:
            return shown
        return b"%bx-warmroute-prefill: %b\r\n" % (shown, prefilled.replica.name.encode("latin-1"))

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

    def feed(self, piece: bytes, now: float) -> None:
        self.placement.replica.heard_at = now
        if self.pace is not None:
            self.pace.observe(now - self._piece_at)
        elif self._begun is not None and self._begun.by(piece):
            self._begun = None
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
