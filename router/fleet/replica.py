"""One replica, as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from router.fleet.breaker import Breaker
from router.fleet.ledger import Load
from router.fleet.scrape import CacheConfig, Metrics
from router.prompt.blocks import ALGORITHMS

if TYPE_CHECKING:
    from router.config import Address
    from router.prompt.hashing import Hashing

# Scraped load older than this says nothing any more.
STALE_SECONDS: Final = 5.0
DEFAULT_BLOCK_SIZE: Final = 16
UNTOLD: Final = CacheConfig()
UNSCRAPED: Final = Metrics()
DEFAULT_ALGORITHM: Final = "sha256"
NO_STRANGERS = ((0, 0), (0, 0))
"""The last two readings of what others have at a replica: running, waiting."""


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
    entry: dict[str, Any] = field(default_factory=dict, compare=False)  # as the replica wrote it


class Replica:
    """`name` is host:port, unique in the fleet."""

    __slots__ = (
        "_metrics",
        "_state",
        "_strangers",
        "address",
        "algorithm",
        "alignment",
        "block_size",
        "breaker",
        "cache",
        "elsewhere",
        "epoch",
        "hashing",
        "heard_at",
        "load",
        "models",
        "name",
        "prefix_caching",
        "ready",
        "role",
        "scraped_at",
        "shunned_until",
        "told",
        "usable",
        "why",
    )

    def __init__(
        self,
        name: str,
        address: Address,
        state: State = State.UNSEEN,
        role: Role = Role.BOTH,
        *,
        metrics: Metrics = UNSCRAPED,
    ) -> None:
        self.name = name
        self.address = address
        self.state = state
        self.role = role
        self.told: Role | None = None
        """The role that settings give it."""
        self.why = ""
        """Why it is not ready, for people."""
        self.models: dict[str, Card] = {}
        self.scraped_at: float | None = None
        self.load = Load()
        self.epoch = 0
        self.breaker = Breaker()
        self.shunned_until = 0.0
        """Until then others are preferred: it gave no answer just now, or said that it is busy."""
        self.hashing: Hashing | None = None
        """How it names its blocks, where its KV events prove that."""
        self.heard_at = 0.0
        """When a byte last came from it, of an answer or a probe: who is heard is not lost, however late its probes
        are."""
        self.elsewhere = 0
        """Requests that other routers have there, as these tell."""
        self._strangers: tuple[tuple[int, int], tuple[int, int]] = NO_STRANGERS
        self.metrics = metrics

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        # Asked for with every request, of every replica.
        self._state = state
        self.ready: bool = state is State.READY
        self.usable: bool = self.ready or state is State.SILENT
        """It may be given requests, if there is nothing better."""

    @property
    def metrics(self) -> Metrics:
        """Its metrics, as last read."""
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Metrics) -> None:
        # What follows from them is asked for with every request, and so is looked up but once.
        self._metrics = metrics
        self.cache: CacheConfig = metrics.cache or UNTOLD
        self.block_size: int = self.cache.block_size or DEFAULT_BLOCK_SIZE
        """Tokens in a hashed block."""
        told = self.cache.algorithm
        self.algorithm: str = told if told is not None and told in ALGORITHMS else DEFAULT_ALGORITHM
        """How its blocks are hashed. One that we cannot compute gets another's keys: they still tell prompts apart."""
        self.alignment: int = self.cache.alignment or self.block_size
        """Its hits end at multiples of so many tokens."""
        self.prefix_caching: bool = self.cache.prefix_caching

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
        self._strangers = NO_STRANGERS
