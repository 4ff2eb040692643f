"""``python -m fake_backend budget``: what fits on a GPU in each weight and KV format."""

import argparse
from collections.abc import Sequence

from fake_backend import budget, models, settings

_FORMATS = (("none", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("int4", "fp8"))
_NAMES = {"none": "bf16", "auto": "bf16"}


def table(argv: Sequence[str]) -> str:
    """The table for ``--model`` and ``--gpu``. Raises SettingsError or BudgetError."""
    parser = argparse.ArgumentParser(prog="python -m fake_backend budget", allow_abbrev=False)
    settings.hardware_flags(parser)
    arguments = parser.parse_args(argv)
    model, _directory = settings.find_model(arguments.model or models.DEFAULT_MODEL)
    lengths = sorted({model.context, *(length for length in (32768, 8192) if length <= model.context)}, reverse=True)
    titles = [f"{length // 1024}K" for length in lengths]
    head = f"{'weights/KV':<12}{'weights GB':>11}{'KV GB':>8}{'KiB/token':>11}{'tokens':>12}"
    rows = [head + "".join(f"{'x ' + title:>8}" for title in titles)]
    formats = _FORMATS if arguments.quantization is None else ((arguments.quantization, arguments.kv_cache_dtype),)
    for weights, kv in formats:
        arguments.quantization, arguments.kv_cache_dtype = weights, kv
        arguments.max_model_len = -1
        name = f"{_NAMES.get(weights, weights)}/{_NAMES.get(kv, kv)}"
        try:
            plan = budget.plan(settings.demand(arguments, model))
        except budget.BudgetError as error:
            rows.append(f"{name:<12}{error}")
            continue
        row = (
            f"{name:<12}{plan.weights / 1e9:>11.1f}{plan.kv / 1e9:>8.1f}{plan.kv_bytes_per_token / 1024:>11.0f}"
            f"{plan.tokens:>12,}"
        )
        rows.append(row + "".join(f"{plan.sequences(length):>8}" for length in lengths))
    gpu = settings.find_gpu(arguments)
    rows.insert(
        0,
        f"{model.name} on {arguments.tensor_parallel_size} x {gpu.name} ({gpu.memory / 1e9:g} GB, "
        f"{arguments.gpu_memory_utilization:g} used, {arguments.overhead_gb:g} GB overhead); "
        "per device, and sequences of each length at once",
    )
    return "\n".join(rows)
