"""One series of a metric: a number that grows, or a histogram."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Sequence


class Count:
    """One series that only grows. The library's own locks for each increment, and there is one thread that counts."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1) -> None:
        self.value += by


class Times:
    """One histogram of seconds."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        place = 0
        for bound in self._bounds:  # compiled, this is cheaper than to call for a bisection
            if seconds <= bound:
                break
            place += 1
        self.counts[place] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each counts what is no longer than its bound."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(map(float, self.counts)), strict=True))
