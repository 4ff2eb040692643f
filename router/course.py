"""What is known of one request while it is on its way, and what may become of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from router.leg import Way
from router.wire.attempts import Ending, Outcome, Patience
from router.wire.http import Headers, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.divided import HandOver
    from router.evidence import Evidence
    from router.fleet.replica import Replica
    from router.reading import Prompt
    from router.resuming import Resumption
    from router.wire.front import Front

# What is answered with these is worth asking another replica: it is down, starting, overloaded or broken.
TRY_ELSEWHERE: Final = frozenset({500, 502, 503, 504})
_NOTHING_YET: Final = Outcome(Ending.UNREACHED)


class Elsewhere(Protocol):
    """Knows who could be asked."""

    def candidates(self, model: str | None, tried: Iterable[str]) -> list[Replica]:
        """Replicas that may be asked next, none of those tried."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a reload may change of how requests are served. `replica_headers`: what each request carries to a replica
    beside the client's own headers."""

    patience: Patience
    max_attempts: int
    show_choice: bool
    resume: bool
    replica_headers: Headers


class Course(Way):
    """One request on its way: what is sent, what was tried, what came of it."""

    __slots__ = (
        "body",
        "client",
        "deadline",
        "doubtful",
        "elsewhere",
        "evidence",
        "given",
        "hand_over",
        "last",
        "prompt",
        "rank",
        "request",
        "resumption",
        "rules",
        "tried",
    )

    def __init__(
        self,
        request: Request,
        client: Front,
        body: bytes,
        prompt: Prompt,
        elsewhere: Elsewhere,
        *,
        deadline: float,
        rules: Rules,
        evidence: Evidence,
        rank: int | None,
        hand_over: HandOver | None,
    ) -> None:
        """`rank`: the data-parallel rank that the client asks for."""
        self.request = request
        self.client = client
        self.body = body
        self.prompt = prompt
        self.elsewhere = elsewhere
        self.deadline = deadline
        self.rules = rules
        self.evidence = evidence
        self.rank = rank
        self.hand_over = hand_over
        self.tried: list[str] = []
        self.given = 0
        """So many replicas were reached, and may have worked on it: those are what is bounded."""
        self.last = _NOTHING_YET
        self.doubtful = False
        """A replica failed over it, which may be the request's own doing."""
        self.resumption: Resumption | None = None
        """Its answer has begun, and shall go on."""

    @property
    def _last_try(self) -> bool:
        return self.given + 1 >= self.rules.max_attempts

    def may_retry(self, status: int) -> bool:
        """Whether an answer of this status is dropped because another replica will be asked."""
        if self._last_try or status not in TRY_ELSEWHERE or (status == 500 and self.doubtful):
            return False
        return bool(self.elsewhere.candidates(self.prompt.ask.model, self.tried))

    def may_move(self) -> bool:
        """Whether a replica that is alive could be asked instead."""
        if self._last_try:
            return False
        others = self.elsewhere.candidates(self.prompt.ask.model, self.tried)
        return any(replica.ready for replica in others)

    def sound(self, replica: Replica) -> None:
        """An answer proves who is to blame for what failed before it: of a split request, on either side."""
        self.evidence.sound(replica)
        if self.hand_over is not None:
            self.hand_over.evidence.sound(replica)
