"""How fast replicas prefill, learned from the first tokens that came back. No clock.

A prefill of a prompt of n tokens of which h are cached takes about (n - h) * (a + b * (n + h) / 2) ms: linear layers
on every uncached token, attention on all before it. `a` is learned for the fleet, and a slowness for each replica.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

# Attention costs as much as everything else at about this many tokens of context (dense models of 8B to 70B).
ATTENTION_EVEN_TOKENS: Final = 65_536
# Estimates that are too fast let queues build up unseen; too slow ones cost next to nothing. So: fast to believe in
# slowness, slow to believe in speed, and always this much on the slow side.
MARGIN: Final = 1.25
GAIN_SLOWER: Final = 0.1
GAIN_FASTER: Final = 0.03
# Small prefills measure the network and the engine's step, not its rate.
MIN_SAMPLE_TOKENS: Final = 256
SLOWNESS_GAIN: Final = 0.02
# What is likely is a line through the samples: each is forgotten over the next hundred or so, and a few that were never
# measured say what a first token takes beside its prefill, the engine's step under way.
FIT_KEPT: Final = 0.99
STEP_MS: Final = 20.0
STEP_SAMPLES: Final = 5.0
# What is on the slow side is believed to be so by this much at the most.
LEAST_LIKELY: Final = 0.25
SLOWNESS_BOUNDS: Final[tuple[float, ...]] = (0.4, 3.0)


class Rates:
    """The prefill rate of the fleet, and how each replica differs from it."""

    def __init__(self, tokens_per_second: float) -> None:
        self._log_ms = math.log(1000 / tokens_per_second)
        self.token_ms = math.exp(self._log_ms)
        """`a`: one uncached token at the start of a prompt, ms."""
        self.likely = 1.0
        """What prefills are likely to take, as a share of `prefill_ms`, which is on the slow side."""
        self._slowness: dict[str, float] = {}  # log of observed over predicted
        self._factors: dict[str, float] = {}  # over what is typical, and within bounds
        # Samples (tokens' worth, ms), decayed: their number, sums, sum of squares and of products.
        self._fit: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def prefill_ms(self, tokens: int, cached: int) -> float:
        """Time to prefill a prompt of `tokens` of which `cached` lead it in the cache."""
        return (tokens - cached) * self.token_ms * (1 + (tokens + cached) / 2 / ATTENTION_EVEN_TOKENS)

    def prefills_ms(self, tokens: list[int], cached: tuple[int, ...]) -> float:
        """The same for several prompts together. Raises ValueError where there is not a `cached` for each."""
        if len(tokens) == len(cached) == 1:
            return self.prefill_ms(tokens[0], cached[0])
        return math.fsum(self.prefill_ms(each, held) for each, held in zip(tokens, cached, strict=True))

    def slowness(self, replica: str) -> float:
        """A replica's prefill time over the fleet's typical one; 1 where nothing is known."""
        factor = self._factors.get(replica)
        return 1.0 if factor is None else factor

    def _compare(self) -> None:
        """After what is known of a replica has changed."""
        typical = statistics.median(self._slowness.values()) if self._slowness else 0.0
        low, high = SLOWNESS_BOUNDS
        self._factors = {name: min(high, max(low, math.exp(own - typical))) for name, own in self._slowness.items()}

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
        self._compare()
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
        self._compare()
