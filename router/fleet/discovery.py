"""Who is in the fleet, and in which role: the replicas that the settings name, now and after each reload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from router.config import parse_url
from router.fleet.replica import Replica, Role, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from router.config import Address
    from router.fleet.replica import Card


class Fleet:
    """The replicas, by name."""

    def __init__(self, urls: Iterable[str], *, prefill: Iterable[str] = (), decode: Iterable[str] = ()) -> None:
        """See `members`."""
        self._replicas: dict[str, Replica] = {}
        self.leaving: list[Replica] = []
        """Those that are given nothing more and still have answers to end."""
        self._seen: set[Role] = set()
        self.divided = False
        """Whether a prompt may be computed by one replica and answered by another."""
        for address, told in members(urls, prefill=prefill, decode=decode).items():
            self.add(address, told)

    def add(self, address: Address, told: Role | None) -> Replica:
        """A replica that is new, or comes back. `told`: the role that settings give it."""
        replica = self._replicas[address.name] = Replica(address.name, address)
        self.leaving = [each for each in self.leaving if each.name != address.name]
        self.tell(replica, told)
        return replica

    def tell(self, replica: Replica, told: Role | None) -> None:
        """Settings give it this role, or none."""
        replica.told, replica.role = told, told or Role.BOTH
        self.settle_roles()

    def remove(self, name: str) -> None:
        """No request goes there any more."""
        replica = self._replicas.pop(name)
        replica.state, replica.why = State.LOST, "it is no longer in the settings"
        self.leaving.append(replica)
        self.settle_roles()

    def drained(self) -> list[Replica]:
        """Those whose last answer has ended; they are gone now."""
        ended = [replica for replica in self.leaving if not replica.load.in_flight]
        self.leaving = [replica for replica in self.leaving if replica.load.in_flight]
        return ended

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    def ready(self) -> list[Replica]:
        return [replica for replica in self if replica.ready]

    @property
    def serves(self) -> bool:
        """Whether there is a replica that may be given requests."""
        return any(replica.usable for replica in self._replicas.values())

    def able(self, model: str | None) -> list[Replica]:
        """Ready replicas for a model, to answer its requests. One that no replica ever named goes to any: the engine
        says what it lacks."""
        able = self._ready_for(model)
        if not able and model is not None:
            model = self._known(model)
            able = self._ready_for(model)
        if self.divided:
            # One that only prefills could answer too, but its batches are to stay free of that while another can.
            able = [replica for replica in able if replica.decodes] or able
        # A replica whose probes time out may only be busy. It is better than no answer at all.
        return able or [replica for replica in self if replica.state is State.SILENT and replica.serves(model)]

    def models(self) -> list[dict[str, Any]] | None:
        """The entry of each model and adapter that is served, as the first of those replicas wrote it that any question
        may go to, or the first of the others; None where any of those can tell of all."""
        able = self.able(None)
        cards: dict[str, Card] = {}
        # The others serve, too, what nobody else does: those that only prefill, and those that may only be busy.
        for replica in [*able, *(replica for replica in self if replica.usable)]:
            cards = {**replica.models, **cards}
        if all(len(replica.models) == len(cards) for replica in able):
            return None
        return [card.entry for card in cards.values()]

    def computing(self, model: str | None) -> list[Replica]:
        """Ready replicas that may compute a prompt for another to answer."""
        model = self._known(model)
        return [replica for replica in self.ready() if replica.prefills and replica.serves(model)]

    def _ready_for(self, model: str | None) -> list[Replica]:
        return [
            replica
            for replica in self._replicas.values()
            if replica.ready and (model is None or model in replica.models)
        ]

    def _known(self, model: str | None) -> str | None:
        if model is not None:
            for replica in self._replicas.values():
                if model in replica.models:
                    return model
        return None

    def settle_roles(self) -> None:
        """Give those that settings give no role the one that they show. A NIXL engine that never fetches produces KV
        for others; one that fetches may do either, unless there are producers, who then do it for it."""
        unsaid = [replica for replica in self if replica.told is None]
        for replica in unsaid:
            replica.role = Role.PREFILL if replica.metrics.hands_over and not replica.metrics.fetches else Role.BOTH
        if any(replica.role is Role.PREFILL for replica in self):
            for replica in unsaid:
                if replica.metrics.fetches:
                    replica.role = Role.DECODE
        self.divided = self._divided()

    def _divided(self) -> bool:
        # Two that do both may hand over to each other, too, if they were given the roles or have the means.
        return any(
            replica.role is not Role.BOTH or replica.told is not None or replica.metrics.fetches for replica in self
        )

    def lacking(self) -> list[str]:
        """Roles that the fleet has and no ready replica fills, a line for each."""
        ready = self.ready()
        lines = []
        for role in _ROLES:
            named = [replica for replica in self if replica.fills(role)]
            if any(replica.fills(role) for replica in ready):
                self._seen.add(role)
            elif self.divided and named:
                lines.append(f"no replica for {role.value} is ready: {', '.join(map(_told, named))}")
        return lines

    def missing(self) -> list[str]:
        """Why requests are not to be sent here yet, a line for each reason; empty where all is well.

        A role counts until it has been there once. One that is lost later is a loss of speed and not of answers: the
        other replicas do all of it.
        """
        lacking = self.lacking()
        if self.ready():
            return lacking if len(self._seen) < len(_ROLES) else []
        return [_told(replica) for replica in self]


def members(
    urls: Iterable[str], *, prefill: Iterable[str] = (), decode: Iterable[str] = ()
) -> dict[Address, Role | None]:
    """The replicas that settings name, with the roles that they give them. `prefill` and `decode` are among `urls` or
    beside them; who is in both has both. Raises ConfigError."""
    found: dict[Address, Role | None] = {parse_url(url): None for url in urls}
    for urls_of, role in ((prefill, Role.PREFILL), (decode, Role.DECODE)):
        for url in urls_of:
            address = parse_url(url)
            found[address] = role if found.get(address) in (None, role) else Role.BOTH
    return found


_ROLES: Final = (Role.PREFILL, Role.DECODE)


def _told(replica: Replica) -> str:
    return f"{replica.name}: {replica.state.value}{f' ({replica.why})' if replica.why else ''}"
