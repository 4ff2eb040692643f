"""Starts a web application: on an address of its own, or on a socket that only this user can open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from router.config import ConfigError
from router.listening import reason

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


async def serve(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> tuple[str, int]:
    """Serve until the stack is unwound. Returns the address. Raises ConfigError."""
    runner = await _runner(stack, app)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason(error)}; choose another --admin-port, or -1 for none"
        ) from None
    found: tuple[str, int] = runner.addresses[0][:2]
    return found


async def serve_privately(stack: AsyncExitStack, app: web.Application, path: str) -> None:
    await web.UnixSite(await _runner(stack, app), path).start()


async def _runner(stack: AsyncExitStack, app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner
