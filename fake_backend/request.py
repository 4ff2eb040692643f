"""One sequence inside the engine: how long it is, what its blocks are named, and how far it has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FETCHING = "fetching"
    """Waits for KV blocks from another tier or another replica (vLLM: WAITING_FOR_REMOTE_KVS)."""
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What a front end hands the engine, and what the engine writes on it.

    The engine does not sample. The answer is settled when the request is made: ``answer_tokens`` of them, the end
    marker included, ending for the reason ``ends_with``. ``keys`` names every full block of prompt and answer.
    """

    id: str
    prompt_tokens: int
    answer_tokens: int
    keys: Sequence[int]
    arrival: float = 0.0
    """Seconds on the engine's clock."""
    ends_with: str = "length"
    """``stop``, ``length``, ``repetition`` or ``error``: vLLM's finish reasons."""
    max_tokens: int = 0
    priority: int = 0
    """Lower is earlier; only the priority policy looks at it."""
    lora: str | None = None
    reads_cache: bool = True
    """False for requests that need every prompt position computed (prompt logprobs); they still fill the cache."""
    transfer: object | None = None
    """What a KV connector wants to know of the request; the scheduler passes it on unread."""
    payload: object | None = None
    """The front end's own; the engine never looks at it."""

    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV is there, or will be when the running step ends."""
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading blocks that are under their key in the pool."""
    cached_tokens: int | None = None
    """Prompt tokens found in a cache at first admission; None until then."""
    external_tokens: int = 0
    """Of those, tokens that came from another tier or replica."""
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Prompt and what has been generated so far."""
        return self.prompt_tokens + self.generated

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_tokens + self.generated - 1 or self.generated == 0
