"""A replica's /metrics, read for what routing needs. Pure; a general parser takes a hundred times as long."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_VALUE = 1e15
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The labels of `vllm:cache_config_info`. Sizes in tokens and blocks; None where the engine does not say.

    `block_size` is that of hashed blocks. A hybrid model's pool is counted in larger blocks, of `pool_block_size`
    tokens, and its hits end at multiples of `alignment` tokens. `num_gpu_blocks` sums over data-parallel engines.
    """

    block_size: int | None = None
    num_gpu_blocks: int | None = None
    algorithm: str | None = None
    prefix_caching: bool = True
    pool_block_size: int | None = None
    alignment: int | None = None

    @property
    def capacity(self) -> int | None:
        """Hashed blocks that the pool holds; one of each engine's blocks is its null block."""
        if self.num_gpu_blocks is None:
            return None
        pool, hashed = self.pool_block_size, self.block_size
        scale = pool // hashed if pool and hashed and pool > hashed else 1
        return max(1, (self.num_gpu_blocks - 1) * scale)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Sums over a replica's engines (data-parallel ranks); None where a series is missing: never read as zero."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    hits: float | None = None
    queries: float | None = None
    started: float | None = None  # the process's start, unix seconds: another value is another process
    cache: CacheConfig | None = None
    hands_over: bool = False
    """It has a connector that moves KV between engines (NIXL's series are there)."""
    fetches: bool = False
    """And takes KV from others with it."""


# Name -> field, with the names that older engines use.
_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_hits_total": "hits",
    "vllm:prefix_cache_hits": "hits",
    "vllm:prefix_cache_queries_total": "queries",
    "vllm:prefix_cache_queries": "queries",
    "process_start_time_seconds": "started",
}
_PEAKS = {"vllm:kv_cache_usage_perc": "kv_usage", "vllm:gpu_cache_usage_perc": "kv_usage"}
_CACHE = "vllm:cache_config_info"
_NIXL = "vllm:nixl_"
_FETCH = "vllm:num_requests_kv_fetch_by_stage"  # engines that only produce KV have no such series


def read_metrics(text: str) -> Metrics:
    """What can be read of a Prometheus text page; lines that make no sense are passed over."""
    values: dict[str, float] = {}
    cache: CacheConfig | None = None
    hands_over = fetches = False
    for line in text.splitlines():
        if not line.startswith(("vllm:", "process_start")):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name == _CACHE:
            cache = _joined(cache, _cache_config(line))
            continue
        hands_over = hands_over or name.startswith(_NIXL)
        fetches = fetches or name == _FETCH
        summed, peak = _SUMS.get(name), _PEAKS.get(name)
        if summed is None and peak is None:
            continue
        try:
            value = float(line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        if not 0 <= value < MAX_VALUE:
            continue  # NaN, infinities and numbers that no engine counts to
        if summed is not None:
            values[summed] = values.get(summed, 0.0) + value
        elif peak is not None:
            values[peak] = max(values.get(peak, 0.0), value)
    return Metrics(
        running=values.get("running"),
        waiting=values.get("waiting"),
        kv_usage=values.get("kv_usage"),
        hits=values.get("hits"),
        queries=values.get("queries"),
        started=values.get("started"),
        cache=cache,
        hands_over=hands_over,
        fetches=fetches,
    )


def _cache_config(line: str) -> CacheConfig:
    labels = dict(_LABEL.findall(line))
    # Hybrid models hash by their own unit; "None" there means that it is the block size.
    pool, hashed = _number(labels.get("block_size")), _number(labels.get("hash_block_size"))
    return CacheConfig(
        block_size=hashed or pool,
        num_gpu_blocks=_number(labels.get("num_gpu_blocks")),
        algorithm=labels.get("prefix_caching_hash_algo"),
        prefix_caching=labels.get("enable_prefix_caching", "True") != "False",
        pool_block_size=pool,
        alignment=_number(labels.get("cache_hit_alignment_tokens")),
    )


def _joined(one: CacheConfig | None, other: CacheConfig) -> CacheConfig:
    """Data-parallel engines are alike, and each has a pool of its own."""
    if one is None:
        return other
    if one.num_gpu_blocks is None or other.num_gpu_blocks is None:
        return one
    return replace(one, num_gpu_blocks=one.num_gpu_blocks + other.num_gpu_blocks)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 and int(text) > 0 else None
