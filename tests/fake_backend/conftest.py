from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from fake_backend import settings
from fake_backend.server import Server
from tests.wire.conftest import one_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["one_tokenizer", "start"]


@pytest.fixture
async def start(one_tokenizer: None) -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """Start a replica with these flags on a free port; all of them end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(*flags: str) -> Server:
            chosen = settings.read(("--model", "Qwen3-0.6B", "--port", "0", "--time-scale", "0", *flags))
            return await stack.enter_async_context(Server(chosen))

        yield run
