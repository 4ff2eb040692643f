"""What is kept of a request while its answer lasts."""

from __future__ import annotations

import pytest

from router.wire.http import Headers, Request, request_head

HEADERS: Headers = [
    (b"Host", b"router"),
    (b"X-Empty", b""),
    (b"x-two", b"a: b"),
    (b"x-two", b" c:d "),
    (b"traceparent", b"00-1-2-01"),
]


def request(headers: Headers) -> Request:
    return Request(b"POST", b"/v1/completions?a=b", headers, b"{}", http11=True, keep_alive=True)


@pytest.mark.parametrize("headers", [[], HEADERS[:1], HEADERS], ids=["none", "one", "many"])
def test_a_request_that_is_being_answered_has_the_headers_that_it_had(headers: Headers) -> None:
    kept = request(list(headers))
    head = request_head(kept, 2, b"replica", b"", None)
    for _ in range(2):
        kept.settle()
        assert kept.headers == headers
        assert kept.header(b"traceparent") == (b"00-1-2-01" if headers == HEADERS else None)
        assert request_head(kept, 2, b"replica", b"", None) == head
    assert kept.like(target=b"/").headers == headers


def test_it_may_be_given_others() -> None:
    kept = request(list(HEADERS))
    kept.settle()
    kept.headers = [*kept.headers, (b"x-more", b"1")]
    assert kept.headers == [*HEADERS, (b"x-more", b"1")]
