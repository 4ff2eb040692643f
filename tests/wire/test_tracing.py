"""Spans of requests as a collector gets them, and the trace context on its way through."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest

from router.tracing import BATCH, MAX_SPANS, Context, Tracer, read
from tests.wire.conftest import Bench
from tests.wire.scripted import CHAT, STREAM_HEAD, Received, Scripted, answer, chunk, delta, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"a secret prompt"}]}'
STREAM_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a secret prompt"}]}'
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "seen"),
    [
        (f"00-{TRACE}-{PARENT}-01", Context(TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-00", Context(TRACE, PARENT, False)),
        (f" 00-{TRACE}-{PARENT}-03 ", Context(TRACE, PARENT, True)),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", Context(TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE[1:]}-{PARENT}-01", None),
        ("", None),
    ],
)
def test_trace_context_is_read_as_the_standard_has_it(header: str, seen: Context | None) -> None:
    assert read(header.encode()) == seen
    assert read(None) is None


class Collector(Scripted):
    """Takes spans, or answers what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.status = b"200 OK"
        self.script = self._take

    async def _take(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", status=self.status))

    @property
    def spans(self) -> list[dict[str, Any]]:
        found = []
        for request in self.received:
            (resource,) = request.json["resourceSpans"]  # type: ignore[index]
            assert {"key": "service.name", "value": {"stringValue": "warmroute"}} in resource["resource"]["attributes"]
            (scope,) = resource["scopeSpans"]
            found += scope["spans"]
        return found


@pytest.fixture
async def collector() -> Any:
    collector = Collector()
    await collector.start()
    yield collector
    await collector.stop()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


@pytest.mark.fault("identity")
@pytest.mark.fault("identity")
async def test_a_request_and_each_replica_asked_is_a_span(bench: Bench, collector: Collector) -> None:
    async def fails(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", status=b"503 Service Unavailable"))

    async def streams(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if failed:
            writer.write(STREAM_HEAD + chunk(delta("an answer")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            failed.append(request)
            await fails(request, reader, writer)

    failed: list[Received] = []
    replicas = [await bench.replica(streams) for _ in range(2)]
    router = await bench.router(*replicas, otlp_endpoint=collector.url + "/")
    client = await bench.client(router)
    header = f"traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: a=b\r\nAuthorization: Bearer sk-secret\r\n".encode()
    client.post("/v1/chat/completions?hidden", STREAM_BODY, header)
    assert (await client.reply()).status == 200
    await until(lambda: len(collector.spans) == 3, "all spans are told")
    assert collector.received[0].line == b"POST /v1/traces HTTP/1.1"
    assert collector.received[0].header(b"content-type") == b"application/json"
    one, two, whole = collector.spans
    assert (whole["traceId"], whole["parentSpanId"], whole["kind"]) == (TRACE, PARENT, 2)
    assert whole["name"] == "POST /v1/chat/completions"
    assert whole["status"] == {}
    said = attributes(whole)
    assert said["http.response.status_code"] == "200"
    assert (said["gen_ai.request.model"], said["warmroute.attempts"]) == ("m", "2")
    assert [event["name"] for event in whole["events"]] == ["first token"]
    for span in (one, two):
        assert (span["traceId"], span["parentSpanId"], span["kind"]) == (TRACE, whole["spanId"], 3)
        assert int(whole["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(whole["endTimeUnixNano"])
        assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
    assert [span["status"] for span in (one, two)] == [{"code": 2}, {}]
    assert {attributes(span)["server.address"] for span in (one, two)} == {replica.name for replica in replicas}
    # The replicas' own spans are children of the router's.
    for replica in replicas:
        (request,) = replica.received
        assert request.header(b"traceparent") == f"00-{TRACE}-{whole['spanId']}-01".encode()
        assert request.head.lower().count(b"traceparent") == 1
        assert request.header(b"tracestate") == b"a=b"
    text = b"".join(request.body for request in collector.received)
    assert not [word for word in (b"secret", b"hidden", b"an answer") if word in text]


async def test_who_asks_not_to_be_traced_is_not(bench: Bench, collector: Collector) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, otlp_endpoint=collector.url, otlp_sample_ratio=0)
    client = await bench.client(router)
    unsampled = f"00-{TRACE}-{PARENT}-00".encode()
    for header in (b"traceparent: %s\r\n" % unsampled, b""):
        client.post("/v1/chat/completions", BODY, header)
        assert (await client.reply()).body == CHAT
    assert replica.received[0].header(b"traceparent") == unsampled
    assert replica.received[1].header(b"traceparent") is None
    # One that is wrong begins a trace of its own, or none: and what it says of another is not passed on with one.
    client.post("/v1/chat/completions", BODY, f"traceparent: 00-{TRACE}-{PARENT}-01\r\n".encode())
    assert (await client.reply()).body == CHAT
    await until(lambda: len(collector.spans) == 2, "only the last one is told")
    assert {span["traceId"] for span in collector.spans} == {TRACE}


async def test_a_trace_begins_where_there_is_none(bench: Bench, collector: Collector) -> None:
    replica = await bench.replica()
    router = await bench.router(replica, otlp_endpoint=collector.url)
    client = await bench.client(router)
    client.post("/v1/chat/completions", BODY, b"traceparent: nonsense\r\ntracestate: a=b\r\n")
    assert (await client.reply()).body == CHAT
    await until(lambda: len(collector.spans) == 2, "both spans are told")
    whole = collector.spans[-1]
    assert "parentSpanId" not in whole
    assert re.fullmatch("(?!0{32})[0-9a-f]{32}", whole["traceId"])
    sent = replica.received[0]
    assert sent.header(b"traceparent") == f"00-{whole['traceId']}-{whole['spanId']}-01".encode()
    assert sent.header(b"tracestate") is None


async def test_a_collector_that_is_away_costs_old_spans_and_one_line(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute.tracing")
    tracer = Tracer(collector.url, ratio=1, headers={"api-key": "secret"}, now=lambda: 1.0, version="1")
    collector.status = b"503 Service Unavailable"
    for number in range(MAX_SPANS + 5):
        tracer._add(TRACE, f"{number:016x}", "", "x", 2, 1.0, 2.0, {"n": number}, failed=False)
    assert tracer.dropped == 5
    await tracer.start()
    await until(lambda: len(collector.received) == 1, "it was asked once")
    await until(lambda: len(tracer._spans) == MAX_SPANS, "what it would not take is kept")
    collector.status = b"200 OK"
    await until(lambda: len(collector.spans) == BATCH + MAX_SPANS, "all are taken")
    assert [int(span["spanId"], 16) for span in collector.spans[BATCH:]] == list(range(5, MAX_SPANS + 5))
    assert collector.received[0].header(b"api-key") == b"secret"
    await until(lambda: len(caplog.records) == 2, "both changes are told")
    assert [record.getMessage() for record in caplog.records] == [
        f"{collector.url}/v1/traces takes no spans: it answered 503",
        f"{collector.url}/v1/traces takes spans again; 5 were dropped so far",
    ]
    collector.status = b"400 Bad Request"
    tracer._add(TRACE, PARENT, "", "x", 2, 1.0, 2.0, {}, failed=False)
    await until(lambda: tracer.dropped == 6, "what is wrong is not sent again")
    await tracer.stop()


async def test_what_is_left_is_told_at_the_end(collector: Collector) -> None:
    tracer = Tracer(collector.url, ratio=1, headers={}, now=lambda: 1.0, version="1")
    await tracer.start()
    tracer._add(TRACE, PARENT, "", "x", 2, 1.0, 2.5, {"s": "t", "f": 0.5}, failed=False)
    await tracer.stop()
    (span,) = collector.spans
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("1000000000", "2500000000")
    assert json.dumps(span["attributes"]) == json.dumps(
        [{"key": "s", "value": {"stringValue": "t"}}, {"key": "f", "value": {"doubleValue": 0.5}}]
    )
