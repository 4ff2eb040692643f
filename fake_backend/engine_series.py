"""The ``vllm:`` series that one engine's steps feed, as vLLM v1/metrics/loggers.py and stats.py define them."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fake_backend import buckets
from fake_backend.engine import Engine, Outcome
from fake_backend.request import Request, State

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Families:
    """Every metric, without a value yet."""

    def __init__(self, registry: CollectorRegistry, max_model_len: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, (*LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=bounds)

        lengths = buckets.one_two_five(max_model_len)
        mfu = "(for Model Flops Utilization calculations)."
        self.estimated = (
            counter("estimated_flops_per_gpu", f"Estimated number of floating point operations per GPU {mfu}"),
            counter("estimated_read_bytes_per_gpu", f"Estimated number of bytes read from memory per GPU {mfu}"),
            counter("estimated_write_bytes_per_gpu", f"Estimated number of bytes written to memory per GPU {mfu}"),
        )
        self.running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.waiting_by_reason = gauge(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all "
            "reasons equals vllm:num_requests_waiting.",
            "reason",
        )
        self.sleep_state = gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            "sleep_state",
        )
        self.usage = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.multimodal = (
            counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."),
            counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
        )
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.prompt_by_source = counter("prompt_tokens_by_source", "Number of prompt tokens by source.", "source")
        self.prompt_cached = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self.cached_by_source = counter(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to "
            "DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; "
            "sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
            "source",
        )
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.success = counter("request_success", "Count of successfully processed requests.", "finished_reason")
        self.request_prompt = histogram("request_prompt_tokens", "Number of prefill tokens processed.", lengths)
        self.request_generation = histogram(
            "request_generation_tokens", "Number of generation tokens processed.", lengths
        )
        self.iteration = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", buckets.ITERATION
        )
        self.max_generation = histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", lengths
        )
        self.params_n = histogram("request_params_n", "Histogram of the n request parameter.", buckets.PARAMS_N)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", lengths
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", buckets.TTFT
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", buckets.PER_TOKEN
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            buckets.PER_TOKEN,
        )
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", buckets.LATENCY
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", buckets.LATENCY
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", buckets.LATENCY
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", buckets.LATENCY
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", buckets.LATENCY
        )
        self.preemptions = histogram(
            "request_num_preemptions", "Histogram of the number of times a request was preempted.", buckets.PREEMPTIONS
        )
        self.kv_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lengths,
        )


class RankSeries:
    """The series of one data-parallel rank."""

    def __init__(self, families: Families, model_name: str, rank: str) -> None:
        own = (model_name, rank)
        f = families
        for family in (*f.estimated, *f.multimodal):
            family.labels(*own)
        self._running, self._waiting, self._usage = f.running.labels(*own), f.waiting.labels(*own), f.usage.labels(*own)
        self._capacity = f.waiting_by_reason.labels(*own, "capacity")
        self._deferred = f.waiting_by_reason.labels(*own, "deferred")
        self._sleep = {state: f.sleep_state.labels(*own, state) for state in SLEEP_STATES}
        self._prompt_tokens = f.prompt_tokens.labels(*own)
        self._by_source = {source: f.prompt_by_source.labels(*own, source) for source in PROMPT_SOURCES}
        self._cached = f.prompt_cached.labels(*own)
        self._cached_by_source = {source: f.cached_by_source.labels(*own, source) for source in CACHE_SOURCES}
        self._generation = f.generation_tokens.labels(*own)
        self._success = {reason: f.success.labels(*own, reason) for reason in FINISH_REASONS}
        self._request_prompt = f.request_prompt.labels(*own)
        self._request_generation = f.request_generation.labels(*own)
        self._iteration = f.iteration.labels(*own)
        self._max_generation = f.max_generation.labels(*own)
        self._params_n = f.params_n.labels(*own)
        self._params_max = f.params_max_tokens.labels(*own)
        self._first = f.first_token.labels(*own)
        self._inter = f.inter_token.labels(*own)
        self._per_token = f.per_token.labels(*own)
        self._e2e, self._queue = f.end_to_end.labels(*own), f.queue.labels(*own)
        self._inference, self._prefill = f.inference.labels(*own), f.prefill.labels(*own)
        self._decode = f.decode.labels(*own)
        self._preemptions = f.preemptions.labels(*own)
        self._kv_computed = f.kv_computed.labels(*own)
        self._previous: dict[Request, float] = {}
        self.external_source = "p2p"
        """The tier that external hits come from."""
        self.sleeping("awake")

    def sleeping(self, state: str) -> None:
        for name, gauge in self._sleep.items():
            gauge.set(1 if name == state else 0)

    def observe(self, engine: Engine, outcome: Outcome, now: float) -> None:
        """Take in what a step brought. Gauges show what the step left, and keep it while the engine is idle."""
        for request in outcome.advanced:
            before = self._previous.get(request)
            if request.generated == 1 and before is None:
                self._first.observe(now - request.arrival)
                self._prompt(request)
            elif before is not None:
                self._inter.observe(now - before)
            self._previous[request] = now
        if outcome.advanced:
            self._generation.inc(len(outcome.advanced))
            self._iteration.observe(outcome.prompt_tokens + len(outcome.advanced))
        for request in outcome.finished:
            self._previous.pop(request, None)
            self._finished(request, now)
        scheduler = engine.scheduler
        waiting, deferred = len(scheduler.waiting), len(scheduler.deferred)
        self._running.set(len(scheduler.running))
        self._waiting.set(waiting + deferred)
        self._capacity.set(waiting)
        self._deferred.set(deferred)
        self._usage.set(engine.pool.usage)

    def _prompt(self, request: Request) -> None:
        cached = request.cached_tokens or 0
        external = request.external_tokens
        self._prompt_tokens.inc(request.prompt_tokens)
        self._by_source["local_compute"].inc(request.prompt_tokens - cached)
        self._by_source["local_cache_hit"].inc(cached - external)
        self._by_source["external_kv_transfer"].inc(external)
        self._cached.inc(cached)
        self._cached_by_source["device"].inc(cached - external)
        self._cached_by_source[self.external_source].inc(external)

    def _finished(self, request: Request, now: float) -> None:
        assert request.state is State.FINISHED
        self._success[request.finish_reason or "error"].inc()
        self._request_prompt.observe(request.prompt_tokens)
        self._request_generation.observe(request.generated)
        self._max_generation.observe(request.max_tokens)
        self._params_n.observe(1)
        self._params_max.observe(request.max_tokens)
        self._e2e.observe(now - request.arrival)
        scheduled = request.first_scheduled
        self._queue.observe((scheduled if scheduled is not None else now) - request.arrival)
        first, last = request.first_token, request.last_token
        if scheduled is not None and first is not None and last is not None:
            self._inference.observe(last - scheduled)
            self._prefill.observe(first - scheduled)
            self._decode.observe(last - first)
            if request.generated > 1:
                self._per_token.observe((last - first) / (request.generated - 1))
        self._preemptions.observe(request.preemptions)
        self._kv_computed.observe(request.prompt_tokens - (request.cached_tokens or 0))
