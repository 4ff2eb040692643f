"""One replica, as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from router.fleet.breaker import Breaker
from router.fleet.ledger import Load
from router.fleet.scrape import CacheConfig, Metrics
from router.prompt.blocks import ALGORITHMS

if TYPE_CHECKING:
    from router.config import Address
    from router.prompt.hashing import Hashing

# Scraped load older than this says nothing any more.
STALE_SECONDS = 5.0
DEFAULT_BLOCK_SIZE = 16
UNTOLD = CacheConfig()
DEFAULT_ALGORITHM = "sha256"


class State(Enum):
    """What the probes say. Only READY replicas are given requests."""

    UNSEEN = "not reached yet"
    READY = "ready"
    LOST = "lost"
    SILENT = "silent"  # it takes connections and says nothing: used only where there is nothing better


class Role(Enum):
    """What part of a request a replica may be given. One that decodes also takes whole requests: an engine that loads
    KV from others computes it as well."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Card:
    """One entry of /v1/models."""

    id: str
    root: str | None = None  # the model's directory or repository; an adapter's own path
    parent: str | None = None  # the base model, for an adapter
    max_model_len: int | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """`name` is host:port, unique in the fleet."""

    name: str
    address: Address
    state: State = State.UNSEEN
    role: Role = Role.BOTH
    told: Role | None = None
    """The role that settings give it."""
    why: str = ""
    """Why it is not ready, for people."""
    models: dict[str, Card] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    scraped_at: float | None = None
    load: Load = field(default_factory=Load)
    epoch: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    shunned_until: float = 0.0
    """Until then others are preferred: it gave no answer just now, or said that it is busy."""
    hashing: Hashing | None = None
    """How it names its blocks, where its KV events prove that."""
    heard_at: float = 0.0
    """When a byte last came from it, of an answer or a probe: who is heard is not lost, however late its probes are."""
    elsewhere: int = 0
    """Requests that other routers have there, as these tell."""
    _strangers: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    """The last two readings of what others have there: running, waiting."""

    @property
    def cache(self) -> CacheConfig:
        return self.metrics.cache or UNTOLD

    @property
    def block_size(self) -> int:
        """Tokens in a hashed block."""
        return self.cache.block_size or DEFAULT_BLOCK_SIZE

    @property
    def algorithm(self) -> str:
        """How its blocks are hashed. One that we cannot compute gets another's keys: they still tell prompts apart."""
        told = self.cache.algorithm
        return told if told in ALGORITHMS else DEFAULT_ALGORITHM

    @property
    def alignment(self) -> int:
        """Its hits end at multiples of so many tokens."""
        return self.cache.alignment or self.block_size

    @property
    def prefills(self) -> bool:
        """Whether it may compute a prompt that another decodes."""
        return self.role is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it may answer, be the prompt computed there or elsewhere."""
        return self.role is not Role.PREFILL

    def fills(self, role: Role) -> bool:
        return self.role in (role, Role.BOTH)

    def serves(self, model: str | None) -> bool:
        return model is None or model in self.models

    def scraped(self, metrics: Metrics, now: float) -> None:
        """Take in a reading of /metrics, and compare it with what this router itself has there at this moment."""
        self.metrics, self.scraped_at = metrics, now
        running, waiting = int(metrics.running or 0), int(metrics.waiting or 0)
        surplus = max(0, running + waiting - self.load.in_flight - self.elsewhere)
        strangers_waiting = min(waiting, surplus)
        # The engine's gauges are a step old and its end of a request comes before ours: what is seen once may be one
        # of our own. What is seen twice is somebody else's.
        self._strangers = (self._strangers[1], (surplus - strangers_waiting, strangers_waiting))

    def strangers(self, now: float) -> tuple[int, int]:
        """Requests (running, waiting) at the engine that no router we hear of sent; zeros where its metrics are stale
        or missing."""
        if self.scraped_at is None or now - self.scraped_at > STALE_SECONDS:
            return 0, 0
        (running, waiting), (running_too, waiting_too) = self._strangers
        return min(running, running_too), min(waiting, waiting_too)

    def restarted(self) -> None:
        """Another process answers here now: nothing that was sent to the old one counts for it."""
        self.epoch += 1
        self.load = Load()
        self.breaker = Breaker()
        self._strangers = ((0, 0), (0, 0))
