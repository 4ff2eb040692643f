"""Prove the router against real vLLM, and record what real vLLM answers for the tests that run without it.

Installs vLLM for the CPU where it isn't yet (REAL_VLLM_DIR, default .vllm in the repository), starts two replicas,
runs the conformance tests of this directory against them and rewrites tests/data/vllm.

    python tests/real_vllm/run.py [--no-record | --record-only] [pytest arguments]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from install import install
from record import record
from replicas import Replica, running

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = (
    "--trust-request-chat-template",
    "--enable-scale-out",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through `running`, which ends the replicas
    arguments = sys.argv[1:]
    recording, testing = "--no-record" not in arguments, "--record-only" not in arguments
    arguments = [a for a in arguments if a not in ("--no-record", "--record-only")]
    directory = Path(os.environ.get("REAL_VLLM_DIR", ROOT / ".vllm")).resolve()
    install(directory)
    logs = directory / "logs"
    replicas = [Replica(directory, logs, flags=FLAGS) for _ in range(2)]
    status = 0
    with running(*replicas):
        if recording:
            record(directory, replicas[0], logs)
        if testing:
            tests = [sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider", *arguments]
            urls = " ".join(replica.url for replica in replicas)
            environment = os.environ | {"REAL_VLLM_URLS": urls, "REAL_VLLM_DIR": str(directory)}
            status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
