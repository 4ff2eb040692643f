"""Policies by name. Each takes the candidates and gives the index of the one to use, and why, in words. Pure, but for
what a policy remembers itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from router.choose.cost import Candidate, Price, begins_branch, prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.fleet.rates import Rates


class Decision:
    """The chosen candidate's place among those weighed, the reason in words, and all candidates with their prices."""

    __slots__ = ("candidate", "candidates", "chosen", "price", "prices", "reason")

    def __init__(self, chosen: int, reason: str, candidates: list[Candidate], prices: list[Price]) -> None:
        self.chosen = chosen
        self.reason = reason
        self.candidates = candidates
        self.prices = prices
        self.candidate = candidates[chosen]
        self.price = prices[chosen]


class Policy(ABC):
    """How one of the candidates is picked. No protocol: compiled, a method of that would be called by its name."""

    __slots__ = ()

    @abstractmethod
    def pick(self, candidates: list[Candidate], prices: list[Price], *, branch: bool) -> tuple[int, str]:
        """The index of the candidate to use, and why. `branch`: the request begins a new one."""

    def aside(self) -> Policy:
        """One that picks as this one would now, and of whose picks this one remembers nothing."""
        return self


class Cost(Policy):
    """The least cost in milliseconds. Within the tie band: a continuation goes to the warmest, a new branch to the
    replica that was given the least work lately."""

    __slots__ = ("_tie_band_ms",)

    def __init__(self, tie_band_ms: float) -> None:
        self._tie_band_ms = tie_band_ms

    def pick(self, candidates: list[Candidate], prices: list[Price], *, branch: bool) -> tuple[int, str]:
        least = math.inf
        for price in prices:
            least = min(least, price.total_ms)
        bound = least + self._tie_band_ms
        chosen = -1
        for place, price in enumerate(prices):
            if price.total_ms <= bound and (chosen < 0 or _before(candidates[place], candidates[chosen], branch)):
                chosen = place
        if branch:
            return chosen, "least cost for a new branch"
        hit = candidates[chosen].hit
        warmer = any(candidate.hit > hit for candidate in candidates)
        return chosen, "warm elsewhere, but the wait there costs more" if warmer else "warm"


def _before(one: Candidate, other: Candidate, branch: bool) -> bool:
    """Whether the one is to be preferred, of two that cost the same."""
    if branch:
        return one.routed < other.routed or (one.routed == other.routed and one.in_flight < other.in_flight)
    if one.hit != other.hit:
        return one.hit > other.hit
    if one.continues != other.continues:
        return one.continues
    return one.routed < other.routed


class RoundRobin(Policy):
    """Each in turn, by name, whatever it holds."""

    __slots__ = ("_turn",)

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn

    def aside(self) -> Policy:
        return RoundRobin(self._turn)

    def pick(self, candidates: list[Candidate], prices: list[Price], *, branch: bool) -> tuple[int, str]:
        order = sorted(range(len(candidates)), key=lambda i: candidates[i].name)
        turn, self._turn = self._turn, self._turn + 1
        return order[turn % len(order)], "its turn"


class LeastLoad(Policy):
    """The fewest requests in flight; among equals the one that was given the least work lately."""

    __slots__ = ()

    def pick(self, candidates: list[Candidate], prices: list[Price], *, branch: bool) -> tuple[int, str]:
        chosen = min(
            range(len(candidates)), key=lambda i: (candidates[i].in_flight, candidates[i].routed, candidates[i].name)
        )
        return chosen, "fewest in flight"


def policy(name: str, *, tie_band_ms: float) -> Policy:
    """The policy of that name. Raises KeyError for another."""
    policies: dict[str, Callable[[], Policy]] = {
        "cost": lambda: Cost(tie_band_ms),
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
    }
    return policies[name]()


def decide(policy: Policy, candidates: list[Candidate], tokens: list[int], rates: Rates) -> Decision:
    """Price every candidate and let the policy pick. At least one candidate."""
    branch = begins_branch(candidates)
    priced = prices(candidates, tokens, rates, branch=branch)
    chosen, reason = policy.pick(candidates, priced, branch=branch)
    return Decision(chosen, reason, candidates, priced)
