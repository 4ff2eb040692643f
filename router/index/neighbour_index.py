"""The index of one worker that tells the others what it learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.memory import Index
from router.index.news import Record
from router.prompt.blocks import bare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.index.neighbours import Neighbours


class NeighbourIndex(Index):
    """An `Index` that tells the neighbours what is recorded and forgotten here. That a replica was restarted, or what
    its engine publishes, each of them hears by itself."""

    def __init__(self, neighbours: Neighbours) -> None:
        super().__init__()
        self._neighbours = neighbours

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
        self._neighbours.tell(Record(replica, bare(keys), rank, ended, prompt_blocks, now, until, beyond, partial))

    def hear(self, record: Record) -> None:
        """What another worker recorded or forgot. It is not told on."""
        replica, keys, rank = record.replica, record.keys, record.rank
        if record.forgotten:
            super().forget(replica, keys, rank)
        else:
            super().record(
                replica,
                keys,
                ended=record.ended,
                prompt_blocks=record.prompt_blocks,
                now=record.now,
                until=record.until,
                rank=rank,
                beyond=record.beyond,
                partial=record.partial,
            )

    def forget(self, replica: str, keys: Sequence[int], rank: int | None = None) -> None:
        super().forget(replica, keys, rank)
        self._neighbours.tell(Record(replica, bare(keys), rank, forgotten=True))
