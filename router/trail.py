"""What is gathered of one request on its way, for those who tell of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.leg import Leg


@dataclass(slots=True)
class Trail:
    """What is known of one request when it is over, beside what the wire knows."""

    model: str | None = None
    stream: bool = False
    tried: list[str] = field(default_factory=list)
    """Replicas that were asked, in order."""
    legs: list[Leg] = field(default_factory=list)
    """What was begun there; the last one is who answered."""
    began: float = 0.0
    """When it had come whole, by the loop's clock."""
    ended: float = 0.0
    ending: str = ""
    status: int = 0
    """What the client was told; 0 where it was told none."""

    @property
    def first_token_at(self) -> float | None:
        """When the first token of a stream came; of one that another replica went on with, at the first."""
        return next((leg.first_token_at for leg in self.legs if leg.first_token_at is not None), None)
