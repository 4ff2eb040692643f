"""Give the tiny tokenizer random weights: a Llama of about a million parameters that real vLLM can serve.

Runs in vLLM's own environment:

    DIR/venv/bin/python tests/real_vllm/make_model.py DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM

TINY = Path(__file__).resolve().parents[2] / "fake_backend" / "tiny"


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        shutil.copy(file, out)
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(out)).to(torch.bfloat16)
    model.save_pretrained(out, safe_serialization=True)
    # Saving adds this library's own defaults to the configuration; the committed one is the one that is meant.
    for name in ("config.json", "generation_config.json"):
        shutil.copy(TINY / name, out)


if __name__ == "__main__":
    main()
