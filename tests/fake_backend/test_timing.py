"""Step times that a person can check on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_backend import settings
from fake_backend.replica import step_time
from fake_backend.timing import Load, roofline

EASY = {
    "parameters": 1e9, "active_parameters": 1e9, "weight_bytes": 2e9, "attention_layers": 10, "query_heads": 8,
    "head_size": 64, "kv_bytes_per_token": 1e5, "flops": 1e14, "bandwidth": 1e12, "compute_efficiency": 0.5,
    "bandwidth_efficiency": 0.5, "overhead": 0.001,
}  # fmt: skip


def test_decode_is_bound_by_memory() -> None:
    step = roofline(**EASY)
    # 2 GB of weights and 1000 tokens of 100 KB at 500 GB/s
    assert step.seconds(Load(decode_sequences=1, decode_context=1000)) == pytest.approx(0.0042 + 0.001)


def test_prefill_is_bound_by_arithmetic() -> None:
    step = roofline(**EASY)
    load = Load(prefill_tokens=4000, prefill_pairs=4000 * 2000, prefill_context=4000)
    # 2e9 FLOPs a token and 4 x 10 x 8 x 64 a pair at 50 TFLOP/s
    assert step.seconds(load) == pytest.approx(0.16 + 4000 * 2000 * 20480 / 5e13 + 0.001)


def test_an_empty_step_takes_no_time() -> None:
    assert roofline(**EASY).seconds(Load()) == 0.0


def test_two_devices_halve_the_work_but_not_the_launch() -> None:
    one, two = roofline(**EASY), roofline(**EASY, devices=2, layers=10, interconnect=1e9)
    load = Load(decode_sequences=1, decode_context=1000)
    # Two all-reduces in each of 10 layers: 20 us each, and the token's 8 x 64 x 2 bytes twice, half of them its own.
    talk = 20 * 20e-6 + 20 * 1024 * 2 / 2 / 1e9
    assert two.seconds(load) == pytest.approx((one.seconds(load) - 0.001) / 2 + 0.001 + talk)


def test_a_small_batch_reads_few_experts() -> None:
    sparse = roofline(**(EASY | {"active_parameters": 1e8}))
    one, many = (sparse.seconds(Load(decode_sequences=n, decode_context=0)) for n in (1, 256))
    # 10 % of the weights are always read, and of the rest a tenth by one token
    assert one == pytest.approx(0.004 * (0.1 + 0.9 * 0.1) + 0.001)
    assert many == pytest.approx(0.005)


def test_a_slow_gpu_is_slow_in_all_it_does() -> None:
    step = roofline(**EASY)
    load = Load(decode_sequences=1, decode_context=1000)
    assert replace(step, slowdown=3.0).seconds(load) == pytest.approx(3 * step.seconds(load))


@pytest.mark.parametrize(
    ("flags", "prefill_rate", "decode_ms"),
    [
        # docs/fake-backend.md says what these are held against
        (("--model", "Llama-3.1-8B", "--gpu", "H100"), (30_000, 42_000), (6, 10)),
        (("--model", "Llama-3.1-8B", "--gpu", "L4", "--max-model-len", "8192"), (3_000, 5_500), (60, 90)),
        (("--model", "Qwen3-32B", "--gpu", "H100", "-tp", "2"), (12_000, 20_000), (12, 20)),
        (("--model", "Llama-3-70B", "--gpu", "H100", "-tp", "4"), (11_000, 18_000), (13, 22)),
        (("--model", "gpt-oss-120b", "--gpu", "H100"), (30_000, 70_000), (3, 8)),
    ],
)
def test_presets_stay_near_published_figures(
    flags: tuple[str, ...], prefill_rate: tuple[int, int], decode_ms: tuple[int, int]
) -> None:
    step = step_time(settings.read(flags))
    rate = 2048 / step.seconds(Load(prefill_tokens=2048, prefill_pairs=2048 * 1024, prefill_context=2048))
    assert prefill_rate[0] < rate < prefill_rate[1]
    one = step.seconds(Load(decode_sequences=1, decode_context=1000)) * 1000
    assert decode_ms[0] < one < decode_ms[1]
