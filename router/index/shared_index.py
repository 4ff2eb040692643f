"""The index of one process that passes on to the other routers what it learns."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from router.index.memory import Index
from router.index.shared_known import ToldKnown
from router.index.soon import present_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from router.index.known import Known
    from router.index.residency import Residency
    from router.index.shared import Shared


class ToldIndex(Index):
    """An `Index`; what is recorded, forgotten or restarted here is told to the shared one too, in the background, and
    so is what engines tell of themselves."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared
        self._pools: dict[str, int] = {}
        self._given: Counter[str] = Counter()

    def size(self, replica: str, capacity: int) -> None:
        super().size(replica, capacity)
        if self._pools.get(replica) != capacity:
            self._pools[replica] = capacity
            self._shared.changed(replica)

    def listen(self, replica: str, ranks: Iterable[int], bound: int) -> dict[int, Known]:
        found = super().listen(replica, ranks, bound)
        for rank, known in found.items():
            assert isinstance(known, ToldKnown)
            self._shared.hear(member(replica, rank if len(found) > 1 else None), known)
        return found

    def predict(self, replica: str) -> None:
        super().predict(replica)
        self._shared.unhear(replica)

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._shared.unhear(replica)
        self._pools.pop(replica, None)
        for each in [each for each in self._given if each.partition("/")[0] == replica]:
            del self._given[each]

    def _new_known(self, capacity: int, bound: int, presumed: Residency | None) -> Known:
        return ToldKnown(capacity, bound, presumed)

    def soon(self, replica: str, keys: Sequence[int], depth: int, rank: int | None) -> int:
        return self._shared.untold(member(replica, rank), keys, depth)

    def given(self, replica: str, rank: int | None) -> int:
        return self._given[member(replica, rank)]

    def record(
        self,
        replica: str,
        keys: Sequence[int],
        *,
        ended: bool = False,
        prompt_blocks: int = 0,
        now: float = 0.0,
        until: float = 0.0,
        rank: int | None = None,
        beyond: int = 0,
        partial: bool = False,
    ) -> None:
        super().record(
            replica,
            keys,
            ended=ended,
            prompt_blocks=prompt_blocks,
            now=now,
            until=until,
            rank=rank,
            beyond=beyond,
            partial=partial,
        )
        pool = self._pools.get(replica)
        if pool is None:
            return
        told = keys if len(keys) <= pool else keys[:pool]
        where = member(replica, rank)
        end = present_until(now, until)
        if not ended and self._shared.is_told(where) and replica in self._replicas:
            self._given[where] += 1
        self._shared.record(
            where, told, ended=ended, prompt_end=(prompt_blocks or len(keys)) - 1, soon_seconds=end - now
        )

    def forget(self, replica: str, keys: Sequence[int], rank: int | None = None) -> None:
        super().forget(replica, keys, rank)
        self._shared.forget(member(replica, rank), keys)


def member(replica: str, rank: int | None) -> str:
    """The name under which the store knows a replica, or one rank of it."""
    return replica if rank is None else f"{replica}/{rank}"
