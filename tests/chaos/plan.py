"""What befalls which replica when: made from a seed alone, so that a run can be made again."""

from __future__ import annotations

import random
from dataclasses import dataclass

EVERY_SECONDS = 3.0
STORE_EVERY_SECONDS = 20.0
MOST_AT_ONCE = 3
# A process that was killed has to start, and a router has to find it ready again.
RECOVERY_SECONDS = 4.0
STORE = -1
# Of those that answer, but with an error, one at a time: a request is given to so many replicas only.
ANSWER_WRONG = ("busy", "broken")

ACTIONS = {
    "kill": 3,  # SIGKILL; started again after a while
    "hang": 3,  # SIGSTOP: the kernel still takes connections for it
    "slow": 2,  # every step takes many times as long
    "restart": 2,  # the cache is lost, the address comes back
    "refuse": 1,  # connections are refused, running answers go on
    "busy": 1,  # some 503
    "broken": 1,  # some 500 from inside the engine
    "cut": 1,  # some answers are cut after a few events
}


@dataclass(frozen=True, slots=True)
class Event:
    """`at` and `seconds` count from the start of the disturbance; `replica` is an index, or STORE."""

    at: float
    action: str
    replica: int
    seconds: float

    def __str__(self) -> str:
        where = "store" if self.replica == STORE else f"replica {self.replica}"
        return f"{self.at:6.1f} s  {self.action:8} {where} for {self.seconds:.1f} s"


def plan(seed: int, seconds: float, replicas: int) -> list[Event]:
    """One event every `EVERY_SECONDS`, never at a replica that still suffers from the last one."""
    rng = random.Random(f"{seed}/plan")
    until = [0.0] * replicas
    wrong_until = 0.0
    events = []
    at = EVERY_SECONDS
    while at < seconds:
        well = [each for each in range(replicas) if until[each] <= at]
        if replicas - len(well) < MOST_AT_ONCE:
            (action,) = rng.choices([*ACTIONS], [*ACTIONS.values()])
            replica, lasts = rng.choice(well), rng.uniform(1.0, 10.0)
            if action in ANSWER_WRONG:
                action = action if at >= wrong_until else "slow"
                wrong_until = max(wrong_until, at + lasts)
            until[replica] = at + lasts + RECOVERY_SECONDS
            events.append(Event(at, action, replica, lasts))
        at += EVERY_SECONDS
    at = STORE_EVERY_SECONDS / 2
    while at < seconds:
        events.append(Event(at, rng.choice(["kill", "hang"]), STORE, rng.uniform(2.0, 8.0)))
        at += STORE_EVERY_SECONDS
    return sorted(events, key=lambda event: event.at)
