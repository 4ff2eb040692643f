"""What fits: weights, overhead and KV cache in a GPU's memory, or the error that start-up ends with.

The arithmetic is vLLM's (v1/core/kv_cache_utils.py): the share ``gpu_memory_utilization`` of the memory, less weights
and what activations and CUDA graphs take, is KV cache; one sequence of ``max_model_len`` tokens has to fit into it.
"""

from dataclasses import dataclass

from fake_backend.gpus import Gpu
from fake_backend.models import Model

GIB = 1024**3
DEFAULT_OVERHEAD_GB = 2.5

WEIGHT_BYTES = {"none": 2.0, "fp8": 1.0, "int8": 1.0, "awq": 0.5, "gptq": 0.5, "int4": 0.5, "mxfp4": 4.25 / 8}
KV_BYTES = {"auto": 2.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
EIGHT_BIT_ARITHMETIC = ("fp8", "int8")


class BudgetError(Exception):
    """An engine that would not start; the message is what vLLM, or a person, would want to read."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be run where. Sizes in bytes unless a name says otherwise."""

    model: Model
    gpu: Gpu
    utilization: float = 0.92
    quantization: str = "none"
    kv_dtype: str = "auto"
    tensor_parallel: int = 1
    overhead: float = DEFAULT_OVERHEAD_GB * 1e9
    block_size: int = 16
    max_model_len: int | None = None
    """None: the model's own context. -1: as long as fits."""
    num_gpu_blocks_override: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Per device, except ``tokens``: those are the replica's."""

    weights: float
    overhead: float
    kv: float
    """Left for KV cache."""
    kv_bytes_per_token: float
    tokens: int
    num_blocks: int
    max_model_len: int
    reduced_from: int | None = None
    """The context that had been asked for, if ``max_model_len`` -1 made it shorter."""

    def sequences(self, length: int) -> int:
        """How many sequences of ``length`` tokens fit at the same time."""
        return self.tokens // length


def quantization(model: Model, asked: str | None) -> str:
    """The weight format in force: the one asked for, else the one the model is published in."""
    chosen = asked if asked not in (None, "none") else model.quantization
    if chosen not in WEIGHT_BYTES:
        raise BudgetError(f"quantization must be one of {', '.join(WEIGHT_BYTES)}, got {chosen!r}")
    return chosen


def kv_bytes_per_token(model: Model, kv_dtype: str, tensor_parallel: int) -> float:
    """On one device: heads are shared out, but a device has at least one."""
    heads = max(1, model.kv_heads // tensor_parallel)
    return 2 * model.kv_layers * heads * model.head_size * KV_BYTES[kv_dtype]


def check_formats(demand: Demand) -> None:
    """Refuse a format that the GPU has no arithmetic for, and say what would run."""
    if demand.kv_dtype not in KV_BYTES:
        raise BudgetError(f"kv_cache_dtype must be one of {', '.join(KV_BYTES)}, got {demand.kv_dtype!r}")
    if quantization(demand.model, demand.quantization) == "fp8" and not demand.gpu.fp8:
        raise BudgetError(
            f"{demand.gpu.name} has no FP8 arithmetic (it needs compute capability 8.9), so quantization fp8 (W8A8) "
            "cannot run on it. int8 (W8A8) takes the same memory; awq or gptq (4-bit weights) take half of it."
        )


def plan(demand: Demand) -> Plan:
    """Share out the memory. Raises BudgetError where vLLM would refuse to start."""
    check_formats(demand)
    if demand.tensor_parallel < 1 or demand.model.query_heads % demand.tensor_parallel:
        raise BudgetError(
            f"Total number of attention heads ({demand.model.query_heads}) must be divisible by tensor parallel size "
            f"({demand.tensor_parallel})."
        )
    if not 0 < demand.utilization <= 1:
        raise BudgetError(f"gpu_memory_utilization must be more than 0 and at most 1, got {demand.utilization}")
    form = quantization(demand.model, demand.quantization)
    weights = demand.model.parameters * WEIGHT_BYTES[form] / demand.tensor_parallel
    per_token = kv_bytes_per_token(demand.model, demand.kv_dtype, demand.tensor_parallel)
    block = per_token * demand.block_size
    kv = demand.gpu.memory * demand.utilization - weights - demand.overhead
    if demand.num_gpu_blocks_override is not None:
        kv = demand.num_gpu_blocks_override * block
    if kv < block:
        short = (weights + demand.overhead + block - demand.gpu.memory * demand.utilization) / GIB
        raise BudgetError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            f"engine. ({demand.model.name} as {form} takes {weights / GIB:.2f} GiB of weights and "
            f"{demand.overhead / GIB:.2f} GiB of overhead; {demand.gpu.name} x {demand.utilization} is "
            f"{demand.gpu.memory * demand.utilization / GIB:.2f} GiB, {short:.2f} GiB too little.)"
        )
    num_blocks = demand.num_gpu_blocks_override or int(kv // block)
    longest = num_blocks * demand.block_size
    wanted = demand.max_model_len or demand.model.context
    reduced_from = None
    if demand.max_model_len == -1:
        wanted = min(demand.model.context, longest)
        reduced_from = demand.model.context if wanted < demand.model.context else None
    elif wanted > longest:
        needed = -(-wanted // demand.block_size) * block
        raise BudgetError(
            f"To serve at least one request with the model's max seq len ({wanted}), ({needed / GIB:.2f} GiB KV cache "
            f"is needed, which is larger than the available KV cache memory ({kv / GIB:.2f} GiB). Based on the "
            f"available memory, the estimated maximum model length is {longest}. Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )
    return Plan(weights, demand.overhead, kv, per_token, int(kv // per_token), num_blocks, wanted, reduced_from)


def arithmetic(demand: Demand) -> float:
    """FLOP/s of one device for this weight format: weight-only formats compute in bf16."""
    if quantization(demand.model, demand.quantization) in EIGHT_BIT_ARITHMETIC:
        return demand.gpu.flops_8bit
    return demand.gpu.flops
