"""Host names to addresses, off the way of requests.

A name that cannot be resolved holds one of the event loop's few resolver threads for many seconds; asked for again and
again it would hold them all, and nothing could connect any more. So a name is asked for once at a time, what it meant
last is used meanwhile, and it is asked for anew only now and then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

FRESH_SECONDS = 30.0
"""What a name means may change: a restarted container has another address."""


class Name:
    """One host. `resolve` never asks twice at one time."""

    __slots__ = ("_addresses", "_asked_at", "_asking", "_host", "_literal", "_loop", "_port")

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._addresses: list[str] = []
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._literal = _is_address(host)

    async def resolve(self) -> str:
        """An address of the host. Raises OSError where it has none."""
        if self._literal:
            return self._host
        if self._addresses:
            if self._loop.time() - self._asked_at >= FRESH_SECONDS:
                self._ask()
            return self._addresses[0]
        asking = self._ask()
        # Whoever gives up waiting must not end it for the others.
        await asyncio.shield(asking)
        if not self._addresses:
            raise OSError(f"the name {self._host} could not be resolved")
        return self._addresses[0]

    def doubt(self, address: str) -> None:
        """Nobody answered at this address: try the next one, and ask for the name anew."""
        if address in self._addresses and len(self._addresses) > 1:
            self._addresses.remove(address)
            self._addresses.append(address)
        self._asked_at = min(self._asked_at, self._loop.time() - FRESH_SECONDS)

    def _ask(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._look_up())
        return self._asking

    async def _look_up(self) -> None:
        try:
            found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        self._asked_at = self._loop.time()
        if found:
            self._addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
