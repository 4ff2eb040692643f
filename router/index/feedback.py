"""What was predicted to be cached, against what the engine says it had. No I/O, no clock.

Two sources tell the truth: `usage.prompt_tokens_details.cached_tokens` of single answers (engines started with
--enable-prompt-tokens-details), and the engine's own counters `vllm:prefix_cache_hits` and `_queries`. A replica whose
predictions stay wrong is routed by guesswork, green as it looks: that must be seen, with the likeliest cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Judge a replica once this many answers have been compared; then each counts for a twentieth.
ENOUGH: Final = 20
GAIN: Final = 0.05
# The mean error, as a share of the prompt, from which routing counts as degraded, and below which it no longer does.
DEGRADED_ERROR: Final = 0.10
HEALED_ERROR: Final = 0.05
# The engine's counters are compared over stretches of at least this many prompt tokens: requests under way when a
# stretch begins or ends are counted on one side only.
STRETCH_TOKENS: Final = 50_000
# A prediction that was too high was evicted: the pool holds less for us than it claims. Shrink quickly, grow slowly.
SHRINK: Final = 0.98
GROW: Final = 1.0005
LEAST_SHARE: Final = 0.25


@dataclass(slots=True)
class Record:
    """One replica's predictions so far. Tokens; errors as shares of the prompt, 0 to 1."""

    compared: int = 0
    exact: int = 0
    predicted: int = 0
    delivered: int = 0
    error: float = 0.0
    """Mean distance of prediction and delivery, the latest counting most."""
    bias: float = 0.0
    """Positive where too much is predicted."""
    length_error: float = 0.0
    """Mean distance of the router's and the engine's token counts of a prompt."""
    reports: bool = False
    """The engine has told cached tokens at least once, so that silence means none."""
    pool_share: float = 1.0
    """The part of the engine's pool that the residency model should count on."""
    placed: int = 0
    """All that was ever predicted for requests sent there."""
    cause: str | None = None
    """Why routing by cache is degraded; None while it is not."""
    stretch: tuple[float, float, int] | None = None
    """Where the running stretch began: the engine's hits and queries, and our predictions."""


@dataclass(frozen=True, slots=True)
class Change:
    """A replica's routing became degraded, for a cause, or healed (None)."""

    replica: str
    cause: str | None


@dataclass(slots=True)
class Feedback:
    """The records of all replicas, by name."""

    records: dict[str, Record] = field(default_factory=dict)

    def of(self, replica: str) -> Record:
        record = self.records.get(replica)
        if record is None:
            record = self.records[replica] = Record()
        return record

    def forget(self, replica: str) -> None:
        """The replica was restarted or has left: what is known of it is about another cache."""
        self.records.pop(replica, None)

    def answered(
        self, replica: str, *, exact: bool, tokens: int, predicted: int, prompt_tokens: int | None, cached: int | None
    ) -> Change | None:
        """Compare one answer. `tokens`, `predicted`: ours; `prompt_tokens`, `cached`: the engine's, as far as told.

        `exact`: the router reads prompts as the model's own tokens. Returns a change of the replica's state, if any.
        """
        record = self.of(replica)
        if cached is not None:
            record.reports = True
        elif not record.reports or prompt_tokens is None:
            return None
        delivered = cached or 0
        total = max(prompt_tokens or tokens, 1)
        record.compared += 1
        record.exact += predicted == delivered
        record.predicted += predicted
        record.delivered += delivered
        gain = max(GAIN, 1 / record.compared)
        record.error += gain * (min(1.0, abs(predicted - delivered) / total) - record.error)
        record.bias += gain * (max(-1.0, min(1.0, (predicted - delivered) / total)) - record.bias)
        if prompt_tokens is not None:
            off = min(1.0, abs(tokens - prompt_tokens) / total)
            record.length_error += gain * (off - record.length_error)
        if predicted > delivered:
            record.pool_share = max(LEAST_SHARE, record.pool_share * SHRINK)
        else:
            record.pool_share = min(1.0, record.pool_share * GROW)
        return self._judge(replica, record, exact=exact)

    def placed(self, replica: str, predicted: int) -> None:
        """A request was sent there, with this prediction."""
        self.of(replica).placed += predicted

    def counted(self, replica: str, *, hits: float | None, queries: float | None, exact: bool) -> Change | None:
        """Compare the engine's counters with the sum of all predictions for it. For engines that tell nothing in their
        answers; requests that others sent there count as errors, as they should."""
        record = self.of(replica)
        predicted = record.placed
        if record.reports or hits is None or queries is None:
            return None
        if record.stretch is None or hits < record.stretch[0]:
            record.stretch = (hits, queries, predicted)
            return None
        asked = queries - record.stretch[1]
        if asked < STRETCH_TOKENS:
            return None
        off = ((predicted - record.stretch[2]) - (hits - record.stretch[0])) / asked
        record.stretch = (hits, queries, predicted)
        record.compared += ENOUGH
        record.error += 0.5 * (min(1.0, abs(off)) - record.error)
        record.bias += 0.5 * (max(-1.0, min(1.0, off)) - record.bias)
        return self._judge(replica, record, exact=exact)

    def _judge(self, replica: str, record: Record, *, exact: bool) -> Change | None:
        if record.compared < ENOUGH:
            return None
        if record.cause is None and record.error > DEGRADED_ERROR:
            record.cause = likely_cause(record, exact=exact)
            return Change(replica, record.cause)
        if record.cause is not None and record.error < HEALED_ERROR:
            record.cause = None
            return Change(replica, None)
        return None


def likely_cause(record: Record, *, exact: bool) -> str:
    """Why predictions are wrong, as far as the numbers tell."""
    if not exact:
        return "no tokenizer: prompts are read as bytes (--tokenizer DIR)"
    if record.length_error > 0.02:
        return "the engine counts other tokens: its tokenizer or chat template is not the one read here (--tokenizer)"
    if record.bias > 0:
        if record.delivered == 0:
            return "the engine never reuses a block: its prefix caching is off, or its hashes are salted"
        return "the engine evicts more than expected: others use it too, or its pool is smaller than it says"
    return "others warm the engine unseen: route all its traffic through here, or turn its KV events on"
