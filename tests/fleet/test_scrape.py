from __future__ import annotations

from pathlib import Path

import pytest

from router.fleet.probe import read_models
from router.fleet.scrape import CacheConfig, Metrics, read_metrics

REAL = Path(__file__).parents[1] / "data" / "vllm" / "metrics.txt"


def test_a_real_page() -> None:
    metrics = read_metrics(REAL.read_text())
    assert metrics.cache is not None
    assert metrics.cache.block_size == 32
    assert metrics.cache.algorithm == "sha256_cbor"
    assert metrics.cache.num_gpu_blocks
    assert metrics.cache.prefix_caching
    assert metrics.running is not None
    assert metrics.waiting is not None
    assert metrics.kv_usage is not None
    assert metrics.hits is not None
    assert metrics.queries is not None
    assert metrics.started is not None


@pytest.mark.fault("renamed metrics")
def test_old_names_ranks_and_missing_series() -> None:
    page = """
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a b} c"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3
vllm:gpu_cache_usage_perc{engine="0"} 0.25
vllm:gpu_cache_usage_perc{engine="1"} 0.75
vllm:prefix_cache_hits 7
process_start_time_seconds 1.5e9
vllm:num_requests_waiting{engine="0"} what
vllm:num_requests_waiting
vllm:num_requests_running_by_reason{engine="0"} 99
"""
    assert read_metrics(page) == Metrics(running=5.0, kv_usage=0.75, hits=7.0, started=1.5e9)
    assert read_metrics("") == Metrics()


def test_hybrid_models_ranks_and_caching_off() -> None:
    line = (
        'vllm:cache_config_info{engine="%s",block_size="528",hash_block_size="16",num_gpu_blocks="11",'
        'cache_hit_alignment_tokens="528",enable_prefix_caching="False",prefix_caching_hash_algo="xxhash"} 1.0'
    )
    cache = read_metrics(line % "0").cache
    assert cache == CacheConfig(16, 11, "xxhash", False, 528, 528)
    assert cache.capacity == 10 * 33
    both = read_metrics("\n".join(line % rank for rank in "01")).cache
    assert both is not None
    assert both.num_gpu_blocks == 22
    assert read_metrics("vllm:cache_config_info{} 1.0").cache == CacheConfig()
    assert CacheConfig().capacity is None
    assert CacheConfig(16, 1).capacity == 1
    assert CacheConfig(16, 100).capacity == 99


@pytest.mark.parametrize("page", [b"", b"[]", b"{}", b'{"data":{}}', b'{"data":[]}', b'{"data":[{"id":1}]}', b"<html>"])
def test_what_is_no_list_of_models(page: bytes) -> None:
    with pytest.raises(ValueError):
        read_models(page)
