"""By which rule an engine names its blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hashing:
    """What it takes to name a block as an engine does.

    `seed`: its PYTHONHASHSEED, None for vLLM's default. `tagged`: extra keys are written as vLLM >= 0.31 writes them.
    """

    algorithm: str
    seed: str | None = None
    tagged: bool = True
