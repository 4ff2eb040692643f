"""What the router itself says when it cannot pass a replica's answer on. Shaped as OpenAI's and vLLM's errors are."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import orjson


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of the router's own making. `message` says what to do about it."""

    status: int
    kind: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    @property
    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )

    def response(self, *, close: bool, head_only: bool = False, request_id: bytes = b"") -> bytes:
        body = self.body
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.retry_after is not None:
            lines.append(f"Retry-After: {self.retry_after}")
        if self.status == 401:
            lines.append("WWW-Authenticate: Bearer")  # RFC 9110 11.6.1 asks for it
        if request_id:
            lines.append(f"X-Request-Id: {request_id.decode('latin-1')}")
        if close:
            lines.append("Connection: close")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        return head if head_only else head + body

    def event(self) -> bytes:
        """The same as the last event of a stream that had begun: no [DONE] follows, since nothing was done."""
        return b"data: " + self.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class Unauthorized(Refusal):
    """In the words of vLLM's own check of keys, which are not shaped like its other errors."""

    @property
    def body(self) -> bytes:
        return b'{"error":"Unauthorized"}'


def unauthorized() -> Refusal:
    return Unauthorized(401, "AuthenticationError", "Unauthorized")


def bad_request(what: str) -> Refusal:
    return Refusal(400, "BadRequestError", f"The request is not valid HTTP/1.1: {what}.")


def headers_too_large(limit: str, setting: str) -> Refusal:
    return Refusal(431, "BadRequestError", f"The request's headers exceed {limit}; the setting is {setting}.")


def body_too_large(limit: int) -> Refusal:
    return Refusal(
        413,
        "BadRequestError",
        f"The request body is larger than {limit} bytes. Send a smaller one, or raise max_body_bytes "
        "(--max-body-bytes) on the router.",
    )


def too_slow(what: str, seconds: float, setting: str) -> Refusal:
    return Refusal(408, "RequestTimeoutError", f"The request's {what} did not arrive within {seconds:g} s ({setting}).")


def out_of_memory(limit: int) -> Refusal:
    return Refusal(
        503,
        "ServiceUnavailableError",
        f"The router already holds {limit} bytes of request bodies (max_buffered_bytes). Try again shortly.",
        retry_after=1,
    )


def too_many_connections(limit: int) -> Refusal:
    return Refusal(
        503,
        "ServiceUnavailableError",
        f"The router already serves {limit} connections (max_connections). Try again shortly.",
        retry_after=1,
    )


def too_many_from_one(limit: int) -> Refusal:
    return Refusal(
        429,
        "RateLimitError",
        f"Your address already has {limit} connections open (max_connections_per_address). Use fewer at a time.",
        retry_after=1,
    )


def no_connection_left() -> Refusal:
    return Refusal(
        503,
        "ServiceUnavailableError",
        "The router may open no more connections (its limit of open files). Try again shortly.",
        retry_after=1,
    )


def no_replica(why: str, retry_after: int = 1) -> Refusal:
    """`retry_after`: seconds until a replica is asked again."""
    return Refusal(
        503,
        "ServiceUnavailableError",
        f"No replica can take this request: {why}. Try again shortly.",
        retry_after=retry_after,
    )


def unreachable(tried: list[str], why: str) -> Refusal:
    return Refusal(
        502,
        "BadGatewayError",
        f"No replica answered (tried {', '.join(tried)}; the last failure: {why}). The request may be sent again.",
    )


def first_byte_timeout(replica: str, seconds: float) -> Refusal:
    return Refusal(
        504,
        "GatewayTimeoutError",
        f"Replica {replica} sent nothing within {seconds:g} s (first_byte_timeout_seconds).",
    )


def broken_stream(why: str) -> Refusal:
    return Refusal(502, "BadGatewayError", f"The replica broke off its answer: {why}. What came before is incomplete.")


def shutting_down() -> Refusal:
    return Refusal(
        503,
        "ServiceUnavailableError",
        "The router is shutting down, and its time to finish is up (drain_seconds). Try again at another one.",
        retry_after=1,
    )


def cut_stream() -> Refusal:
    return Refusal(
        503,
        "ServiceUnavailableError",
        "The router is shutting down, and its time to finish is up (drain_seconds). What came before is incomplete.",
    )
