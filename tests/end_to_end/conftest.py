"""The router before fake replicas, all in one event loop, with the official clients in front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from fake_backend import settings as fake_settings
from fake_backend.server import Server
from router.app import Router
from tests.wire.conftest import one_tokenizer, pytest_asyncio_loop_factories, settings_for
from tests.wire.scripted import Raw

__all__ = ["fleet", "one_tokenizer", "pytest_asyncio_loop_factories"]


class Fleet:
    """Fakes and a router before them; everything ends with the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def fake(self, *flags: str) -> Server:
        chosen = fake_settings.read(
            ("--model", "Qwen3-0.6B", "--port", "0", "--time-scale", "0", "--enable-prompt-tokens-details", *flags)
        )
        return await self._stack.enter_async_context(Server(chosen))

    async def router(self, *fakes: Server, **changes: Any) -> Router:
        settings = settings_for([fake.url for fake in fakes], **changes)
        return await self._stack.enter_async_context(Router(settings))

    async def client(self, router: Router) -> Raw:
        return await self._connect(*router.address)

    async def direct(self, fake: Server) -> Raw:
        """A client that goes past the router."""
        host, _, port = fake.url.removeprefix("http://").partition(":")
        return await self._connect(host, int(port))

    async def _connect(self, host: str, port: int) -> Raw:
        client = await Raw.connect((host, port))
        self._stack.callback(client.writer.close)
        return client

    async def openai(self, router: Router) -> openai.AsyncOpenAI:
        host, port = router.address
        return await self._stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        )


@pytest.fixture
async def fleet(one_tokenizer: None) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack)
