from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz.strategies import SEQUENCES

# Seeded and small in `make test`; `make fuzz` sets another number, and then each run tries other sequences.
EXAMPLES = int(os.environ.get("FUZZ_SEQUENCES", "0")) // SEQUENCES
settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

FUZZ = settings.get_profile("fuzz")


class Stagehand:
    """One event loop for all examples. What it or the router logs as an error fails the example."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.failures.append(repr(context)))
        self.failures: list[str] = []

    def run(self, play: Callable[[], Awaitable[Any]]) -> Any:
        self.failures.clear()
        found = self.loop.run_until_complete(asyncio.wait_for(play(), 60))
        assert self.failures == []
        return found


class _Errors(logging.Handler):
    def __init__(self, failures: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        self._failures.append(f"{record.getMessage()} {record.exc_info}")


@pytest.fixture
def stagehand() -> Iterator[Stagehand]:
    hand = Stagehand()
    handler = _Errors(hand.failures)
    logging.getLogger("warmroute").addHandler(handler)
    yield hand
    logging.getLogger("warmroute").removeHandler(handler)
    hand.loop.close()
