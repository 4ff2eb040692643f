"""What is kept of a request while its answer lasts."""

from __future__ import annotations

import pytest

from router.wire.http import Headers, Request, crossing, request_head

HEADERS: Headers = [
    (b"Host", b"router"),
    (b"X-Empty", b""),
    (b"x-two", b"a: b"),
    (b"x-two", b" c:d "),
    (b"traceparent", b"00-1-2-01"),
]


def request(headers: Headers) -> Request:
    path = "/v1/completions"
    return Request(b"POST", b"/v1/completions?a=b", path, crossing(headers), b"{}", http11=True, keep_alive=True)


@pytest.mark.parametrize("headers", [[], HEADERS[:1], HEADERS], ids=["none", "one", "many"])
def test_a_request_that_is_being_answered_has_the_headers_that_may_cross(headers: Headers) -> None:
    kept = request(list(headers))
    assert kept.headers == headers[1:]
    assert kept.header(b"traceparent") == (b"00-1-2-01" if headers == HEADERS else None)
    assert kept.like(body=b"[]").headers == headers[1:]
    head = request_head(kept, 2, b"replica", b"", None)
    assert head.startswith(b"POST /v1/completions?a=b HTTP/1.1\r\nHost: replica\r\n")


def test_it_may_be_given_others() -> None:
    kept = request(list(HEADERS))
    kept.headers = [*kept.headers, (b"x-more", b"1")]
    kept.add([(b"x-most", b" 2")])
    assert kept.headers == [*HEADERS[1:], (b"x-more", b"1"), (b"x-most", b" 2")]
