"""What is said of a replica whose events are not heard."""

from __future__ import annotations

import pytest

from router.feeds import _check
from router.fleet.subscription import Source


@pytest.mark.parametrize(
    ("source", "replica", "connected", "said"),
    [
        (Source("tcp://gpu1:5557"), "gpu1:8000", False, '"endpoint": "tcp://*:5557", with the `*`'),
        (
            Source("tcp://127.0.0.1:5557"),
            "gpu1:8000",
            False,
            "tcp://127.0.0.1:5557 is an address within the engine's own",
        ),
        (Source("tcp://gpu1:5557", "tcp://[::1]:5558"), "gpu1:8000", True, "tcp://[::1]:5558 is an address within"),
        (Source("tcp://127.0.0.1:5557"), "127.0.0.1:8000", False, "nobody listens at tcp://127.0.0.1:5557"),
        (Source("tcp://gpu1:5557", "tcp://gpu1:5558"), "gpu1:8000", True, '"tcp://*:5558"'),
        (Source("tcp://*:5557", None, binds=True), "gpu1:8000", False, "no engine connects to tcp://*:5557"),
        (Source("tcp://*:5557", None, binds=True), "gpu1:8000", True, ""),
        (Source("tcp://gpu1:5557"), "gpu1:8000", True, ""),
    ],
)
def test_what_to_check(source: Source, replica: str, connected: bool, said: str) -> None:
    found = _check(source, replica, connected=connected)
    assert (said in found) if said else found == ""
