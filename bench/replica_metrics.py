"""What a replica says of itself on /metrics, under vLLM's names (vllm v1/metrics/loggers.py)."""

from collections import defaultdict
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

# The pool's size is a label of an info gauge, not a value.
_CACHE_INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """Counts since the replica started; `queries` and `hits` are prompt tokens, `kv_usage` and `hit_rate` 0 to 1."""

    finished: int
    running: int
    waiting: int
    kv_usage: float
    queries: int
    hits: int
    block_size: int
    blocks: int

    @property
    def in_flight(self) -> int:
        return self.running + self.waiting

    @property
    def requests(self) -> int:
        return self.finished + self.in_flight

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


def parse(text: str) -> ReplicaMetrics:
    """Read an exposition; a series that is absent counts as 0. Several engines behind one port are added up."""
    totals: dict[str, float] = defaultdict(float)
    engines = 0
    info: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _CACHE_INFO:
                info = sample.labels
                engines += 1
            else:
                totals[sample.name] += sample.value
    return ReplicaMetrics(
        finished=int(totals["vllm:request_success_total"]),
        running=int(totals["vllm:num_requests_running"]),
        waiting=int(totals["vllm:num_requests_waiting"]),
        kv_usage=totals["vllm:kv_cache_usage_perc"] / max(1, engines),
        queries=int(totals["vllm:prefix_cache_queries_total"]),
        hits=int(totals["vllm:prefix_cache_hits_total"]),
        block_size=int(info.get("block_size", 0)),
        blocks=int(info.get("num_gpu_blocks", 0)),
    )


async def scrape(session: aiohttp.ClientSession, replica: str) -> ReplicaMetrics:
    """Ask `replica` (a base URL); raises aiohttp.ClientError or TimeoutError."""
    async with session.get(f"{replica}/metrics", timeout=aiohttp.ClientTimeout(total=2)) as response:
        response.raise_for_status()
        return parse(await response.text())
