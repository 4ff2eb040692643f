"""Who serves: what a replica needs to be asked and used is made when it joins, and taken down when it leaves.

One that leaves is given nothing more at once; its connections and metrics stay until its last answer has ended.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.fleet.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.config import Address
    from router.feeds import Feeds
    from router.fleet.discovery import Fleet
    from router.fleet.links import Links
    from router.fleet.rates import Rates
    from router.fleet.replica import Replica, Role
    from router.handoff.connectors import Connectors
    from router.index.feedback import Feedback
    from router.index.memory import Index
    from router.index.shared import Shared
    from router.telemetry import Telemetry
    from router.wire.upstream import Pool

log = logging.getLogger("warmroute.fleet")

# Those that leave serve on for at most so long while those that come are asked for the first time.
JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A replica's probes: the first round, and those for ever after."""

    probe: Probe
    first: asyncio.Task[None]
    later: asyncio.Task[None]


class Roster:
    """Joins replicas to a running router and lets them go."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: Index,
        pools: dict[str, Pool],
        feeds: Feeds,
        feedback: Feedback,
        rates: Rates,
        telemetry: Telemetry,
        shared: Shared | None,
        connectors: Connectors,
        links: Links,
        blocks: int,
        pool: Callable[[Address], Pool],
        probe: Callable[[Replica], Probe],
    ) -> None:
        """`blocks`: what a replica is assumed to hold until it tells."""
        self._fleet = fleet
        self._index = index
        self._pools = pools
        self._feeds = feeds
        self._feedback = feedback
        self._rates = rates
        self._telemetry = telemetry
        self._shared = shared
        self._connectors = connectors
        self._links = links
        self._blocks = blocks
        self._pool = pool
        self._probe = probe
        self._asked: dict[str, Asked] = {}

    def begin(self, replica: Replica) -> asyncio.Task[None]:
        """Ask a replica of the fleet from now on, for ever. Returns the first round, that says whether it is ready."""
        self._index.size(replica.name, self._blocks)
        self._pools[replica.name] = self._pool(replica.address)
        probe = self._probe(replica)
        first = asyncio.create_task(probe.once())
        self._asked[replica.name] = Asked(probe, first, asyncio.create_task(probe.run(first)))
        return first

    async def become(self, wanted: Mapping[Address, Role | None]) -> tuple[list[str], list[str]]:
        """Make the fleet these replicas, in these roles. Returns who came and who went."""
        there = [replica.address for replica in self._fleet]
        gone, come = [each for each in there if each not in wanted], [each for each in wanted if each not in there]
        names = {address.name for address in come}
        for address in gone:
            if address.name in names:
                await self._leave(address.name)
        rounds = [self.begin(self._fleet.add(address, wanted[address])) for address in come]
        if rounds and gone:
            # Where all are replaced, somebody has to serve until the first of the new ones is ready.
            await asyncio.wait(rounds, timeout=JOIN_SECONDS)
        for address in gone:
            if address.name not in names:
                await self._leave(address.name)
        for replica in self._fleet:
            self._fleet.tell(replica, wanted[replica.address])
        self.sweep()
        return [each.name for each in come], [each.name for each in gone]

    async def _leave(self, name: str) -> None:
        self._fleet.remove(name)
        await _cancel(self._asked.pop(name))
        await self._feeds.detach(name)
        self._index.remove(name)
        self._rates.forget(name)
        self._connectors.forget(name)
        self._links.forget(name)
        if self._shared is not None:
            self._shared.left(name)

    def sweep(self) -> None:
        """Forget who has left and has nothing more to end."""
        for replica in self._fleet.drained():
            log.info("%s has left: its last answer has ended", replica.name)
            self._rates.forget(replica.name)
        kept = {replica.name for replica in (*self._fleet, *self._fleet.leaving)}
        for name in self._pools.keys() - kept:
            self._pools.pop(name).close_idle(older_than=0.0)
        for name in self._telemetry.replicas() - kept:
            self._telemetry.forget(name)
        for name in self._feedback.records.keys() - kept:
            self._feedback.forget(name)

    async def close(self) -> None:
        await _cancel(*self._asked.values())


async def _cancel(*asked: Asked) -> None:
    tasks = [task for each in asked for task in (each.first, each.later)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
