"""The mark `fault`, and the page that is made from a run of the tests that have it (tests/faults.py); the mark
`interpreted`."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.wire import front
from tests.faults import NAMES, page

_shown: dict[str, set[str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", metavar="FILE", help="where every test passes, write the page of faults here")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name): shows this fault of tests/faults.py to be absent")
    config.addinivalue_line("markers", "interpreted: derives from, or replaces, what may be compiled (hatch_build.py)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("fault"):
            for name in mark.args:
                if name not in NAMES:
                    raise pytest.UsageError(
                        f"{item.nodeid} names the fault {name!r}, which tests/faults.py does not have"
                    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not front.__file__.endswith(".py") and item.get_closest_marker("interpreted"):
        pytest.skip("the modules are compiled")
    for mark in item.iter_markers("fault"):
        for name in mark.args:
            _shown.setdefault(name, set()).add(item.nodeid.partition("[")[0])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--conformance")
    if path is not None and not exitstatus:
        Path(path).write_text(page(_shown))
