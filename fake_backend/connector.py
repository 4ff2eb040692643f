"""What the scheduler asks of whatever else holds KV blocks: a CPU tier, or another replica.

The shape follows vLLM's scheduler-side KV connector (distributed/kv_transfer/kv_connector/v1/base.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fake_backend.pool import CacheEvent
from fake_backend.request import Request


@dataclass(frozen=True, slots=True)
class Fetched:
    """A load that was under way has ended."""

    request: Request
    tokens: int
    """Tokens of the prompt that are there now, counted from the first one; fewer than promised if the load failed."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class TierStored:
    """Blocks that another tier holds now."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierRemoved:
    """Blocks that another tier has given up."""

    keys: tuple[int, ...]


TierEvent = TierStored | TierRemoved


class Connector(Protocol):
    """All times are seconds on the engine's clock."""

    def match(self, request: Request, local_tokens: int) -> int:
        """Tokens beyond the ``local_tokens`` found in the pool that could be loaded."""
        ...

    def start(self, request: Request, local_tokens: int, external_tokens: int, now: float) -> None:
        """Blocks for those tokens are allocated; the request waits until :meth:`arrived` names it."""
        ...

    def arrived(self, now: float) -> list[Fetched]:
        """Loads that have ended by ``now``."""
        ...

    def finished(self, request: Request, now: float) -> bool:
        """A request ended, or left. True: its blocks stay referenced until :meth:`released` names them."""
        ...

    def released(self, now: float) -> list[Sequence[int]]:
        """Blocks kept after the end of their request that may go now."""
        ...

    def evicted(self, events: Sequence[CacheEvent], now: float) -> None:
        """What entered and left the pool in the step just scheduled."""
        ...

    def take_events(self) -> list[TierEvent]:
        """What entered and left the other tier since the last call."""
        ...

    def next_event(self) -> float | None:
        """When :meth:`arrived` or :meth:`released` will next have something to say; None if never."""
        ...
