"""Which connector each prefill replica speaks, and what is known of where it is reached for its KV. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.handoff.content import Content
from router.handoff.doubts import Doubts
from router.handoff.mooncake import Mooncake
from router.handoff.nixl_pull import NixlPull
from router.handoff.nixl_push import NixlPush, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.handoff.connector import Connector, Handed, Origin, Parameters

CONNECTORS: dict[str, Callable[[], Connector]] = {
    "nixl": NixlPull,
    "nixl_push": NixlPush,
    "mooncake": Mooncake,
    "content": Content,
}


class Unsettled:
    """NIXL in a mode that the first answer shows: until then the question serves both."""

    name = "nixl"
    shares_id = False
    once = True

    def __init__(self) -> None:
        self.settled: Connector | None = None

    def ask(self, hand_off: str) -> Parameters | None:
        return NixlPush().ask(hand_off)

    def read(self, answer: Mapping[str, Any]) -> Handed:
        parameters = answer.get("kv_transfer_params")
        pushes = isinstance(parameters, dict) and parameters.get("transfer_mode") == "push"
        connector: Connector = NixlPush() if pushes else NixlPull()
        handed = connector.read(answer)
        self.settled = connector
        return handed

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        return None


class Connectors:
    """One for the fleet. `name`: the setting; "auto" is NIXL, each replica in its own mode."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: dict[str, Connector] = {}
        self._origins: dict[tuple[str, int], Origin] = {}
        self.doubts = Doubts()

    def of(self, replica: str) -> Connector:
        connector = self._known.get(replica)
        if connector is None:
            connector = self._known[replica] = Unsettled() if self.name == "auto" else CONNECTORS[self.name]()
        return connector

    def origin(self, replica: str, rank: int | None) -> Origin | None:
        return self._origins.get((replica, rank or 0))

    def told(self, replica: str, origins: Mapping[int, Origin]) -> None:
        """What a replica's bootstrap server says of its engines, by data-parallel rank."""
        self._origins |= {(replica, rank): origin for rank, origin in origins.items()}

    def handed(self, replica: str, rank: int | None, handed: Handed) -> None:
        """What one of its answers shows, beyond the one request."""
        connector = self._known.get(replica)
        if isinstance(connector, Unsettled) and connector.settled is not None:
            connector = self._known[replica] = connector.settled
        if isinstance(connector, NixlPush) and handed.parameters is not None:
            self._origins[replica, rank or 0] = origin_of(handed.parameters)

    def forget(self, replica: str) -> None:
        """Another process is there now."""
        self._known.pop(replica, None)
        self.doubts.arrived(replica)
        self._origins = {key: origin for key, origin in self._origins.items() if key[0] != replica}
