from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import uvloop

from router.app import Router
from router.config import Settings, load
from router.fleet.replica import State
from router.prompt.tokens import Tokenizer
from router.wire.front import Front
from tests.wire.scripted import BOUND, Raw, Script, Scripted


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


_load = functools.cache(Tokenizer.load)


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory is read once for all tests: it takes long, and what is read never changes."""
    monkeypatch.setattr(Tokenizer, "load", _load)


class Bench:
    """Builds replicas, routers and clients, and takes all of them down at the end of the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def replica(self, script: Script | None = None) -> Scripted:
        replica = await Scripted(script).start()
        self._stack.push_async_callback(replica.stop)
        return replica

    async def router(self, *replicas: Scripted, **changes: Any) -> Router:
        """`changes`: leaf settings by name."""
        settings = settings_for([replica.url for replica in replicas], **changes)
        return await self._stack.enter_async_context(Router(settings))

    async def client(self, router: Router) -> Raw:
        client = await Raw.connect(router.address)
        self._stack.callback(client.writer.close)
        return client


def settings_for(urls: list[str], **changes: Any) -> Settings:
    # A replica that is slow to be asked, since all are in one process on a busy machine, is there all the same.
    usual = {"port": "0", "admin_port": "-1", "drain_seconds": "0.2", "probe_timeout_seconds": "20"}
    flags = {**usual, **{k: str(v) for k, v in changes.items()}}
    return load(replicas=urls, flags=flags, environ={})


async def probed(router: Router, replica: Scripted, rounds: int = 1) -> State:
    """Rounds of questions to a replica, and what it then is. One that is deaf never answers, so it is not waited for;
    any other has the time that it needs."""
    assert router._roster is not None
    probe = router._roster._asked[replica.name].probe
    probe._timeout = aiohttp.ClientTimeout(total=0.01 if replica.deaf else BOUND)
    for _ in range(rounds):
        await probe.once()
    return router.fleet[replica.name].state


def older(front: Front, seconds: float) -> None:
    """So much time has gone by at a client's connection."""
    front._progress -= seconds
    front._head_since -= seconds
    front._body_since -= seconds


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(stack)
