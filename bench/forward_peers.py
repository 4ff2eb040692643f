"""The routers that are measured beside one another, and how each is started."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.processes import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Command: TypeAlias = Callable[[tuple[int, int], Sequence[str], Path], list[str]]

KEPT_CONNECTIONS = 64

_NGINX = """
daemon off; master_process off; worker_processes 1; worker_rlimit_nofile {files};
error_log stderr crit; pid {directory}/nginx.pid;
events {{ worker_connections {files}; }}
http {{
  access_log off; tcp_nodelay on; keepalive_timeout 1h; keepalive_requests 1000000000;
  client_max_body_size 64m; client_body_buffer_size 512k; client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u;
  scgi_temp_path {directory}/s;
  upstream replicas {{ {servers} keepalive {kept}; keepalive_requests 1000000000; keepalive_timeout 1h; }}
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
      proxy_connect_timeout 60s; proxy_read_timeout 1h; proxy_send_timeout 1h; send_timeout 1h;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A router. `command` makes its command line from the port to serve on and one for metrics, the
    replicas' URLs, and a directory of its own.

    `missing`: how to install it, where it is not. `yardstick`: no router to be compared with, but what bounds them.
    """

    name: str
    command: Command
    missing: str | None = None
    yardstick: bool = False


def warmroute(ports: tuple[int, int], replicas: Sequence[str], _: Path, more: Sequence[str] = ()) -> list[str]:
    where = ["--host", HOST, "--port", str(ports[0]), "--admin-port", "-1", "--max-connections", "20000"]
    return [sys.executable, "-m", "router", "serve", *replicas, *where, *more]


def _proxy(kind: str) -> Command:
    return lambda ports, replicas, _: [sys.executable, "-m", "bench.forward_proxies", kind, str(ports[0]), *replicas]


def _nginx(ports: tuple[int, int], replicas: Sequence[str], directory: Path) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')} max_fails=0;" for url in replicas)
    config = directory / "nginx.conf"
    values = {"directory": directory, "servers": servers, "kept": KEPT_CONNECTIONS, "host": HOST, "port": ports[0]}
    config.write_text(_NGINX.format(files=open_files(), **values))
    return [_found("nginx") or "nginx", "-p", str(directory), "-c", str(config)]


def _smg(program: str, backend: Sequence[str]) -> Command:
    def command(ports: tuple[int, int], replicas: Sequence[str], _: Path) -> list[str]:
        where = ["--host", HOST, "--port", str(ports[0])]
        where += ["--prometheus-host", HOST, "--prometheus-port", str(ports[1])]
        how = ["--policy", "cache_aware", "--log-level", "warn", *backend]
        return [_found(program) or program, "launch", *where, *how, "--worker-urls", *replicas]

    return command


def _vllm_router(ports: tuple[int, int], replicas: Sequence[str], _: Path) -> list[str]:
    where = ["--host", HOST, "--port", str(ports[0])]
    where += ["--prometheus-host", HOST, "--prometheus-port", str(ports[1])]
    how = ["--policy", "cache_aware", "--worker-startup-check-interval", "1", "--log-level", "warning"]
    return [_found("vllm-router") or "vllm-router", *where, *how, "--worker-urls", *replicas]


def _found(program: str) -> str | None:
    """A program on the PATH, or in a virtual environment of its own below BENCH_PEERS."""
    kept = Path(os.environ.get("BENCH_PEERS", "~/.cache/warmroute-peers")).expanduser() / program / "bin" / program
    return str(kept) if kept.is_file() else shutil.which(program)


def open_files() -> int:
    """How many files a process here may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


_VENV = "python3 -m venv ~/.cache/warmroute-peers/{0} && ~/.cache/warmroute-peers/{0}/bin/pip install {1}"
_OTHERS: dict[str, tuple[Command, str]] = {
    "nginx": (_nginx, "apt-get install nginx"),
    "smg": (_smg("smg", ["--backend", "vllm"]), _VENV.format("smg", "smg==1.13.0")),
    "vllm-router": (_vllm_router, _VENV.format("vllm-router", "vllm-router==0.1.17")),
    "sglang-router": (_smg("sglang-router", []), _VENV.format("sglang-router", "sglang-router==0.3.2")),
}
NAMES = ("nginx", "aiohttp", "smg", "vllm-router", "sglang-router")


def peers(names: Sequence[str]) -> list[Peer]:
    """The routers of these NAMES, then the yardstick, then the router of this project."""
    found = []
    for name in names:
        if name in _OTHERS:
            command, how = _OTHERS[name]
            found.append(Peer(name, command, None if _found(name) else how))
        else:
            found.append(Peer(name, _proxy("aiohttp"), yardstick=True))
    return [*found, Peer("bare", _proxy("bare"), yardstick=True), Peer("warmroute", warmroute)]
