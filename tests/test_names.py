from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from router.names import FRESH_SECONDS, Name


class Resolver:
    """Stands in for the system's resolver, which cannot be made slow or wrong at will."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked = 0
        self.answer: list[str] | None = ["10.0.0.1", "10.0.0.2"]
        self.go = asyncio.Event()
        self.go.set()
        self.now = 1000.0
        monkeypatch.setattr(self.loop, "getaddrinfo", self._getaddrinfo)
        monkeypatch.setattr(self.loop, "time", lambda: self.now)

    async def _getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked += 1
        await self.go.wait()
        if self.answer is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.answer]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_addresses_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    assert [await Name(host, 1).resolve() for host in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
    assert resolver.asked == 0


async def test_a_name_is_asked_for_once_at_a_time_and_then_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.go.clear()
    name = Name("replica", 1)
    waiting = [asyncio.create_task(name.resolve()) for _ in range(10)]
    await settle()
    waiting[0].cancel()
    await settle()
    resolver.go.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.result() for task in waiting[1:]] == ["10.0.0.1"] * 9
    assert await name.resolve() == "10.0.0.1"
    assert resolver.asked == 1


async def test_what_it_meant_last_is_used_while_it_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    name = Name("replica", 1)
    await name.resolve()
    resolver.now += FRESH_SECONDS
    resolver.answer = None
    resolver.go.clear()
    assert [await name.resolve() for _ in range(5)] == ["10.0.0.1"] * 5
    await settle()
    assert resolver.asked == 2
    resolver.go.set()
    await settle()
    assert await name.resolve() == "10.0.0.1"  # a name that is gone for now does not take the address with it
    resolver.now += FRESH_SECONDS
    resolver.answer = ["10.0.0.9"]
    await name.resolve()
    await settle()
    assert await name.resolve() == "10.0.0.9"


async def test_an_address_in_doubt_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    name = Name("replica", 1)
    assert await name.resolve() == "10.0.0.1"
    name.doubt("10.0.0.1")
    assert await name.resolve() == "10.0.0.2"
    await settle()
    assert resolver.asked == 2


async def test_a_name_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.answer = None
    with pytest.raises(OSError, match="replica could not be resolved"):
        await Name("replica", 1).resolve()
