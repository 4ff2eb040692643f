"""Whatever an engine answers arrives as it was, errors and streams of every kind included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from exchange import exchange
from record import HTTP

if TYPE_CHECKING:
    from exchange import Answer

OWN = {"/health", "/metrics", "/ready"}  # the router answers these itself
REQUESTS = {name: request for name, request in HTTP.items() if request[1] not in OWN}


def head(answer: Answer) -> list[tuple[str, str]]:
    """Headers, but for those of a connection and those that the router adds."""
    names = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "x-request-id"}
    return sorted(
        (n.lower(), v) for n, v in answer.headers if n.lower() not in names and not n.startswith("x-warmroute-")
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_the_engines(name: str, lasting_router: str, replicas: list[str]) -> None:
    method, path, body = REQUESTS[name]
    if isinstance(body, dict) and "temperature" not in body:
        body = body | {"temperature": 0}
    # What was cached, and which replica it is, shows in the body: any of the four is an engine's answer.
    direct = [exchange(replica, method, path, body) for replica in replicas * 2]
    routed = exchange(lasting_router, method, path, body)
    assert {(a.status, a.reason) for a in direct} == {(routed.status, routed.reason)}
    assert head(routed) in [head(answer) for answer in direct]
    assert events(routed) in [events(answer) for answer in direct]


def events(answer: Answer) -> list[str]:
    """The body in pieces that come in any order where several answers are streamed at once."""
    return sorted(answer.text().split("\n\n"))
