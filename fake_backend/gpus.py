"""GPUs: memory, bandwidth, arithmetic. Figures are the makers' data sheets', dense, per device."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, bandwidth in bytes/s, arithmetic in FLOP/s."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    """bf16."""
    flops_8bit: float
    fp8: bool
    """Whether it multiplies FP8 by FP8."""
    interconnect: float = 300e9
    """Bytes/s to the other devices of its node, as an all-reduce reaches it."""
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", 40e9, 1.555e12, 312e12, 624e12, fp8=False, interconnect=200e9),
        Gpu("A100-80", 80e9, 2.039e12, 312e12, 624e12, fp8=False, interconnect=200e9),
        Gpu("L4", 24e9, 0.300e12, 121e12, 242e12, fp8=True, interconnect=20e9),
        Gpu("L40S", 48e9, 0.864e12, 362e12, 733e12, fp8=True, interconnect=20e9),
        Gpu("H100", 80e9, 3.35e12, 989e12, 1979e12, fp8=True),
        Gpu("H200", 141e9, 4.8e12, 989e12, 1979e12, fp8=True),
        Gpu("B200", 180e9, 8.0e12, 2250e12, 4500e12, fp8=True, interconnect=600e9),
        Gpu("MI300X", 192e9, 5.3e12, 1307e12, 2614e12, fp8=True, compute_efficiency=0.45, bandwidth_efficiency=0.7),
    )
}
DEFAULT_GPU = "H100"
