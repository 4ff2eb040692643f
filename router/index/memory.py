"""Who holds which block, for one router process. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.index.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """What one replica holds of a chain.

    `depth`: leading blocks. `continues`: an earlier turn ended just there, so that this request goes on with it;
    otherwise it branches off something that others share, or nothing is held.
    """

    depth: int
    continues: bool


class Index:
    """One `Residency` a replica, by the replica's name."""

    def __init__(self) -> None:
        self._replicas: dict[str, Residency] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def blocks(self, replica: str) -> int:
        """Blocks presumed held; 0 for an unknown replica."""
        residency = self._replicas.get(replica)
        return len(residency) if residency is not None else 0

    def size(self, replica: str, capacity: int) -> None:
        """A replica's pool, in blocks: known for the first time, or anew."""
        residency = self._replicas.get(replica)
        if residency is None:
            self._replicas[replica] = Residency(capacity)
        elif residency.capacity != capacity:
            residency.resize(capacity)

    def restart(self, replica: str) -> None:
        """A new process at the same place holds nothing. O(1): the old blocks go as one."""
        residency = self._replicas.get(replica)
        if residency is not None:
            self._replicas[replica] = Residency(residency.capacity)

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def match(self, replica: str, keys: Sequence[int]) -> Match:
        residency = self._replicas.get(replica)
        if residency is None or not keys:
            return Match(0, False)
        depth = residency.depth(keys)
        return Match(depth, depth > 0 and residency.ends_a_turn(keys[depth - 1]))

    def record(self, replica: str, keys: Sequence[int], *, ended: bool = False) -> None:
        """See `Residency.record`."""
        residency = self._replicas.get(replica)
        if residency is not None:
            residency.record(keys, ended=ended)

    def forget(self, replica: str, keys: Sequence[int]) -> None:
        residency = self._replicas.get(replica)
        if residency is not None:
            residency.forget(keys)
