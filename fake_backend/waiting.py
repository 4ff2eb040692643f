"""The line before the engine: first come first served, or by priority."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from fake_backend.request import Request


class WaitingLine(Protocol):
    """Requests that have not been admitted, in the order in which they will be tried."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def head(self) -> Request: ...
    def pop(self) -> Request: ...
    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def remove(self, request: Request) -> bool: ...


class FirstComeLine:
    """vLLM's ``fcfs``: who is put back (preempted) comes before all others."""

    def __init__(self) -> None:
        self._line: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def head(self) -> Request:
        return self._line[0]

    def pop(self) -> Request:
        return self._line.popleft()

    def add(self, request: Request) -> None:
        self._line.append(request)

    def put_back(self, request: Request) -> None:
        self._line.appendleft(request)

    def remove(self, request: Request) -> bool:
        try:
            self._line.remove(request)
        except ValueError:
            return False
        return True


def _rank(request: Request) -> tuple[int, float, str]:
    return (request.priority, request.arrival, request.id)


class PriorityLine:
    """vLLM's ``priority``: lower numbers first, then earlier arrivals; a preempted request finds its place again."""

    def __init__(self) -> None:
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def head(self) -> Request:
        return self._line[0]

    def pop(self) -> Request:
        return self._line.pop(0)

    def add(self, request: Request) -> None:
        insort(self._line, request, key=_rank)

    def put_back(self, request: Request) -> None:
        self.add(request)

    def remove(self, request: Request) -> bool:
        try:
            self._line.remove(request)
        except ValueError:
            return False
        return True
