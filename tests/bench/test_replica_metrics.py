"""Reading a replica's /metrics."""

from bench.replica_metrics import ReplicaMetrics, parse

ONE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 4000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3000.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 7.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="1500"} 1.0
"""


def test_one_engine() -> None:
    seen = parse(ONE)
    assert seen == ReplicaMetrics(
        finished=12, running=3, waiting=2, kv_usage=0.25, queries=4000, hits=3000, block_size=16, blocks=1500
    )
    assert (seen.in_flight, seen.requests, seen.hit_rate) == (5, 17, 0.75)


def test_two_engines_behind_one_port_are_added_up() -> None:
    lines = ONE.splitlines()
    both = [entry for line in lines for entry in ([line] if line[0] == "#" else [line, line.replace('"0"', '"1"')])]
    seen = parse("\n".join(both) + "\n")
    assert (seen.running, seen.requests, seen.hits, seen.kv_usage) == (6, 34, 6000, 0.25)


def test_a_replica_that_has_seen_nothing() -> None:
    seen = parse("")
    assert (seen.requests, seen.hit_rate, seen.kv_usage) == (0, 0.0, 0.0)
