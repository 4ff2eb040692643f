"""The metrics of several workers as those of one router. No I/O.

Counters and histograms are added up, those of workers that have ended included: a sum that fell would look like a
restart to Prometheus, and count everything again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Gauges of which each worker has a part of the whole.
ADDED = frozenset(
    {
        "warmroute_in_flight",
        "warmroute_decoding",
        "warmroute_client_connections",
        "warmroute_buffered_bytes",
        "warmroute_shared_queue_blocks",
        "warmroute_shared_untold_pages",
        "warmroute_split_pinned_blocks",
    }
)
# Gauges that are only as good as the worst of them; of all others the greatest counts.
LEAST = frozenset({"warmroute_replica_ready", "warmroute_shared_online"})

_REPLICA = re.compile(r'[{,]replica="([^"]*)"')


@dataclass(slots=True)
class Family:
    """One metric: its comment lines, its kind, and its samples by name and labels as they are written."""

    comments: list[str]
    kind: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        return self.kind in ("counter", "histogram")


Page = dict[str, Family]


def read(page: str) -> Page:
    """A page in Prometheus' text format, by the names of its metrics."""
    families: Page = {}
    family = Family([])
    for line in page.splitlines():
        if line.startswith("#"):
            _, word, name, *rest = line.split(" ", 3)
            known = families.get(name)
            if known is None:
                known = families[name] = Family([])
            family = known
            family.comments.append(line)
            if word == "TYPE":
                family.kind = rest[0]
        elif line:
            sample, _, value = line.rpartition(" ")
            family.samples[sample] = float(value)
    return families


def write(page: Page) -> str:
    lines = []
    for family in page.values():
        if family.samples:
            lines += family.comments
            lines += [f"{sample} {value!r}" for sample, value in family.samples.items()]
    return "\n".join(lines) + "\n"


class Gathered:
    """What the workers told last."""

    def __init__(self) -> None:
        self._last: dict[int, Page] = {}
        self._past: Page = {}

    def heard(self, worker: int, page: str) -> None:
        self._last[worker] = read(page)

    def ended(self, worker: int) -> None:
        """It is no more, and another may begin in its place at zero: what it counted stays."""
        page = self._last.pop(worker, {})
        grown = {name: family for name, family in page.items() if family.grows}
        self._past = _merged([self._past, grown])

    def page(self) -> str:
        here = {name for page in self._last.values() for name in _replicas(page)}
        # A replica that no worker knows any more has left: its series go, also those of workers that have ended.
        for family in self._past.values():
            for sample in [each for each in family.samples if (of := _replica(each)) is not None and of not in here]:
                del family.samples[sample]
        return write(_merged([*self._last.values(), self._past]))


def _merged(pages: list[Page]) -> Page:
    whole: Page = {}
    for page in pages:
        for name, family in page.items():
            into = whole.get(name)
            if into is None:
                into = whole[name] = Family(family.comments, family.kind)
            for sample, value in family.samples.items():
                before = into.samples.get(sample)
                into.samples[sample] = value if before is None else _joined(name, family, before, value)
    return whole


def _joined(name: str, family: Family, one: float, other: float) -> float:
    if family.grows or name in ADDED:
        return one + other
    return min(one, other) if name in LEAST else max(one, other)


def _replica(sample: str) -> str | None:
    found = _REPLICA.search(sample)
    return found[1] if found is not None else None


def _replicas(page: Page) -> set[str]:
    return {of for family in page.values() for sample in family.samples if (of := _replica(sample)) is not None}
