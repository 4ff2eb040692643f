"""Who is in the fleet. For now: the replicas that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.config import parse_url
from router.fleet.replica import Replica, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Fleet:
    """The replicas, by name."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._replicas: dict[str, Replica] = {}
        for url in urls:
            address = parse_url(url)
            name = address.authority + address.base
            self._replicas[name] = Replica(name, address)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    def ready(self) -> list[Replica]:
        return [replica for replica in self if replica.state is State.READY]

    def able(self, model: str | None) -> list[Replica]:
        """Ready replicas for a model. One that no replica ever named goes to any: the engine says what it lacks."""
        if model is not None and not any(model in replica.models for replica in self):
            model = None
        able = [replica for replica in self.ready() if replica.serves(model)]
        # A replica whose probes time out may only be busy. It is better than no answer at all.
        return able or [replica for replica in self if replica.state is State.SILENT and replica.serves(model)]

    def missing(self) -> list[str]:
        """Why there is no ready replica, a line for each; empty where there is one."""
        if self.ready():
            return []
        return [
            f"{replica.name}: {replica.state.value}{f' ({replica.why})' if replica.why else ''}" for replica in self
        ]
