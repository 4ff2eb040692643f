"""What an engine is told at start-up: vLLM's flags, and those of the hardware it doesn't have."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_backend import budget, gpus, models, nixl
from fake_backend.answers import Style, parse_style
from fake_backend.gpus import Gpu
from fake_backend.link import Link
from fake_backend.models import Model
from router.prompt.blocks import ALGORITHMS

TINY = Path(__file__).resolve().parent / "tiny"
"""The tokenizer and chat template of a model that brings none."""

IGNORED = (
    ("--dtype", 1), ("--load-format", 1), ("--download-dir", 1), ("--revision", 1), ("--tokenizer-mode", 1),
    ("--trust-remote-code", 0), ("--enforce-eager", 0), ("--disable-log-requests", 0), ("--disable-log-stats", 0),
    ("--enable-log-requests", 0), ("--uvicorn-log-level", 1), ("--disable-uvicorn-access-log", 0),
    ("--async-scheduling", 0), ("--no-async-scheduling", 0), ("--pipeline-parallel-size", 1), ("--swap-space", 1),
    ("--generation-config", 1), ("--compilation-config", 1), ("--root-path", 1),
    ("--disable-frontend-multiprocessing", 0),
    ("--limit-mm-per-prompt", 1), ("--distributed-executor-backend", 1), ("--max-lora-rank", 1),
    ("--attention-backend", 1),
)  # fmt: skip
"""Flags of ``vllm serve`` that change nothing here, with the number of values they take."""


class SettingsError(Exception):
    """A flag that cannot be; one clear line that names it."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    name: str
    path: str
    base: str | None = None


@dataclass(slots=True)
class Settings:
    """Everything the flags said, with vLLM's defaults where they said nothing."""

    host: str
    port: int
    model: Model
    model_name: str
    root: str
    served_names: tuple[str, ...]
    tokenizer: Path
    gpu: Gpu
    demand: budget.Demand
    plan: budget.Plan
    style: Style
    api_keys: tuple[str, ...] = ()
    seed: int = 0
    time_scale: float = 1.0
    step_overhead: float = 0.002
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    hash_algorithm: str = "sha256"
    long_prefill_token_threshold: int = 0
    reserve_full_prompt: bool = True
    policy: str = "fcfs"
    data_parallel: int = 1
    prompt_tokens_details: bool = False
    request_id_headers: bool = False
    load_tracking: bool = False
    scale_out: bool = False
    force_include_usage: bool = False
    sse_keep_alive: float = 0.0
    embedding: bool = False
    loras: tuple[LoraModule, ...] = ()
    enable_lora: bool = False
    max_loras: int = 1
    kv_events: dict[str, Any] | None = None
    kv_transfer: dict[str, Any] | None = None
    kv_link: str = "rdma"
    offloading_gib: float | None = None
    offloading_backend: str = "native"
    vllm_version: str = "0.32.0"
    faults: Path | None = None
    cache_labels: dict[str, str] = field(default_factory=dict)
    """Flags as ``vllm:cache_config_info`` shows them, where they differ from their effect."""

    @property
    def block_size(self) -> int:
        return self.demand.block_size

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len


def _length(text: str) -> int:
    """``32768``, ``32k``, ``32K`` (1024s), ``auto`` or ``-1``."""
    if text in ("auto", "-1"):
        return -1
    units = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}
    factor = units.get(text[-1:], 1)
    try:
        value = int(float(text[:-1] if factor != 1 else text) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, auto or -1, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, auto or -1, got {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _limit(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """The flags of ``python -m fake_backend``."""
    top = argparse.ArgumentParser(
        prog="python -m fake_backend", description="A vLLM replica that needs no GPU.", allow_abbrev=False
    )
    top.add_argument("model_tag", nargs="?", help="the model, as vllm serve takes it")
    hardware_flags(top)
    add = top.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--served-model-name", nargs="+")
    add("--tokenizer", help="a directory with tokenizer.json; default: the model's own, else one that comes along")
    add("--api-key", nargs="+", default=None)
    add("--seed", type=int, default=0)
    add("--max-num-seqs", type=_count)
    add("--max-num-batched-tokens", type=_length)
    add("--max-num-queued-reqs", type=_limit)
    add("--max-num-queued-tokens", type=_limit)
    add("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--prefix-caching-hash-algo", choices=ALGORITHMS, default="sha256")
    add("--long-prefill-token-threshold", type=_limit, default=0)
    add("--scheduler-reserve-full-isl", action=argparse.BooleanOptionalAction, default=True)
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    add("--data-parallel-size", "-dp", type=_count, default=1)
    add("--enable-prompt-tokens-details", action="store_true")
    add("--enable-request-id-headers", action="store_true")
    add("--enable-server-load-tracking", action="store_true")
    add("--enable-scale-out", action="store_true")
    add("--enable-force-include-usage", action="store_true")
    add("--sse-keep-alive-interval", type=float, default=0.0)
    add("--runner", choices=("auto", "generate", "pooling"), default="auto")
    add("--enable-lora", action="store_true")
    add("--lora-modules", nargs="+", default=[], help="NAME=PATH, or a JSON object with name and path")
    add("--max-loras", type=_count, default=1)
    add("--kv-events-config", type=_object)
    add("--kv-transfer-config", type=_object)
    add("--kv-offloading-size", type=float, help="GiB of CPU memory for evicted blocks")
    add("--kv-offloading-backend", choices=("native", "lmcache"), default="native")
    own = top.add_argument_group("what a real replica has no flag for")
    own.add_argument("--time-scale", type=float, default=1.0, help="wall seconds per modelled second; 0: no waiting")
    own.add_argument("--step-overhead-ms", type=float, default=2.0, help="what launching a step costs")
    own.add_argument(
        "--answers",
        default="lognormal:200:0.7",
        help="lognormal:MEAN:SIGMA, uniform:LOW:HIGH, fixed:TOKENS, greedy:MEAN or echo",
    )
    own.add_argument("--kv-link", default="rdma", help="between prefill and decode: rdma, tcp or GB/s,latency in ms")
    own.add_argument("--faults", type=Path, help="a script of faults, see docs/fake-backend.md")
    own.add_argument("--vllm-version", default="0.32.0", help="the version to appear as")
    for flag, values in IGNORED:
        if values:
            top.add_argument(flag, help=argparse.SUPPRESS)
        else:
            top.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return top


def hardware_flags(top: argparse.ArgumentParser) -> None:
    """The flags that decide the budget; ``python -m fake_backend budget`` has them too."""
    add = top.add_argument
    add("--model", help=f"one of {', '.join(models.MODELS)}, or a directory with a config.json")
    add("--gpu", default=gpus.DEFAULT_GPU, help=f"one of {', '.join(gpus.GPUS)}")
    add("--gpu-memory-gb", type=float, help="instead of the preset's")
    add("--gpu-bandwidth-gbs", type=float, help="GB/s, instead of the preset's")
    add("--gpu-tflops", type=float, help="bf16, dense, instead of the preset's")
    add("--overhead-gb", type=float, default=budget.DEFAULT_OVERHEAD_GB, help="activations, CUDA graphs, the rest")
    add("--gpu-memory-utilization", type=float, default=0.92)
    add("--max-model-len", type=_length)
    add("--quantization", "-q", choices=tuple(budget.WEIGHT_BYTES))
    add("--kv-cache-dtype", choices=tuple(budget.KV_BYTES), default="auto")
    add("--tensor-parallel-size", "-tp", type=_count, default=1)
    add("--block-size", type=_count)
    add("--num-gpu-blocks-override", type=_count)


def find_gpu(arguments: argparse.Namespace) -> Gpu:
    """A preset with what the flags replace of it."""
    known = {name.lower(): gpu for name, gpu in gpus.GPUS.items()}
    preset = known.get(arguments.gpu.lower())
    if preset is None:
        raise SettingsError(f"--gpu must be one of {', '.join(gpus.GPUS)}, got {arguments.gpu!r}")
    speedup = arguments.gpu_tflops * 1e12 / preset.flops if arguments.gpu_tflops else 1.0
    return Gpu(
        preset.name,
        arguments.gpu_memory_gb * 1e9 if arguments.gpu_memory_gb else preset.memory,
        arguments.gpu_bandwidth_gbs * 1e9 if arguments.gpu_bandwidth_gbs else preset.bandwidth,
        preset.flops * speedup,
        preset.flops_8bit * speedup,
        preset.fp8,
        preset.interconnect,
        preset.compute_efficiency,
        preset.bandwidth_efficiency,
    )


def find_model(name: str) -> tuple[Model, Path | None]:
    """A preset, or a directory's model; and the directory, if it is one. An unknown name gets the default's shape."""
    directory = Path(name)
    if directory.is_dir():
        known = models.find(directory.name)
        path = directory / "config.json"
        if known is None and path.is_file():
            try:
                config = json.loads(path.read_bytes())
            except ValueError as error:
                raise SettingsError(f"{path} is not JSON: {error}") from error
            weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
            known = models.from_config(name, config, weights or None)
        if known is None:
            raise SettingsError(f"--model {name}: the directory has no config.json")
        return known, directory.resolve()
    found = models.find(name)
    if found is None:
        found = models.named(models.MODELS[models.DEFAULT_MODEL], name)
    return found, None


def demand(arguments: argparse.Namespace, model: Model) -> budget.Demand:
    return budget.Demand(
        model=model,
        gpu=find_gpu(arguments),
        utilization=arguments.gpu_memory_utilization,
        quantization=arguments.quantization or "none",
        kv_dtype=arguments.kv_cache_dtype,
        tensor_parallel=arguments.tensor_parallel_size,
        overhead=arguments.overhead_gb * 1e9,
        block_size=arguments.block_size or 16,
        max_model_len=arguments.max_model_len,
        num_gpu_blocks_override=arguments.num_gpu_blocks_override,
    )


def _lora(text: str) -> LoraModule:
    if text.startswith("{"):
        value = json.loads(text)
        return LoraModule(value["name"], value["path"], value.get("base_model_name"))
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise SettingsError(f"--lora-modules takes NAME=PATH or a JSON object with name and path, got {text!r}")
    return LoraModule(name, path)


def _step_limits(gpu: Gpu) -> tuple[int, int]:
    """The defaults of vLLM for max_num_batched_tokens and max_num_seqs for an API server, by device memory."""
    if gpu.memory >= 160 * budget.GIB:
        return 16384, 1024
    if gpu.memory >= 70 * budget.GIB and not gpu.name.startswith("A100"):
        return 8192, 1024
    return 2048, 256


def read(argv: Sequence[str]) -> Settings:
    """Flags to settings.

    Raises SettingsError, budget.BudgetError, models.ModelError or answers.AnswerSpecError, each with one clear line;
    argparse itself ends the process with status 2 for flags it doesn't know.
    """
    arguments = parser().parse_args(argv)
    name = arguments.model or arguments.model_tag or models.DEFAULT_MODEL
    model, directory = find_model(name)
    wanted = demand(arguments, model)
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else directory
    if tokenizer is None or not (tokenizer / "tokenizer.json").is_file():
        if arguments.tokenizer:
            raise SettingsError(f"--tokenizer {arguments.tokenizer}: no tokenizer.json there")
        tokenizer = TINY
    root = str((directory or tokenizer).resolve())
    tokens, sequences = _step_limits(wanted.gpu)
    plan = budget.plan(wanted)
    keys = arguments.api_key or ([os.environ["VLLM_API_KEY"]] if os.environ.get("VLLM_API_KEY") else [])
    batched = arguments.max_num_batched_tokens or tokens
    if not arguments.enable_chunked_prefill and not arguments.max_num_batched_tokens:
        batched = max(batched, plan.max_model_len)
    events = arguments.kv_events_config
    if arguments.kv_transfer_config is not None:
        nixl.check(arguments.kv_transfer_config)
        if arguments.kv_offloading_size is not None:
            raise SettingsError("--kv-offloading-size and --kv-transfer-config cannot be combined here")
    Link.parse(arguments.kv_link)
    return Settings(
        host=arguments.host,
        port=arguments.port,
        model=model,
        model_name=name,
        root=root,
        served_names=tuple(arguments.served_model_name or [name]),
        tokenizer=tokenizer.resolve(),
        gpu=wanted.gpu,
        demand=wanted,
        plan=plan,
        style=parse_style(arguments.answers),
        api_keys=tuple(keys),
        seed=arguments.seed,
        time_scale=arguments.time_scale,
        step_overhead=arguments.step_overhead_ms / 1000,
        max_num_seqs=arguments.max_num_seqs or sequences,
        max_num_batched_tokens=batched,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
        chunked_prefill=arguments.enable_chunked_prefill,
        prefix_caching=arguments.enable_prefix_caching,
        hash_algorithm=arguments.prefix_caching_hash_algo,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        reserve_full_prompt=arguments.scheduler_reserve_full_isl,
        policy=arguments.scheduling_policy,
        data_parallel=arguments.data_parallel_size,
        prompt_tokens_details=arguments.enable_prompt_tokens_details,
        request_id_headers=arguments.enable_request_id_headers,
        load_tracking=arguments.enable_server_load_tracking,
        scale_out=arguments.enable_scale_out,
        force_include_usage=arguments.enable_force_include_usage,
        sse_keep_alive=arguments.sse_keep_alive_interval,
        embedding=arguments.runner == "pooling",
        loras=tuple(_lora(text) for text in arguments.lora_modules),
        enable_lora=arguments.enable_lora,
        max_loras=arguments.max_loras,
        kv_events=events if events and events.get("enable_kv_cache_events") else None,
        kv_transfer=arguments.kv_transfer_config,
        kv_link=arguments.kv_link,
        offloading_gib=arguments.kv_offloading_size,
        offloading_backend=arguments.kv_offloading_backend,
        vllm_version=arguments.vllm_version,
        faults=arguments.faults,
        cache_labels={
            "num_gpu_blocks_override": str(arguments.num_gpu_blocks_override),
            "user_specified_block_size": str(arguments.block_size is not None),
            "kv_offloading_size": str(arguments.kv_offloading_size),
        },
    )
