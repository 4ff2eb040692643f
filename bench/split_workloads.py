"""Traffic for a fleet with roles: four shapes, seeded, at any rate. Pure: same settings and seed, same requests."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from bench.simulation import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_SIZE = 64
# Numbers that name blocks: so many for each conversation, none of which is that long.
ROOM = 1 << 20


@dataclass(frozen=True, slots=True)
class Draw:
    """A log-normal (or, with `bell`, normal) length, within bounds."""

    low: int
    high: int
    mean: float
    bell: bool = False

    def __call__(self, random: Random) -> int:
        if self.bell:
            drawn = random.gauss(self.mean, (self.high - self.low) / 6)
        else:
            # A spread of 0.8 is that of lengths in recorded chats; the bounds cut its tail.
            drawn = random.lognormvariate(math.log(self.mean) - 0.8**2 / 2, 0.8)
        return round(min(self.high, max(self.low, drawn)))


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations are like. Lengths in tokens, `think` in seconds.

    `rate` is what one replica that does all of it takes at the most, in requests a second. `seconds`: how long it takes
    to see what comes of them.
    """

    name: str
    rate: float
    seconds: float
    system: Draw
    input: Draw
    answer: Draw
    turns: Draw = Draw(1, 1, 1)
    think: Draw = Draw(0, 0, 1)
    shared: int = 0
    """Leading tokens that all conversations have."""

    def traffic(self, seed: int, *, rate: float, seconds: float) -> Talks:
        """Conversations that begin within `seconds`, `rate` requests a second once they are all under way."""
        random = Random(f"{seed} {self.name}")
        turns = [self.turns(random) for _ in range(1000)]
        starts = rate / (sum(turns) / len(turns))
        begins, now = [], 0.0
        while (now := now + random.expovariate(starts)) < seconds:
            begins.append(now)
        numbers = itertools.count()
        talks = Talks()
        for number, begin in enumerate(begins):
            calls = list(self._calls(random, number, begin, numbers))
            talks.begin(calls, [float(self.think(random)) for _ in calls])
        return talks

    def _calls(self, random: Random, number: int, begin: float, numbers: Iterator[int]) -> Iterator[Call]:
        prompt = self.shared + self.system(random)
        own = range((number + 1) * ROOM, (number + 2) * ROOM)
        shared = self.shared // BLOCK_SIZE
        for _ in range(self.turns(random)):
            prompt += self.input(random)
            answer = self.answer(random)
            keys = (*range(shared), *own[shared : (prompt + answer) // BLOCK_SIZE])
            yield Call(begin, prompt, answer, keys, session=next(numbers))
            prompt += answer


@dataclass(slots=True)
class Talks:
    """Conversations as a workload: each turn comes after its user has thought about the answer before."""

    _first: list[Call] = field(default_factory=list)
    _next: dict[int, tuple[Call, float]] = field(default_factory=dict)

    def begin(self, calls: list[Call], thinks: list[float]) -> None:
        self._first.append(calls[0])
        for (before, after), think in zip(itertools.pairwise(calls), thinks, strict=False):
            self._next[before.session] = after, think

    def first(self) -> list[Call]:
        return self._first

    def following(self, call: Call, now: float) -> Call | None:
        after = self._next.get(call.session)
        return None if after is None else after[0].moved(now + after[1])


NOTHING = Draw(0, 0, 1)
SHAPES = (
    Shape(
        "interactive chat",
        4.0,
        100,
        Draw(500, 15_000, 4000),
        Draw(10, 1000, 50),
        Draw(10, 1000, 300, bell=True),
        Draw(1, 15, 4),
        Draw(5, 300, 45),
        shared=1000,
    ),
    Shape(
        "code agent",
        0.07,
        600,
        Draw(3000, 100_000, 55_000),
        Draw(100, 10_000, 1500),
        Draw(50, 4000, 800),
        Draw(2, 20, 6),
        Draw(1, 30, 5),
    ),
    Shape("5000/250", 2.0, 240, NOTHING, Draw(5000, 5000, 5000), Draw(250, 250, 250)),
    Shape("10:1 long input", 0.7, 300, NOTHING, Draw(2000, 40_000, 10_000), Draw(200, 4000, 1000)),
)
