"""Faults by the clock: a YAML or JSON list of what to do when, for ``--faults``.

- {at: 5, add: {kind: status, status: 503, times: 3}}     # seconds since the start
- {at: 10, clear: true}
- {at: 12, restart: {seconds: 1}}
- {at: 20, refuse: {seconds: 2}}
- {at: 30, gpu: {slowdown: 3}}
- {at: 40, keep_alive: {seconds: 0.05}}
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fake_backend.faults import FaultError, read_rule

if TYPE_CHECKING:
    from fake_backend.server import Server

ACTIONS = ("add", "clear", "restart", "refuse", "gpu", "keep_alive")


@dataclass(frozen=True, slots=True)
class Line:
    """One entry: ``action`` with its ``value``, ``at`` so many seconds after the start."""

    at: float
    action: str
    value: Any


def read(path: Path) -> list[Line]:
    """The script, in order of time. Raises FaultError naming the entry that means nothing."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FaultError(f"--faults {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise FaultError(f"--faults {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(entries, list):
        raise FaultError(f"--faults {path}: a list of entries is needed")
    return sorted((_line(path, number, entry) for number, entry in enumerate(entries)), key=lambda line: line.at)


def _line(path: Path, number: int, entry: object) -> Line:
    place = f"--faults {path}, entry {number + 1}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("at"), int | float):
        raise FaultError(f"{place}: it has no time (at: seconds)")
    actions = [name for name in entry if name != "at"]
    if len(actions) != 1 or actions[0] not in ACTIONS:
        raise FaultError(
            f"{place}: one of {', '.join(ACTIONS)} is needed, got {', '.join(map(str, actions)) or 'none'}"
        )
    (action,) = actions
    value = entry[action]
    if action == "add":
        try:
            read_rule(value)
        except FaultError as error:
            raise FaultError(f"{place}: {error}") from error
    return Line(float(entry["at"]), action, value)


async def play(lines: list[Line], server: "Server", act: Callable[[str, str, Any], object]) -> None:
    """Do each entry at its time; ``act`` takes method, path and value as the control API does."""
    begun = asyncio.get_running_loop().time()
    for line in lines:
        await asyncio.sleep(max(0.0, begun + line.at - asyncio.get_running_loop().time()))
        match line.action:
            case "add":
                server.faults.add(read_rule(line.value))
            case "clear":
                server.faults.clear()
            case name:
                act("POST", f"/fake/{name}", line.value)
