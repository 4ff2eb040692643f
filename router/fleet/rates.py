"""How fast replicas prefill, learned from the first tokens that came back. No clock.

A prefill of a prompt of n tokens of which h are cached takes about (n - h) * (a + b * (n + h) / 2) ms: linear layers
on every uncached token, attention on all before it. `a` is learned for the fleet, and a slowness for each replica.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

# Attention costs as much as everything else at about this many tokens of context (dense models of 8B to 70B).
ATTENTION_EVEN_TOKENS = 65_536
# Estimates that are too fast let queues build up unseen; too slow ones cost next to nothing. So: fast to believe in
# slowness, slow to believe in speed, and always this much on the slow side.
MARGIN = 1.25
GAIN_SLOWER = 0.1
GAIN_FASTER = 0.03
# Small prefills measure the network and the engine's step, not its rate.
MIN_SAMPLE_TOKENS = 256
SLOWNESS_GAIN = 0.02
# What is likely is a line through the samples: each is forgotten over the next hundred or so, and a few that were never
# measured say what a first token takes beside its prefill, the engine's step under way.
FIT_KEPT = 0.99
STEP_MS = 20.0
STEP_SAMPLES = 5.0
# What is on the slow side is believed to be so by this much at the most.
LEAST_LIKELY = 0.25
SLOWNESS_BOUNDS = (0.4, 3.0)


@dataclass(slots=True)
class Rates:
    """The prefill rate of the fleet, and how each replica differs from it."""

    tokens_per_second: float
    _log_ms: float = 0.0
    _slowness: dict[str, float] = field(default_factory=dict)  # log of observed over predicted
    _typical: float = 0.0
    token_ms: float = 0.0
    """`a`: one uncached token at the start of a prompt, ms."""
    likely: float = 1.0
    """What prefills are likely to take, as a share of `prefill_ms`, which is on the slow side."""
    _fit: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Samples (tokens' worth, ms), decayed: their number, sums, sum of squares and of products."""

    def __post_init__(self) -> None:
        self._log_ms = math.log(1000 / self.tokens_per_second)
        self.token_ms = math.exp(self._log_ms)

    def prefill_ms(self, tokens: int, cached: int) -> float:
        """Time to prefill a prompt of `tokens` of which `cached` lead it in the cache."""
        return (tokens - cached) * self.token_ms * (1 + (tokens + cached) / 2 / ATTENTION_EVEN_TOKENS)

    def slowness(self, replica: str) -> float:
        """A replica's prefill time over the fleet's typical one; 1 where nothing is known."""
        own = self._slowness.get(replica)
        if own is None:
            return 1.0
        low, high = SLOWNESS_BOUNDS
        return min(high, max(low, math.exp(own - self._typical)))

    def observe(self, replica: str, *, tokens: int, cached: int, queued_ms: float, ttft_ms: float) -> None:
        """A first token came `ttft_ms` after the request was sent to a replica that had `queued_ms` before it.

        Only what met no queue tells a rate.
        """
        uncached = tokens - cached
        if uncached < MIN_SAMPLE_TOKENS or ttft_ms <= 0 or queued_ms > 0:
            return  # behind a queue it is the queue's length that is measured
        error = math.log(ttft_ms / self.prefill_ms(tokens, cached))
        before = self._slowness.get(replica)
        if before is None:
            # A newcomer is taken to be like the others until it shows otherwise.
            before = statistics.median(self._slowness.values()) if self._slowness else error
        self._slowness[replica] = before + SLOWNESS_GAIN * (error - before)
        self._typical = statistics.median(self._slowness.values())
        seen = math.log(MARGIN * ttft_ms / uncached / (1 + (tokens + cached) / 2 / ATTENTION_EVEN_TOKENS))
        gain = GAIN_SLOWER if seen > self._log_ms else GAIN_FASTER
        self._log_ms += gain * (seen - self._log_ms)
        self.token_ms = math.exp(self._log_ms)
        self._fit_line(uncached * (1 + (tokens + cached) / 2 / ATTENTION_EVEN_TOKENS), ttft_ms)

    def _fit_line(self, worth: float, ttft_ms: float) -> None:
        """First tokens over the tokens computed for them: the slope is what a token is likely to take."""
        sample = 1.0, worth, ttft_ms, worth * worth, worth * ttft_ms
        self._fit = tuple(old * FIT_KEPT + new for old, new in zip(self._fit, sample, strict=True))
        number, tokens, ms, squares, products = self._fit
        number, ms = number + STEP_SAMPLES, ms + STEP_SAMPLES * STEP_MS
        slope = (number * products - tokens * ms) / (number * squares - tokens * tokens)
        self.likely = min(1.0, max(LEAST_LIKELY, slope / self.token_ms))

    def forget(self, replica: str) -> None:
        self._slowness.pop(replica, None)
        self._typical = statistics.median(self._slowness.values()) if self._slowness else 0.0
