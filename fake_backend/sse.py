"""Server-sent events of a generation: when to write, how to stop, what to say when the engine fails half-way."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from fake_backend.errors import ApiError, compact
from fake_backend.runtime import Signal, Ticket
from fake_backend.wire import Exchange

STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("vary", "Origin"))
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + compact(value) + b"\n\n"


def failure(error: ApiError) -> bytes:
    """What follows a 200 whose request then failed in the engine."""
    return b"data: " + json.dumps({"error": error.detail()}).encode() + b"\n\n" + DONE


class Progress:
    """Which tokens of an exchange's tickets have been told so far."""

    def __init__(self, tickets: Sequence[Ticket], signal: Signal) -> None:
        self._tickets = tickets
        self._signal = signal
        self._seen = [0] * len(tickets)
        self._over = [False] * len(tickets)

    async def steps(self, exchange: Exchange, keep_alive: float = 0.0) -> AsyncIterator[tuple[int, int, int]]:
        """(ticket, first new token, tokens so far) whenever a ticket got something new; its end comes exactly once.

        What piles up while the client doesn't read comes in one piece, as vLLM's output collector does it.
        ``keep_alive``: seconds of silence after which a comment is sent, 0 for never.
        """
        while True:
            news = False
            for i, ticket in enumerate(self._tickets):
                so_far = ticket.request.generated
                if self._over[i] or (so_far <= self._seen[i] and not ticket.done):
                    continue
                news = True
                first, self._seen[i] = self._seen[i], so_far
                self._over[i] = ticket.done
                yield i, first, so_far
            if all(self._over):
                return
            # Nothing may be awaited between looking and waiting, or a wake-up in between is lost.
            if news:
                await exchange.drain()
            else:
                await self._wait(exchange, keep_alive)

    async def _wait(self, exchange: Exchange, keep_alive: float) -> None:
        if not keep_alive:
            await self._signal.wait()
            return
        try:
            await asyncio.wait_for(self._signal.wait(), keep_alive)
        except TimeoutError:
            exchange.send(b": keep-alive\n\n")


async def all_done(tickets: Sequence[Ticket], signal: Signal) -> None:
    """Until every ticket has ended."""
    while not all(ticket.done for ticket in tickets):
        await signal.wait()
