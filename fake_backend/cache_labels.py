"""The labels of ``vllm:cache_config_info``."""

from fake_backend.settings import Settings


def cache_config(settings: Settings) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``: every field of vLLM's CacheConfig, as strings."""
    size, blocks = settings.block_size, settings.plan.num_blocks
    labels = {
        "_block_size_resolved": "True",
        "block_size": str(size),
        "cache_dtype": settings.demand.kv_dtype,
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(size),
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": str(settings.prefix_caching),
        "gpu_memory_utilization": str(settings.demand.utilization),
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": str(blocks * size / settings.max_model_len),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(blocks * size),
        "kv_offloading_backend": settings.offloading_backend,
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(blocks),
        "num_gpu_blocks_override": "None",
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": settings.hash_algorithm,
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "False",
    }
    return labels | settings.cache_labels
