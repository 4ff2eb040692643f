"""The same over real sockets and through the whole router: what hypothesis makes, sent and answered at once."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import uvloop
from hypothesis import given, note, settings

from router.app import Router
from tests.fuzz.conftest import EXAMPLES, FUZZ
from tests.fuzz.stage import pieces
from tests.fuzz.strategies import DRAWN, Choices, answer, cuts, each, request, sequence
from tests.wire.conftest import settings_for
from tests.wire.scripted import Raw, Received, Scripted, until

# A socket costs what a hundred exchanges in memory cost.
SHARE = 50


class Fleet:
    """A router before two replicas that answer whatever is next."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.said: list[bytes] = []

    async def start(self) -> None:
        self.replicas = [Scripted(self._answer) for _ in range(2)]
        for replica in self.replicas:
            await replica.start()
            self._stack.push_async_callback(replica.stop)
        short = dict.fromkeys(("header_timeout_seconds", "body_timeout_seconds", "keep_alive_seconds"), "0.2")
        settings = settings_for([replica.url for replica in self.replicas], first_byte_timeout_seconds=1, **short)
        self.router = await self._stack.enter_async_context(Router(settings))

    async def _answer(self, got: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.said.pop() if self.said else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        raise ConnectionError("that was all")

    async def play(self, data: bytes, where: list[int], leaves: bool) -> bytes:
        client = await Raw.connect(self.router.address)
        try:
            for piece in pieces(data, where):
                client.send(piece)
                await asyncio.sleep(0)
            if leaves:
                client.writer.write_eof()
            return await client.closed()
        finally:
            client.leave()

    async def at_rest(self) -> None:
        door = self.router.door
        assert door is not None
        await until(lambda: not door.connections, "all clients are gone")
        await until(lambda: all(not replica.load.in_flight for replica in self.router.fleet), "nothing is in flight")
        await until(lambda: door.held_bytes == 0, "no body is held")


def test_nothing_is_left_of_what_peers_send() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        fleet = Fleet(stack)
        runner.run(fleet.start())

        @settings(FUZZ, max_examples=max(10, EXAMPLES // SHARE))
        @given(DRAWN)
        def attempt(drawn: bytes) -> None:
            runner.run(_play(fleet, each(drawn)))

        attempt()
        runner.run(stack.aclose())


async def _play(fleet: Fleet, examples: list[Choices]) -> None:
    playing = []
    for choices in examples:
        leaves, where = choices.below(4) == 3, cuts(choices)
        data, said = sequence(choices, request), sequence(choices, answer)
        note(f"{data!r}, cut at {where}, {'and left, ' if leaves else ''}is answered {said!r}")
        fleet.said.append(said)
        playing.append(fleet.play(data, where, leaves))
    for got in await asyncio.gather(*playing):
        assert not got or re.match(rb"HTTP/1\.1 [1-5]\d\d ", got)
        assert b"The router failed" not in got
    await fleet.at_rest()
