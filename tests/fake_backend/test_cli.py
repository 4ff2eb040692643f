"""Starting up, refusing to, and ending."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fake_backend import budget, budget_table, settings
from fake_backend.answers import AnswerSpecError
from fake_backend.cli import main
from fake_backend.fault_script import read
from fake_backend.faults import FaultError
from fake_backend.models import MODELS, ModelError, from_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

ROOT = Path(__file__).resolve().parents[2]

TABLE = """\
Qwen3.5-27B on 1 x H100 (80 GB, 0.92 used, 5 GB overhead); per device, and sequences of each length at once
weights/KV   weights GB   KV GB  KiB/token      tokens  x 256K   x 32K    x 8K
bf16/bf16          54.0    14.6         64     222,778       0       6      27
fp8/bf16           27.0    41.6         64     634,765       2      19      77
fp8/fp8            27.0    41.6         32   1,269,531       4      38     154
int4/fp8           13.5    55.1         32   1,681,518       6      51     205"""


def test_the_budget_table() -> None:
    assert budget_table.table(["--model", "Qwen3.5-27B", "--gpu", "H100", "--overhead-gb", "5"]) == TABLE


def test_a_format_that_the_gpu_lacks_is_said_in_the_table() -> None:
    table = budget_table.table(["--model", "Llama-3.1-8B", "--gpu", "A100-80"])
    assert table.splitlines()[3].startswith("fp8/bf16    A100-80 has no FP8 arithmetic")


def read_flags(*flags: str) -> settings.Settings:
    return settings.read(flags)


def test_a_context_that_does_not_fit_names_the_longest_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "Qwen3.5-27B", "--overhead-gb", "5"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "fake_backend: To serve at least one request with the model's max seq len (262144), (16.00 GiB"
    )
    assert "the available KV cache memory (13.60 GiB)" in message
    assert "the estimated maximum model length is 222768." in message


@pytest.mark.parametrize("flag", ["auto", "-1"])
def test_auto_takes_the_longest_that_fits(flag: str) -> None:
    chosen = read_flags("--model", "Qwen3.5-27B", "--overhead-gb", "5", f"--max-model-len={flag}")
    assert chosen.max_model_len == 222768
    assert chosen.plan.reduced_from == 262144
    assert read_flags("--model", "Qwen3-32B", "--max-model-len=auto").max_model_len == 20_976


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(budget.BudgetError, match="No available memory for the cache blocks"):
        read_flags("--model", "Llama-3-70B", "--gpu", "L4")


def test_two_devices_share_weights_and_heads() -> None:
    one = read_flags("--model", "Llama-3-70B", "--gpu", "H200", "--quantization", "fp8")
    two = read_flags("--model", "Llama-3-70B", "--gpu", "H200", "--quantization", "fp8", "-tp", "2")
    assert two.plan.weights == one.plan.weights / 2
    assert two.plan.kv_bytes_per_token == one.plan.kv_bytes_per_token / 2


def test_a_format_that_the_gpu_cannot_run() -> None:
    with pytest.raises(budget.BudgetError, match="int8 \\(W8A8\\) takes the same memory"):
        read_flags("--model", "Llama-3.1-8B", "--gpu", "A100-80", "-q", "fp8")
    assert read_flags("--model", "Llama-3.1-8B", "--gpu", "A100-80", "-q", "int8").plan.weights == 8.03e9


def test_defaults_follow_the_device() -> None:
    h100, a100, h200 = (read_flags("--gpu", gpu) for gpu in ("H100", "A100-80", "MI300X"))
    assert (h100.max_num_batched_tokens, h100.max_num_seqs) == (8192, 1024)
    assert (a100.max_num_batched_tokens, a100.max_num_seqs) == (2048, 256)
    assert (h200.max_num_batched_tokens, h200.max_num_seqs) == (16384, 1024)


def test_the_tokenizer_says_where_it_is() -> None:
    chosen = read_flags("--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert chosen.root == str(ROOT / "fake_backend" / "tiny")
    assert chosen.served_names == ("meta-llama/Llama-3.1-8B-Instruct",)
    assert chosen.model is MODELS["Llama-3.1-8B"]


def test_a_model_from_its_directory() -> None:
    chosen = read_flags("--model", str(ROOT / "fake_backend" / "tiny"))
    assert chosen.root == str(ROOT / "fake_backend" / "tiny")
    assert chosen.plan.max_model_len == chosen.model.context


def test_layers_that_keep_no_kv_are_told_by_the_config() -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 2048,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }  # fmt: skip
    model = from_config("x", config)
    assert (model.kv_layers, budget.kv_bytes_per_token(model, "auto", 1)) == (2, 2 * 2 * 2 * 16 * 2)
    with pytest.raises(ModelError, match="num_hidden_layers"):
        from_config("x", {"hidden_size": 1})


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--gpu", "Z80"), "--gpu must be one of"),
        (("--tokenizer", "/nowhere"), "--tokenizer /nowhere: no tokenizer.json there"),
        (("--answers", "long"), "--answers must be"),
        (("--lora-modules", "law"), "--lora-modules takes NAME=PATH"),
        (("--kv-transfer-config", '{"kv_connector": "Pigeon"}'), "kv_connector must be one of"),
        (("--kv-link", "slow"), "--kv-link must be"),
        (("--gpu-memory-utilization", "1.5"), "gpu_memory_utilization must be"),
        (("--faults", "/nowhere.yaml"), "--faults /nowhere.yaml: No such file"),
    ],
)
def test_a_flag_that_cannot_be(flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fake_backend: ")
    assert complaint in error


@pytest.mark.parametrize("text", ["fixed:0", "uniform:9:3", "lognormal:5", "fixed:x", "echo:1"])
def test_answers_that_mean_nothing(text: str) -> None:
    with pytest.raises(AnswerSpecError):
        read_flags("--answers", text)


async def run(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fake_backend", *flags, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_status_0(number: signal.Signals) -> None:
    process = await run("--port", "0")
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"listening on http://127.0.0.1:" not in await process.stderr.readline():
            pass
        process.send_signal(number)
        assert await process.wait() == 0


async def test_a_taken_port_is_said_in_one_line(start: Callable[..., Awaitable[Server]]) -> None:
    server = await start()
    process = await run("--port", str(server.port))
    async with asyncio.timeout(60):
        _out, error = await process.communicate()
    assert process.returncode == 1
    assert (
        error.decode()
        .splitlines()[-1]
        .startswith(f"fake_backend: cannot listen on --host 127.0.0.1 --port {server.port}: ")
    )


def test_a_script_of_faults_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("- {at: 5, clear: true}\n- {at: 1.5, add: {kind: hang, times: 1}}\n- {at: 2, gpu: {slowdown: 3}}\n")
    assert [(line.at, line.action) for line in read(path)] == [(1.5, "add"), (2.0, "gpu"), (5.0, "clear")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "a list of entries is needed"),
        ("- {add: {kind: hang}}", "entry 1: it has no time"),
        ("- {at: 1}", "entry 1: one of add"),
        ("- {at: 1, add: {kind: sulk}}", "entry 1: unknown fault kind"),
        ("- [", "neither YAML nor JSON"),
    ],
)
def test_a_script_that_means_nothing(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(FaultError, match=complaint):
        read(path)


async def test_a_script_is_played(start: Callable[..., Awaitable[Server]], tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("- {at: 0, add: {kind: hang}}\n- {at: 0, clear: true}\n- {at: 0, gpu: {slowdown: 4}}\n")
    server = await start("--faults", str(path))
    async with asyncio.timeout(60):
        while server.replica.engines[0].step_time.slowdown != 4:
            await asyncio.sleep(0.001)
    assert server.faults.rules == []
