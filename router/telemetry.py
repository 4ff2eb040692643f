"""The router's own metrics, all named `warmroute_*`. Labels are bounded: replicas and a few fixed words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Up to an hour: a long context in a long queue is slow, and a histogram that ends at 10 s hides just that.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
DECISION_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


_CREATED = re.compile(rb"(?:# (?:HELP|TYPE) )?warmroute_\w+_created[ {]")


class ReplicaCounters:
    """One replica's series, looked up once: finding a series by its label costs more than counting."""

    def __init__(self, telemetry: Telemetry, replica: str) -> None:
        self._telemetry = telemetry
        self._replica = replica
        self.prompt_tokens = telemetry.prompt_tokens.labels(replica)
        self.predicted_tokens = telemetry.predicted_tokens.labels(replica)
        self.delivered_tokens = telemetry.delivered_tokens.labels(replica)
        self.completion_tokens = telemetry.completion_tokens.labels(replica)
        self.ttft = telemetry.ttft.labels(replica)
        self._attempts: dict[str, Counter] = {}

    def attempt(self, ending: str) -> None:
        counter = self._attempts.get(ending)
        if counter is None:
            counter = self._attempts[ending] = self._telemetry.attempts.labels(self._replica, ending)
        counter.inc()

    def endings(self) -> list[str]:
        """How attempts there have ended so far."""
        return list(self._attempts)


class Telemetry:
    """Counters and histograms that the journey feeds, and gauges read from the live state when asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replicas: dict[str, ReplicaCounters] = {}
        self._requests: dict[tuple[str, int], Counter] = {}
        self.requests = Counter(
            "warmroute_requests",
            "Requests by how they ended for the client, and the class of the status that it was told.",
            ["ending", "code"],  # ending: complete, refused, broken, left, failed; code: 2xx .. 5xx, none
            registry=self.registry,
        )
        for code in ("2xx", "4xx", "5xx"):
            self.requests.labels("complete", code)
        self.requests.labels("refused", "5xx")
        self.requests.labels("left", "none")
        self.attempts = Counter(
            "warmroute_attempts",
            "Requests sent to a replica, by how that ended.",
            ["replica", "ending"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "warmroute_prompt_tokens",
            "Tokens of the prompts sent, as read by the router.",
            ["replica"],
            registry=self.registry,
        )
        self.predicted_tokens = Counter(
            "warmroute_predicted_cached_tokens",
            "Of these, predicted to be cached.",
            ["replica"],
            registry=self.registry,
        )
        self.delivered_tokens = Counter(
            "warmroute_delivered_cached_tokens",
            "Cached tokens that replicas reported; only engines with --enable-prompt-tokens-details do.",
            ["replica"],
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "warmroute_completion_tokens",
            "Tokens of answers, where replicas told.",
            ["replica"],
            registry=self.registry,
        )
        self.unread = Counter(
            "warmroute_unread_prompts", "Requests routed by load alone, by why.", ["why"], registry=self.registry
        )
        self.ttft = Histogram(
            "warmroute_time_to_first_token_seconds",
            "From the decision to the first byte of a streamed answer's body.",
            ["replica"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "warmroute_request_seconds",
            "From the whole request to the end of its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.decision = Histogram(
            "warmroute_decision_seconds",
            "Reading the prompt, looking it up, choosing and booking.",
            buckets=DECISION_SECONDS,
            registry=self.registry,
        )

        self.splits = Counter(
            "warmroute_split_decisions",
            "Requests that could be split between two replicas, by what was decided.",
            ["decision"],  # split, local
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "warmroute_split_fallbacks",
            "Splits that did not come off, so that the request was answered otherwise, by why.",
            ["reason"],
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "warmroute_split_prefill_seconds",
            "From the decision to split to the answer of the replica that computed the prompt.",
            ["replica"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.fetch_seconds = Histogram(
            "warmroute_split_fetch_seconds",
            "From then to the first token of the replica that fetched the KV: transfer, queue and one step.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.fetched_bytes = Counter(
            "warmroute_split_fetched_bytes",
            "KV that was fetched, by the tokens not yet held and kv_bytes_per_token.",
            ["replica"],
            registry=self.registry,
        )

    def replica(self, name: str) -> ReplicaCounters:
        counters = self._replicas.get(name)
        if counters is None:
            counters = self._replicas[name] = ReplicaCounters(self, name)
        return counters

    def replicas(self) -> set[str]:
        """Those that have series."""
        return set(self._replicas)

    def forget(self, name: str) -> None:
        """A replica has left: its series go."""
        counters = self._replicas.pop(name)
        for ending in counters.endings():
            self.attempts.remove(name, ending)
        for family in (
            self.prompt_tokens,
            self.predicted_tokens,
            self.delivered_tokens,
            self.completion_tokens,
            self.ttft,
        ):
            family.remove(name)

    def request(self, ending: str, status: int) -> None:
        """Count a request. `status`: what the client was told, 0 where it was told none."""
        key = (ending, status // 100)
        counter = self._requests.get(key)
        if counter is None:
            counter = self._requests[key] = self.requests.labels(ending, f"{key[1]}xx" if status else "none")
        counter.inc()

    def gauges(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Register gauges that are computed whenever someone asks: a replica that is gone leaves no series behind."""

        class Live(Collector):
            def collect(self) -> Iterable[Metric]:
                return read()

        self.registry.register(Live())

    def page(self) -> bytes:
        """The page for Prometheus, less the `_created` twin of each series: nobody asks for it, everybody stores it."""
        page = generate_latest(self.registry)
        return b"".join(line for line in page.splitlines(keepends=True) if not _CREATED.match(line))
