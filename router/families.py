"""Metrics as the library collects them: all series of one name, and gauges that are read when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from router.series import Count, Times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.core import Metric

S = TypeVar("S", Count, Times)


class Registry(CollectorRegistry):
    """All metrics there are."""

    def __init__(self) -> None:
        super().__init__()
        self.families: list[Family[Any]] = []

    def forget(self, label: str, value: str) -> None:
        """Drop all series that have this value."""
        for family in self.families:
            family.forget(label, value)


class Family(Collector, Generic[S]):
    """All series of one name, by their labels' values."""

    def __init__(self, registry: Registry, name: str, text: str, labels: Sequence[str], make: Callable[[], S]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._make: Callable[[], S] = make
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)
        registry.families.append(self)

    def labels(self, *values: str) -> S:
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._make()
        return series

    def forget(self, label: str, value: str) -> None:
        """Drop all series that have this value."""
        if label in self._labels:
            place = self._labels.index(label)
            for values in [values for values in self._series if values[place] == value]:
                del self._series[values]


class Counts(Family[Count]):
    def __init__(self, registry: Registry, name: str, text: str, labels: Sequence[str]) -> None:
        super().__init__(registry, name, text, labels, Count)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        yield family


class Histograms(Family[Times]):
    def __init__(
        self, registry: Registry, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(registry, name, text, labels, lambda: Times(bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.buckets(), series.total)
        yield family


class Gauges(Collector):
    """Gauges that are computed whenever someone asks."""

    def __init__(self, registry: Registry, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._read()
