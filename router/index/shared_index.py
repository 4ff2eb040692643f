"""The index of one process that passes on to the other routers what it learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.memory import Index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.index.shared import Shared


class ToldIndex(Index):
    """An `Index`; what is recorded, forgotten or restarted here is told to the shared one too, in the background."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared
        self._pools: dict[str, int] = {}

    def size(self, replica: str, capacity: int) -> None:
        super().size(replica, capacity)
        if self._pools.get(replica) != capacity:
            self._pools[replica] = capacity
            self._shared.sized(replica)

    def remove(self, replica: str) -> None:
        super().remove(replica)
        self._pools.pop(replica, None)

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
        if pool is not None:
            told = keys if len(keys) <= pool else keys[:pool]
            self._shared.record(replica, told, ended=ended, prompt_end=(prompt_blocks or len(keys)) - 1)

    def forget(self, replica: str, keys: Sequence[int], rank: int | None = None) -> None:
        super().forget(replica, keys, rank)
        self._shared.forget(replica, keys)
