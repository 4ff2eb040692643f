"""``/metrics`` as a vLLM server shows it: its engines' series, its HTTP series, its process's."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from fake_backend import buckets
from fake_backend.engine import Engine
from fake_backend.engine_series import LABELS, Families, RankSeries

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
_UNSEEN = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Paths that vLLM leaves out of its HTTP series."""

_TOTALS = (
    ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", "prefix_queries"),
    ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "prefix_hits"),
    (
        "external_prefix_cache_queries",
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried "
        "tokens.",
        "external_queries",
    ),
    (
        "external_prefix_cache_hits",
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached "
        "tokens.",
        "external_hits",
    ),
    ("num_preemptions", "Cumulative number of preemption from the engine.", "preemptions"),
)


class _Process(Collector):
    """The process's own series, with the start time of the server it plays: a played restart is one too."""

    def __init__(self) -> None:
        self._real = ProcessCollector(registry=CollectorRegistry())
        self.started: float | None = None

    def collect(self) -> Iterable[Metric]:
        for family in self._real.collect():
            if self.started is not None and family.name == "process_start_time_seconds":
                family = GaugeMetricFamily(family.name, family.documentation, self.started)
            yield family


class _Totals(Collector):
    """Counters that the engines keep themselves, read when asked for."""

    def __init__(self, model_name: str, engines: list[Engine]) -> None:
        self._model_name = model_name
        self._engines = engines
        self._created = time.time()

    def collect(self) -> Iterable[Metric]:
        for name, text, attribute in _TOTALS:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for rank, engine in enumerate(self._engines):
                value = getattr(engine.scheduler.counters, attribute)
                family.add_metric([self._model_name, str(rank)], value, created=self._created)
            yield family


class LoraSeries(Collector):
    """Which adapters have requests, as comma-separated lists."""

    def __init__(self, max_loras: int, engines: list[Engine]) -> None:
        self._max_loras = max_loras
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        schedulers = [engine.scheduler for engine in self._engines]
        running = {r.lora for scheduler in schedulers for r in scheduler.running if r.lora}
        waiting = {r.lora for scheduler in schedulers for r in (*scheduler.waiting, *scheduler.deferred) if r.lora}
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        family.add_metric([str(self._max_loras), ",".join(sorted(waiting)), ",".join(sorted(running))], time.time())
        yield family


class _Http:
    """The series of prometheus-fastapi-instrumentator, which vLLM mounts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ignored = "Only value of header is respected. Otherwise ignored. No percentile calculated. "
        self._requests = Counter(
            "http_requests_total",
            "Total number of requests by method, status and handler.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._size_in = Summary(
            "http_request_size_bytes",
            f"Content length of incoming requests by handler. {ignored}",
            ("handler",),
            registry=registry,
        )
        self._size_out = Summary(
            "http_response_size_bytes",
            f"Content length of outgoing responses by handler. {ignored}",
            ("handler",),
            registry=registry,
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. ",
            buckets=buckets.HTTP_FINE,
            registry=registry,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. ",
            ("method", "handler"),
            buckets=buckets.HTTP_COARSE,
            registry=registry,
        )

    def observe(self, method: str, handler: str, status: int, sizes: tuple[int, int], seconds: float) -> None:
        """One answered request; ``handler`` is the route, ``none`` where there is no such route."""
        if handler in _UNSEEN:
            return
        size_in, size_out = sizes
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._size_in.labels(handler).observe(size_in)
        self._size_out.labels(handler).observe(size_out)
        self._fine.observe(seconds)
        self._coarse.labels(method, handler).observe(seconds)


class Metrics:
    """All series of one server. ``model_name`` is the first served name, which vLLM labels them with."""

    def __init__(
        self, model_name: str, max_model_len: int, engines: list[Engine], cache_config: dict[str, str]
    ) -> None:
        self._model_name = model_name
        self._engines = engines
        self.registry = registry = CollectorRegistry()
        GCCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.process = _Process()
        registry.register(self.process)
        registry.register(_Totals(model_name, engines))
        families = Families(registry, max_model_len)
        self.ranks = [RankSeries(families, model_name, str(rank)) for rank in range(len(engines))]
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ("model_name", "reason"),
            registry=registry,
        )
        for reason in REJECTIONS:
            self._rejections.labels(model_name, reason)
        info = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            (*cache_config, "engine"),
            registry=registry,
        )
        for rank in range(len(engines)):
            info.labels(*cache_config.values(), str(rank)).set(1)
        self.http = _Http(registry)

    def text(self) -> bytes:
        """The whole exposition."""
        return generate_latest(self.registry)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def sleeping(self, state: str) -> None:
        for rank in self.ranks:
            rank.sleeping(state)
