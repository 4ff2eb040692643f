"""A request that asks for another protocol on its connection, as WebSockets do (vLLM's /v1/realtime)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.wire.attempts import Attempt, Ending, Observer, Outcome, Patience
from router.wire.http import as_lines, response_head
from router.wire.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.wire.front import Front
    from router.wire.http import Head, Headers, Request
    from router.wire.upstream import Pool


class Upgrade(Attempt):
    """Asks a replica to switch. One that does is joined to the client; the answer of one that does not is an answer as
    any other."""

    __slots__ = ("_switched", "_tunnel")

    def __init__(
        self,
        client: Front,
        request: Request,
        observer: Observer,
        patience: Patience,
        added: Headers | None,
        switched: Callable[[], None],
    ) -> None:
        """`switched` is told when the replica has agreed."""
        upgrade = [(b"Connection", b"Upgrade"), (b"Upgrade", request.upgrade)]
        super().__init__(client, request, observer, patience, [*(added or ()), *upgrade])
        self._switched = switched
        self._tunnel: Tunnel | None = None

    async def run(self, pool: Pool, body: bytes) -> Outcome:
        try:
            outcome = await super().run(pool, body)
            if self._tunnel is None:
                return outcome
            why = await self._tunnel.over
            return Outcome(Ending.COMPLETE, self._status, why)
        finally:
            if self._tunnel is not None:
                self._tunnel.close()

    def lost(self, why: str) -> None:
        if self._tunnel is None:
            super().lost(why)
        else:
            self._tunnel.end(why)

    def switched(self, head: Head, rest: bytes) -> bool:
        """It agreed."""
        connection = self._connection
        assert connection is not None
        assert connection.transport is not None
        self._begun(head)
        extra = self._observer.answering(head, self._last)
        agreed = [(b"Connection", b"Upgrade"), (b"Upgrade", head.header(b"upgrade") or self._request.upgrade)]
        client, ahead = self._client.leave_http()
        client.write(response_head(head, extra + as_lines(agreed), chunked=False, close=False) + rest)
        if ahead:
            connection.transport.write(ahead)
        self._tunnel = Tunnel(
            client,
            connection.transport,
            idle_seconds=self._patience.idle,
            heard=lambda: self._observer.feed(b"", self._loop.time()),
        )
        self._switched()
        self._settle(Outcome(Ending.COMPLETE, head.status))
        return True
