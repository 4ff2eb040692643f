"""Real vLLM replicas on this machine: started, waited for, and ended with everything they started."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from install import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_SIZE = 32  # a multiple of 32 on the CPU
MAX_MODEL_LEN = 4096
SERVED_NAME = "tiny"
START_SECONDS = 300.0


_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out by itself: an engine takes a minute to bind
    it, and must find it still free."""
    for port in random.sample(range(20_000, 32_000), 200):
        if port not in _given:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                _given.add(port)
                return port
    raise RuntimeError("no free port between 20000 and 32000")


@dataclass
class Replica:
    """One `vllm serve` process. `seed` is its PYTHONHASHSEED, None for unset. `role`: kv_producer or kv_consumer, of a
    pair joined by NIXL over TCP; `load_failure`: what a consumer does where KV does not come, fail or recompute."""

    directory: Path
    logs: Path
    algorithm: str = "sha256_cbor"
    seed: str | None = "0"
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    role: str | None = None
    load_failure: str = "fail"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED" and not k.startswith("VLLM_")}
        environment |= {
            "PATH": f"{self.directory / 'venv' / 'bin'}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.seed is not None:
            environment["PYTHONHASHSEED"] = self.seed
        transfer: tuple[str, ...] = ()
        if self.role is not None:
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
            }
            config = {
                "kv_connector": "NixlConnector",
                "kv_role": self.role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": self.load_failure,
            }
            transfer = ("--kv-transfer-config", json.dumps(config))
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "kv",
        }
        command = [
            *(str(self.directory / "venv" / "bin" / "vllm"), "serve", MODEL),
            *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", "--enforce-eager"),
            *("--block-size", str(BLOCK_SIZE), "--prefix-caching-hash-algo", self.algorithm),
            *("--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details", "--enable-scale-out"),
            *transfer,
            *self.flags,
        ]
        self.logs.mkdir(parents=True, exist_ok=True)
        self._log = self.logs / f"vllm-{self.port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def wait(self) -> None:
        """Until it answers /health. Raises RuntimeError with the log's end if it won't."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended at start:\n{self._log.read_text(errors='replace')[-4000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM isn't up after {START_SECONDS:.0f} s, see {self._log}")

    def kill(self) -> None:
        """End it as a crash does, its whole group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the process; its group too, so that no engine core is left behind."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(*replicas: Replica) -> Iterator[None]:
    """All of them started at once, and ended when the block is left."""
    started = []
    try:
        for replica in replicas:
            replica.start()
            started.append(replica)
        for replica in replicas:
            replica.wait()
        yield
    finally:
        for replica in started:
            replica.stop()
