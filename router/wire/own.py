"""What the router answers itself on the clients' side. Every other path and method is a replica's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import orjson

from router.telemetry import CONTENT_TYPE
from router.wire import errors
from router.wire.errand import Errand
from router.wire.http import Head, response_head
from router.wire.keys import OPEN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router.wire.errand import Task
    from router.wire.front import Front
    from router.wire.http import Request

PATHS: Final = frozenset([path.decode() for path in OPEN])
MODELS: Final = "/v1/models"


class Own:
    """GET and HEAD of /health (the router lives), /ready (it can serve; 503 says what is missing, 200 what it does
    without), /metrics, and of /v1/models where no replica could answer for all.

    `models`: the entries of that list; None where every replica has the same.
    """

    def __init__(
        self,
        beyond: Callable[[Request, Front, Callable[[Task], None]], Task],
        *,
        missing: Callable[[], list[str]],
        lacking: Callable[[], list[str]],
        metrics: Callable[[], Awaitable[bytes]],
        models: Callable[[], list[dict[str, Any]] | None],
    ) -> None:
        self._beyond = beyond
        self._missing = missing
        self._lacking = lacking
        self._metrics = metrics
        self._models = models

    def serve(self, request: Request, client: Front, ended: Callable[[Task], None]) -> Task:
        if request.method not in (b"GET", b"HEAD") or not self._answers(request.path):
            return self._beyond(request, client, ended)
        errand = Errand(asyncio.get_running_loop(), self._serve(request, client), ended)
        errand.begin()
        return errand

    def _answers(self, path: str) -> bool:
        return path in PATHS or (path == MODELS and self._models() is not None)

    async def _serve(self, request: Request, client: Front) -> None:
        match request.path:
            case "/health":
                _answer(request, client, 200, "application/json", b'{"status":"ok"}')
            case "/ready":
                missing = self._missing()
                body = orjson.dumps({"ready": not missing, "missing": missing or self._lacking()})
                _answer(request, client, 503 if missing else 200, "application/json", body)
            case "/metrics":
                await self._page(request, client)
            case _:
                page = orjson.dumps({"object": "list", "data": self._models() or []})
                _answer(request, client, 200, "application/json", page)

    async def _page(self, request: Request, client: Front) -> None:
        try:
            page = await self._metrics()
        except OSError as error:
            # Half of the numbers would look like a fall of all of them.
            client.refuse(errors.Refusal(503, "ServiceUnavailableError", f"The metrics cannot be gathered: {error}."))
        else:
            _answer(request, client, 200, CONTENT_TYPE, page)


def _answer(request: Request, client: Front, status: int, kind: str, body: bytes) -> None:
    reason = b"OK" if status == 200 else b"Service Unavailable"
    head = Head(
        status,
        reason,
        [(b"Content-Type", kind.encode()), (b"Content-Length", b"%d" % len(body)), (b"Cache-Control", b"no-store")],
    )
    client.begin()
    client.write(response_head(head, b"", chunked=False, close=not client.keep_alive))
    if request.method != b"HEAD":
        client.write(body)
    client.finish()
