"""The router's own metrics, all named `warmroute_*`. Labels are bounded: replicas and a few fixed words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import generate_latest

from router.families import Counts, Gauges, Histograms, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from router.series import Count

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# Not Final: mypyc would leave such tuples unset. They are looked up at start alone.

# Up to an hour: a long context in a long queue is slow, and a histogram that ends at 10 s hides just that.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Between two tokens: milliseconds while all is well, and then as the others.
PACE_SECONDS = (0.001, 0.0025, 0.005, *SECONDS[:1], 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, *SECONDS[5:])
DECISION_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


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
        self.pace = telemetry.pace.labels(replica)
        self.upgrades = telemetry.upgrades.labels(replica)
        self._attempts: dict[str, Count] = {}

    def attempt(self, ending: str) -> None:
        counter = self._attempts.get(ending)
        if counter is None:
            counter = self._attempts[ending] = self._telemetry.attempts.labels(self._replica, ending)
        counter.inc()


class Telemetry:
    """Counters and histograms that the journey feeds, and gauges read from the live state when asked."""

    def __init__(self) -> None:
        self.registry = Registry()
        self._replicas: dict[str, ReplicaCounters] = {}
        self._requests: dict[str, dict[int, Count]] = {}
        self._unread: dict[str, Count] = {}
        self.requests = Counts(
            self.registry,
            "warmroute_requests",
            "Requests by how they ended for the client, and the class of the status that it was told.",
            ["ending", "code"],  # ending: complete, refused, broken, stalled, left, failed; code: 2xx .. 5xx, none
        )
        for code in ("2xx", "4xx", "5xx"):
            self.requests.labels("complete", code)
        self.requests.labels("refused", "5xx")
        self.requests.labels("left", "none")
        self.attempts = Counts(
            self.registry,
            "warmroute_attempts",
            "Requests sent to a replica, by how that ended.",
            ["replica", "ending"],
        )
        self.upgrades = Counts(
            self.registry,
            "warmroute_upgraded_connections",
            "Client connections that were joined to a replica's for another protocol (WebSocket).",
            ["replica"],
        )
        self.resumed = Counts(
            self.registry,
            "warmroute_resumed_answers",
            "Streams whose replica broke off, and that another one finished.",
            [],
        ).labels()
        self.unresumed = Counts(
            self.registry,
            "warmroute_unresumed_answers",
            "Streams of text whose replica broke off, and that ended with an error event, by why.",
            ["why"],
        )
        self.prompt_tokens = Counts(
            self.registry,
            "warmroute_prompt_tokens",
            "Tokens of the prompts sent, as read by the router.",
            ["replica"],
        )
        self.predicted_tokens = Counts(
            self.registry,
            "warmroute_predicted_cached_tokens",
            "Of these, predicted to be cached.",
            ["replica"],
        )
        self.delivered_tokens = Counts(
            self.registry,
            "warmroute_delivered_cached_tokens",
            "Cached tokens that replicas reported; only engines with --enable-prompt-tokens-details do.",
            ["replica"],
        )
        self.completion_tokens = Counts(
            self.registry,
            "warmroute_completion_tokens",
            "Tokens of answers, where replicas told.",
            ["replica"],
        )
        self._unread_prompts = Counts(
            self.registry, "warmroute_unread_prompts", "Requests routed by load alone, by why.", ["why"]
        )
        self.ttft = Histograms(
            self.registry,
            "warmroute_time_to_first_token_seconds",
            "From the decision to the first byte of a streamed answer's body.",
            ["replica"],
            SECONDS,
        )
        self.pace = Histograms(
            self.registry,
            "warmroute_inter_token_latency_seconds",
            "Between two pieces of a streamed answer; engines send one for each token, or for those of one step.",
            ["replica"],
            PACE_SECONDS,
        )
        self.received_bytes = Counts(
            self.registry, "warmroute_received_bytes", "Request bodies of clients that went on to replicas.", []
        ).labels()
        self.sent_bytes = Counts(
            self.registry, "warmroute_sent_bytes", "Answers to clients, their heads and framing among them.", []
        ).labels()
        self.duration = Histograms(
            self.registry, "warmroute_request_seconds", "From the whole request to the end of its answer.", [], SECONDS
        ).labels()
        self.decision = Histograms(
            self.registry,
            "warmroute_decision_seconds",
            "Reading the prompt, looking it up, choosing and booking.",
            [],
            DECISION_SECONDS,
        ).labels()
        self.splits = Counts(
            self.registry,
            "warmroute_split_decisions",
            "Requests that could be split between two replicas, by what was decided.",
            ["decision"],  # split, local
        )
        self.fallbacks = Counts(
            self.registry,
            "warmroute_split_fallbacks",
            "Splits that did not come off, so that the request was answered otherwise, by why.",
            ["reason"],
        )
        self.prefill_seconds = Histograms(
            self.registry,
            "warmroute_split_prefill_seconds",
            "From the decision to split to the answer of the replica that computed the prompt.",
            ["replica"],
            SECONDS,
        )
        self.fetch_seconds = Histograms(
            self.registry,
            "warmroute_split_fetch_seconds",
            "From then to the first token of the replica that fetched the KV: transfer, queue and one step.",
            [],
            SECONDS,
        ).labels()
        self.fetched_bytes = Counts(
            self.registry,
            "warmroute_split_fetched_bytes",
            "KV that was fetched, by the tokens not yet held and kv_bytes_per_token.",
            ["replica"],
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
        self._replicas.pop(name)
        self.registry.forget("replica", name)

    def request(self, ending: str, status: int) -> None:
        """Count a request. `status`: what the client was told, 0 where it was told none."""
        counters, code = self._requests.get(ending), status // 100
        if counters is None:
            counters = self._requests[ending] = {}
        counter = counters.get(code)
        if counter is None:
            counter = counters[code] = self.requests.labels(ending, f"{code}xx" if status else "none")
        counter.inc()

    def unread(self, why: str) -> None:
        """Count a request that is routed by load alone."""
        counter = self._unread.get(why)
        if counter is None:
            counter = self._unread[why] = self._unread_prompts.labels(why)
        counter.inc()

    def gauges(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Register gauges that are computed whenever someone asks: a replica that is gone leaves no series behind."""
        Gauges(self.registry, read)

    def page(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)
