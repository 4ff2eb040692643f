"""What is known of one request while it is on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.wire.attempts import Ending, Outcome, Patience
from router.wire.http import Headers, Request

if TYPE_CHECKING:
    from router.divided import HandOver
    from router.evidence import Evidence
    from router.reading import Prompt
    from router.resuming import Resumption
    from router.wire.front import Front

_NOTHING_YET = Outcome(Ending.UNREACHED)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a reload may change of how requests are served. `replica_headers`: what each request carries to a replica
    beside the client's own headers."""

    patience: Patience
    max_attempts: int
    show_choice: bool
    resume: bool
    replica_headers: Headers


class Course:
    """One request on its way: what is sent, what was tried, what came of it."""

    __slots__ = (
        "body",
        "client",
        "deadline",
        "doubtful",
        "evidence",
        "given",
        "hand_over",
        "last",
        "prompt",
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
        *,
        deadline: float,
        rules: Rules,
        evidence: Evidence,
        hand_over: HandOver | None,
    ) -> None:
        self.request = request
        self.client = client
        self.body = body
        self.prompt = prompt
        self.deadline = deadline
        self.rules = rules
        self.evidence = evidence
        self.hand_over = hand_over
        self.tried: list[str] = []
        self.given = 0
        """So many replicas were reached, and may have worked on it: those are what is bounded."""
        self.last = _NOTHING_YET
        self.doubtful = False
        """A replica failed over it, which may be the request's own doing."""
        self.resumption: Resumption | None = None
        """Its answer has begun, and shall go on."""
