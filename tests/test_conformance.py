"""docs/conformance.md is what the tests say."""

from __future__ import annotations

import pytest

from tests.faults import NAMES, PAGE, UnknownFaultError, marked, page


def test_the_page_is_made_from_the_tests_that_there_are() -> None:
    assert PAGE.read_text() == page(marked()), "run `make conformance`"


def test_a_fault_without_a_test_and_a_test_without_a_fault_are_noticed() -> None:
    whole = {name: ["tests/x.py::test_x"] for name in NAMES}
    assert "| `x.py::test_x` |" in page(whole)
    with pytest.raises(UnknownFaultError, match="no test shows these faults to be absent: HEAD"):
        page({name: tests for name, tests in whole.items() if name != "HEAD"})
    with pytest.raises(UnknownFaultError, match="does not have: nonsense"):
        page({**whole, "nonsense": []})
