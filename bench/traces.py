"""Recorded traffic: files of JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` and
perhaps `session`. `hash_ids` name prefix-chained blocks: equal ids are equal prefixes (the form that Mooncake published
its FAST'25 traces in). Which text they stood for is gone; how it was shared is what is left.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from bench.simulation import Call

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class TraceError(ValueError):
    """A file that is no trace; one line that names the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as a workload. Calls of a session never start before the one before has ended."""

    block_size: int
    calls: tuple[Call, ...]
    """In order of time."""
    _next: dict[int, Call]
    """The call that follows one of a session, by the `session` number of the earlier, which is unique to it."""

    def first(self) -> list[Call]:
        followers = {id(call) for call in self._next.values()}
        return [call for call in self.calls if id(call) not in followers]

    def following(self, call: Call, now: float) -> Call | None:
        after = self._next.get(call.session)
        return after if after is None or after.at >= now else after.moved(now)


def read(lines: Iterable[str], *, seed: int, jitter_s: float = 0.0, speed: float = 1.0) -> Trace:
    """Read a trace. Times become seconds from its start, divided by `speed`, each later by 0 to `jitter_s` seconds
    drawn from `seed` (some traces were recorded in batches). Raises TraceError.
    """
    rows = [_row(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise TraceError("the trace is empty")
    size = _block_size(rows)
    start = min(row["timestamp"] for row in rows)
    random = Random(seed)
    calls: list[Call] = []
    sessions: dict[str, list[Call]] = {}
    for number, row in enumerate(rows):
        prompt, answer = row["input_length"], max(1, row["output_length"])
        named = row["hash_ids"][: prompt // size]
        # What the answer, and the block it begins in, were called is not recorded: names of their own.
        unnamed = range(-1 - number * 10_000, -1 - (number + 1) * 10_000, -1)
        keys = (*named, *unnamed[: (prompt + answer) // size - len(named)])
        at = (row["timestamp"] - start) / 1000 / speed + random.uniform(0.0, jitter_s)
        call = Call(at, prompt, answer, keys, session=number, answer_named=False)
        calls.append(call)
        if isinstance(row.get("session"), str):
            sessions.setdefault(row["session"], []).append(call)
    following = {}
    for talk in sessions.values():
        talk.sort(key=lambda call: call.at)
        following.update({before.session: after for before, after in itertools.pairwise(talk)})
    return Trace(size, tuple(sorted(calls, key=lambda call: call.at)), following)


def _row(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise TraceError(f"line {number} is not JSON") from None
    wanted = {"timestamp": (int, float), "input_length": int, "output_length": int, "hash_ids": list}
    for name, kind in wanted.items():
        if not isinstance(row, dict) or not isinstance(row.get(name), kind):  # type: ignore[arg-type]
            raise TraceError(f"line {number} has no proper `{name}`")
    if row["input_length"] < 1 or row["output_length"] < 0:
        raise TraceError(f"line {number} has a length that cannot be")
    return dict(row)


def _block_size(rows: list[dict[str, Any]]) -> int:
    """The block size that fits all rows: their ids name every block, the last, partial one perhaps among them."""
    for size in BLOCK_SIZES:
        if all(0 <= len(row["hash_ids"]) - row["input_length"] // size <= 1 for row in rows):
            return size
    raise TraceError("the numbers of hash_ids fit no block size from 16 to 1024 tokens")
