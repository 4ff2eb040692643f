"""Spans of requests, for an OpenTelemetry collector (OTLP over HTTP, in its JSON encoding).

Two kinds of span and one message are all that is needed of the protocol, so it is spoken here: the SDK would bring
threads, locks and a dozen packages onto a request's way. What a collector does not take is dropped after a while, and
never waited for.

Trace context is W3C's (https://www.w3.org/TR/trace-context/): who sends `traceparent` decides whether there is a span;
the replica's own spans become children of the router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.trail import Trail
    from router.wire.front import Front
    from router.wire.http import Request

log = logging.getLogger("warmroute.tracing")

# About 4 MB; a collector that is away for long loses the oldest.
MAX_SPANS = 4096
BATCH = 512
EXPORT_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 30.0
SERVER, CLIENT = 2, 3  # opentelemetry-proto, trace.proto: SpanKind
ERROR = 2  # Status.StatusCode
SAMPLED = 1
# Version ff is forbidden, ids of zeros are invalid; a later version may have more fields.
_CONTEXT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:$|-)")


@dataclass(frozen=True, slots=True)
class Context:
    """Where a request stands in a trace, as its header tells."""

    trace: str
    span: str
    sampled: bool


def read(header: bytes | None) -> Context | None:
    """None for what makes no sense: then a trace begins here."""
    found = _CONTEXT.match(header.strip()) if header is not None else None
    if found is None or (found[1] == b"00" and len(header.strip()) != 55):  # type: ignore[union-attr]
        return None
    return Context(found[2].decode(), found[3].decode(), bool(int(found[4], 16) & SAMPLED))


@dataclass(slots=True)
class Span:
    """A request that is being traced."""

    trace: str
    id: str
    parent: str
    began: float
    """Unix seconds."""


class Tracer:
    """`ratio`: of requests that bring no trace context, so many are traced. `headers`: for the collector."""

    def __init__(
        self, endpoint: str, *, ratio: float, headers: dict[str, str], now: Callable[[], float], version: str
    ) -> None:
        self.dropped = 0
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._ratio = ratio
        self._headers = {**headers, "Content-Type": "application/json"}
        self._now = now
        self._version = version
        self._spans: deque[dict[str, Any]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        self._task = asyncio.create_task(self._export_for_ever())

    async def stop(self) -> None:
        """Tell what is left, once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                while self._spans:
                    await self._export()
            await self._session.close()

    # -- a request ----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Span | None:
        """A span for a request, whose headers name it to the replica; None for one that is not to be traced."""
        given = read(request.header(b"traceparent"))
        if given is not None:
            if not given.sampled:
                return None
        elif self._ratio < 1 and random.random() >= self._ratio:
            return None
        trace = given.trace if given is not None else secrets.token_hex(16)
        span = Span(trace, secrets.token_hex(8), given.span if given is not None else "", self._now())
        # What another vendor said of a trace holds only within it.
        dropped = (b"traceparent",) if given is not None else (b"traceparent", b"tracestate")
        kept = [header for header in request.headers if header[0].lower() not in dropped]
        request.headers = [*kept, (b"traceparent", f"00-{span.trace}-{span.id}-01".encode())]
        return span

    def end(self, span: Span, request: Request, client: Front, trail: Trail) -> None:
        """It is over: tell of it, and of each replica that was asked. Never of prompts, answers or keys."""
        method, path = request.method.decode("latin-1"), request.path[:256]
        attributes: dict[str, str | int | float] = {
            "http.request.method": method,
            "url.path": path,
            "client.address": client.peer,
            "http.response.status_code": trail.status,
            "http.request.body.size": len(request.body),
            "http.response.size": client.sent,
            "warmroute.request_id": request.id[:256].decode("latin-1"),
            "warmroute.ending": trail.ending,
            "warmroute.attempts": len(trail.tried),
        }
        if trail.model is not None:
            attributes["gen_ai.request.model"] = trail.model[:256].encode("utf-8", "replace").decode()
        events = []
        first = trail.first_token_at
        if first is not None:
            attributes["gen_ai.server.time_to_first_token"] = round(first - trail.began, 6)
            events.append({"name": "first token", "timeUnixNano": _nano(span.began + first - trail.began)})
        for place, leg in enumerate(trail.legs):
            last = place + 1 == len(trail.legs)
            ended = trail.ended if last else trail.legs[place + 1].placement.chosen_at
            predicted = leg.prefilled.hit
            told: dict[str, str | int | float] = {
                "server.address": leg.placement.replica.name,
                "warmroute.predicted_cached_tokens": predicted,
                "gen_ai.usage.input_tokens": sum(leg.prompt.tokens),
            }
            if leg.prefilled is not leg.placement:
                told["warmroute.prefill"] = leg.prefilled.replica.name
            if last and (answer := leg.answer()) is not None:
                if answer.cached_tokens is not None:
                    told["warmroute.cached_tokens"] = answer.cached_tokens
                if answer.completion_tokens is not None:
                    told["gen_ai.usage.output_tokens"] = answer.completion_tokens
            failed = not last or trail.ending not in ("complete", "left")
            self._add(
                span.trace,
                secrets.token_hex(8),
                span.id,
                f"ask {leg.placement.replica.name}",
                CLIENT,
                span.began + leg.placement.chosen_at - trail.began,
                span.began + ended - trail.began,
                told,
                failed=failed,
            )
        failed = trail.status >= 500 or trail.ending in ("failed", "broken", "stalled")
        end = span.began + trail.ended - trail.began
        name = f"{method} {path}"
        self._add(
            span.trace, span.id, span.parent, name, SERVER, span.began, end, attributes, failed=failed, events=events
        )

    def _add(
        self,
        trace: str,
        name: str,
        parent: str,
        title: str,
        kind: int,
        began: float,
        ended: float,
        attributes: dict[str, str | int | float],
        *,
        failed: bool,
        events: list[dict[str, Any]] | None = None,
    ) -> None:
        said: dict[str, Any] = {
            "traceId": trace,
            "spanId": name,
            "name": title,
            "kind": kind,
            "startTimeUnixNano": _nano(began),
            "endTimeUnixNano": _nano(ended),
            "attributes": [_attribute(key, value) for key, value in attributes.items()],
            "status": {"code": ERROR} if failed else {},
        }
        if parent:
            said["parentSpanId"] = parent
        if events:
            said["events"] = events
        if len(self._spans) >= MAX_SPANS:
            self._spans.popleft()
            self.dropped += 1
        self._spans.append(said)

    # -- the collector ------------------------------------------------------------------------------------------

    async def _export_for_ever(self) -> None:
        pause = EXPORT_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                while self._spans:
                    await self._export()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not self._failing:
                    self._failing = True
                    log.warning("%s takes no spans: %s", self._url, str(error) or type(error).__name__)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                if self._failing:
                    log.info("%s takes spans again; %d were dropped so far", self._url, self.dropped)
                self._failing = False
                pause = EXPORT_SECONDS

    async def _export(self) -> None:
        """Send one batch. What comes back as wrong is not sent again; what may come to be taken stays."""
        assert self._session is not None
        batch = [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]
        scope = {"scope": {"name": "warmroute", "version": self._version}, "spans": batch}
        resource = {
            "attributes": [_attribute("service.name", "warmroute"), _attribute("service.version", self._version)]
        }
        body = orjson.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as answer:
                await answer.read()
                if answer.status in (429, 502, 503, 504):  # OTLP: worth another try
                    raise OSError(f"it answered {answer.status}")
                if answer.status != 200:
                    self.dropped += len(batch)
                    raise _RefusedError(f"it answered {answer.status}")
        except _RefusedError:
            raise
        except BaseException:
            room = MAX_SPANS - len(self._spans)
            self._spans.extendleft(reversed(batch[-room:] if room else []))
            self.dropped += max(0, len(batch) - room)
            raise


class _RefusedError(OSError):
    """The collector will never take it."""


def _attribute(key: str, value: str | int | float) -> dict[str, Any]:
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": value}}


def _nano(seconds: float) -> str:
    return str(round(seconds * 1e9))
