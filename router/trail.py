"""What is gathered of one request on its way, for those who tell of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.leg import Leg


class Trail:
    """What is known of one request when it is over, beside what the wire knows."""

    __slots__ = ("began", "ended", "ending", "legs", "model", "status", "stream", "tried")

    def __init__(self, legs: list[Leg], began: float, ended: float, ending: str, status: int) -> None:
        self.legs = legs
        """What was begun at replicas; the last one is who answered."""
        self.began = began
        """When it had come whole, by the loop's clock."""
        self.ended = ended
        self.ending = ending
        self.status = status
        """What the client was told; 0 where it was told none."""
        self.model: str | None = None
        self.stream = False
        self.tried: list[str] = []
        """Replicas that were asked, in order."""

    @property
    def first_token_at(self) -> float | None:
        """When the first token of a stream came; of one that another replica went on with, at the first."""
        return next((leg.first_token_at for leg in self.legs if leg.first_token_at is not None), None)
