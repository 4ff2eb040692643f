"""What every way of moving KV has in common, and what is checked of parameters before an engine sees them. Pure.

An engine trusts what a proxy tells it of another's blocks. A wrong or missing word there makes vLLM wait for ever, or
ends its process (v1/engine/core.py asserts on them), so nothing is passed on that was not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

Parameters = dict[str, Any]
"""The `kv_transfer_params` of one request."""

MAX_BLOCKS = 1 << 22
MAX_INT = 1 << 62


class WrongParametersError(ValueError):
    """What a replica handed over cannot be passed on. The message says why, in words."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A replica that computes prompts, as others reach it for its KV. What a connector does not need stays empty."""

    engine_id: str = ""
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1
    bootstrap: str = ""
    """Mooncake's address of it, as a URL."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What one replica hands over to another. `parameters`: None where content alone finds the blocks. `blocks`: how
    many stay pinned until they are fetched; 0 where nothing is pinned, or not known."""

    parameters: Parameters | None
    blocks: int = 0


class Connector(Protocol):
    """How KV gets from the replica that computes a prompt to the one that answers.

    `hand_off` names one hand-over; it is never used twice, and both legs carry it as their request's id where the
    `shares_id` of the connector asks for that.
    """

    name: str
    shares_id: bool
    """The engines find each other's part by the request's id: it must be one that nobody else uses."""
    once: bool
    """What is handed over serves one sequence. A request for several answers stays with one replica."""

    def ask(self, hand_off: str) -> Parameters | None:
        """What the replica that computes the prompt is told."""

    def read(self, answer: Mapping[str, Any]) -> Handed:
        """What its answer (200, JSON) hands over. Raises WrongParametersError."""

    def ahead(self, hand_off: str, origin: Origin | None) -> Handed | None:
        """What the other one is told without waiting for that answer; None where it has to be waited for."""


def text(parameters: Mapping[str, Any], name: str) -> str:
    """A member that has to be text, and not empty."""
    value = parameters.get(name)
    if not isinstance(value, str) or not value:
        raise WrongParametersError(f"{name} is {_shown(value)}, not text")
    return value


def number(parameters: Mapping[str, Any], name: str, low: int, high: int = MAX_INT) -> int:
    """A member that has to be a whole number within bounds."""
    value = parameters.get(name)
    if type(value) is not int or not low <= value <= high:
        raise WrongParametersError(f"{name} is {_shown(value)}, not a whole number from {low} to {high}")
    return value


def flag(parameters: Mapping[str, Any], name: str, wanted: bool) -> None:
    """A member that has to be this."""
    if parameters.get(name) is not wanted:
        raise WrongParametersError(f"{name} is {_shown(parameters.get(name))}, not {str(wanted).lower()}")


def blocks(parameters: Mapping[str, Any], name: str) -> int:
    """A list of block ids, or one for each group of layers; returns how many there are, at least one."""
    value = parameters.get(name)
    if not isinstance(value, list) or not value:
        raise WrongParametersError(f"{name} is {_shown(value)}, not a list of block ids")
    groups = value if all(isinstance(group, list) for group in value) else [value]
    count = sum(map(len, groups))
    if not 0 < count <= MAX_BLOCKS:
        raise WrongParametersError(f"{name} names {count} blocks")
    if not all(type(block) is int and 0 <= block < 1 << 40 for group in groups for block in group):
        raise WrongParametersError(f"{name} holds what is no block id")
    return count


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
