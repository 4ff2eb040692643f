"""Who holds which block, for one router process. No I/O, no clock: `now` in seconds.

Some replicas publish what they hold: a `Known` for each of their data-parallel ranks. The others are predicted: one
`Residency` each. Both kinds answer the same questions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.index.known import Known
from router.index.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Match:
    """What one replica holds of a chain.

    `depth`: leading blocks. `continues`: an earlier turn ended just there, so that this request goes on with it;
    otherwise it branches off something that others share, or nothing is held. `rank`: which data-parallel rank holds
    them, or would take them best; None where the ranks are not told apart.
    """

    __slots__ = ("continues", "depth", "rank")

    def __init__(self, depth: int, continues: bool, rank: int | None = None) -> None:
        self.depth = depth
        self.continues = continues
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Match):
            return NotImplemented
        return (self.depth, self.continues, self.rank) == (other.depth, other.continues, other.rank)

    def __hash__(self) -> int:
        return hash((self.depth, self.continues, self.rank))

    def __repr__(self) -> str:
        return f"Match({self.depth}, {self.continues}, {self.rank})"


class Index:
    """What each replica holds, by the replica's name."""

    def __init__(self) -> None:
        self._replicas: dict[str, Residency] = {}
        self._known: dict[str, dict[int, Known]] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas or replica in self._known

    def blocks(self, replica: str) -> int:
        """Blocks held or presumed held; 0 for an unknown replica."""
        if replica in self._known:
            return sum(len(known) for known in self._known[replica].values())
        residency = self._replicas.get(replica)
        return len(residency) if residency is not None else 0

    def size(self, replica: str, capacity: int) -> None:
        """A replica's pool, in blocks, each rank's own: known for the first time, or anew."""
        if replica in self._known:
            for known in self._known[replica].values():
                if known.capacity != capacity:
                    known.resize(capacity)
            return
        residency = self._replicas.get(replica)
        if residency is None:
            self._replicas[replica] = Residency(capacity)
        elif residency.capacity != capacity:
            residency.resize(capacity)

    def listen(self, replica: str, ranks: Iterable[int], bound: int) -> dict[int, Known]:
        """A replica's ranks publish what they hold; until that is heard, what was presumed stays. `bound`: see
        `Known`. Raises KeyError for a replica of no size."""
        residency = self._replicas.pop(replica)
        ranks = list(ranks)
        self._known[replica] = {
            # Which rank holds what was presumed cannot be told where there are several.
            rank: self._new_known(residency.capacity, bound, residency if len(ranks) == 1 else None)
            for rank in ranks
        }
        return self._known[replica]

    def _new_known(self, capacity: int, bound: int, presumed: Residency | None) -> Known:
        return Known(capacity, bound, presumed)

    def predict(self, replica: str) -> None:
        """It publishes no more: what it holds is presumed from now on, beginning with nothing."""
        ranks = self._known.pop(replica, None)
        if ranks:
            self._replicas[replica] = Residency(next(iter(ranks.values())).capacity)

    def known(self, replica: str) -> dict[int, Known]:
        """The ranks that publish; empty where none does."""
        return self._known.get(replica, {})

    def capacity(self, replica: str) -> int:
        """Its pool as it is reckoned with, in blocks; 0 for an unknown replica."""
        for known in self._known.get(replica, {}).values():
            return known.capacity
        residency = self._replicas.get(replica)
        return residency.capacity if residency is not None else 0

    def trusted(self, replica: str) -> bool:
        """Whether its events tell all that it holds: nobody else can know better."""
        ranks = self._known.get(replica, {})
        return bool(ranks) and all(known.trusted for known in ranks.values())

    def restart(self, replica: str) -> None:
        """A new process at the same place holds nothing. O(1): the old blocks go as one."""
        residency = self._replicas.get(replica)
        if residency is not None:
            self._replicas[replica] = Residency(residency.capacity)
        for known in self._known.get(replica, {}).values():
            known.restart()

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica, None)
        self._known.pop(replica, None)

    def match(self, replica: str, keys: Sequence[int], now: float = 0.0, rank: int | None = None) -> Match:
        """`rank`: look there alone; the prompts of one request go to one rank."""
        residency = self._replicas.get(replica)
        if residency is None:
            ranks = self._known.get(replica)
            return Match(0, False) if ranks is None else self._match_known(ranks, keys, now, rank)
        depth, ends = residency.match(keys)
        return Match(depth, ends)

    def _match_known(self, ranks: dict[int, Known], keys: Sequence[int], now: float, rank: int | None) -> Match:
        named = len(ranks) > 1
        depth, best, known = -1, 0, None
        for number, each in ranks.items():
            if named and rank is not None and number != rank:
                continue
            deep = each.depth(keys, now) if keys else 0
            # Equally warm: the one that was given less so far.
            if known is None or deep > depth or (deep == depth and each.placed < known.placed):
                depth, best, known = deep, number, each
        if known is None:
            return Match(0, False, rank)
        return Match(depth, depth > 0 and known.ends_a_turn(keys[depth - 1]), best if named else None)

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
        """See `Residency.record`. `prompt_blocks`: how many of an answered request's blocks are its prompt's. `until`:
        when the prefill should be through. `rank`: as `match` gave it."""
        residency = self._replicas.get(replica)
        if residency is not None:
            residency.record(keys, ended=ended, beyond=beyond, partial=partial)
        elif (known := self._rank(self._known.get(replica, {}), rank)) is not None:
            if ended:
                known.answered(keys, prompt_blocks, now, beyond=beyond, partial=partial)
            else:
                known.place(keys, now, until, partial=partial)

    def forget(self, replica: str, keys: Sequence[int], rank: int | None = None) -> None:
        residency = self._replicas.get(replica)
        if residency is not None:
            residency.forget(keys)
        elif (known := self._rank(self._known.get(replica, {}), rank)) is not None:
            known.forget(keys)

    def soon(self, replica: str, keys: Sequence[int], depth: int, rank: int | None) -> int:
        """How deep a chain is there soon, by what was sent from here so short a time ago that the store was not told of
        it, if it is there to `depth`."""
        return depth

    def promised(self, replica: str, keys: Sequence[int], depth: int, soon: int, rank: int | None) -> int:
        """See `Known.promised`."""
        known = self._rank(self._known.get(replica, {}), rank)
        return soon if known is None else known.promised(keys, depth, soon)

    def given(self, replica: str, rank: int | None) -> int:
        """Prompts that were sent to a rank of such a replica so far."""
        return 0

    @staticmethod
    def _rank(ranks: dict[int, Known], rank: int | None) -> Known | None:
        if rank is not None:
            return ranks.get(rank)
        return next(iter(ranks.values())) if len(ranks) == 1 else None
