"""How long a step takes: the roofline of a GPU under a model.

A step's arithmetic is 2 FLOPs per active parameter and token, plus attention's 4 x heads x head size per pair of
positions and attention layer. Its memory traffic is the weights once, plus the KV of every context it reads. The step
takes the longer of the two, plus a constant for launching it, plus what tensor parallelism says over the wires: two
all-reduces a layer, each with a latency and the bytes of its tokens. Fractions
of the peaks that kernels really reach are settings of the GPU preset; docs/fake-backend.md compares the outcome with
published figures.
"""

from dataclasses import dataclass

ALL_REDUCE_LATENCY = 20e-6
"""Seconds, for a small message between devices of one node."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one step computes."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Sum over prefill chunks of new tokens x mean context they attend to."""
    prefill_context: int = 0
    """Sum over prefill chunks of the tokens of KV they read."""
    decode_sequences: int = 0
    decode_context: int = 0
    """Sum over decoding sequences of the tokens of KV they read."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, linear in its load; made by :func:`roofline` or given outright."""

    seconds_per_token: float
    """Arithmetic of one token through the weights."""
    seconds_per_pair: float
    """Arithmetic of one token attending to one position, in all layers."""
    weight_seconds: float
    """Reading all weights that a large batch touches, once."""
    sparse_weight_seconds: float
    """Of those, the experts' share: a small batch reads only a part of it."""
    expert_share: float
    """Part of the experts that one token uses, 0..1; 1 for dense models."""
    seconds_per_context: float
    """Reading one token's KV."""
    overhead: float
    """Launching a step."""
    communication_per_token: float = 0.0
    """Sending one token's share of all all-reduces."""
    slowdown: float = 1.0

    def seconds(self, load: Load) -> float:
        """Duration of a step with this load; 0 for an empty one."""
        tokens = load.prefill_tokens + load.decode_sequences
        if not tokens:
            return 0.0
        compute = tokens * self.seconds_per_token
        compute += (load.prefill_pairs + load.decode_context) * self.seconds_per_pair
        memory = self.weight_seconds + (load.decode_context + load.prefill_context) * self.seconds_per_context
        if self.sparse_weight_seconds:
            untouched = (1.0 - self.expert_share) ** tokens
            memory -= self.sparse_weight_seconds * untouched
        communication = tokens * self.communication_per_token
        return (max(compute, memory) + communication + self.overhead) * self.slowdown


def roofline(
    *,
    parameters: float,
    active_parameters: float,
    weight_bytes: float,
    attention_layers: int,
    query_heads: int,
    head_size: int,
    kv_bytes_per_token: float,
    flops: float,
    bandwidth: float,
    compute_efficiency: float,
    bandwidth_efficiency: float,
    devices: int = 1,
    layers: int = 0,
    interconnect: float = 300e9,
    overhead: float = 0.002,
) -> StepTime:
    """Step time of a model on ``devices`` equal GPUs.

    ``parameters`` are numbers, ``weight_bytes`` and ``kv_bytes_per_token`` bytes over all devices, ``flops`` FLOP/s and
    ``bandwidth`` bytes/s of one device, efficiencies 0..1, ``overhead`` seconds. ``layers`` (all of them) and
    ``interconnect`` (bytes/s from one device to the others) only matter with several devices.
    """
    usable_flops = flops * compute_efficiency * devices
    usable_bandwidth = bandwidth * bandwidth_efficiency * devices
    share = active_parameters / parameters
    # A ring moves every byte twice, less the device's own share; activations are bf16, as wide as the query heads.
    all_reduced = 2 * layers * query_heads * head_size * 2.0 * 2 * (devices - 1) / devices
    sparse = weight_bytes * (1.0 - share) if share < 1.0 else 0.0
    return StepTime(
        seconds_per_token=2.0 * active_parameters / usable_flops,
        seconds_per_pair=4.0 * attention_layers * query_heads * head_size / usable_flops,
        weight_seconds=weight_bytes / usable_bandwidth,
        sparse_weight_seconds=sparse / usable_bandwidth,
        expert_share=share,
        seconds_per_context=kv_bytes_per_token / usable_bandwidth,
        overhead=overhead + (2 * layers * ALL_REDUCE_LATENCY if devices > 1 else 0.0),
        communication_per_token=all_reduced / interconnect,
    )
