"""The admin side, on an address of its own: GET /router/replicas, POST /router/explain, GET /health and /metrics."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from router.telemetry import CONTENT_TYPE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    *,
    token: Callable[[], str | None],
    explain: Callable[[str, bytes], Awaitable[dict[str, Any]]],
    replicas: Callable[[], Awaitable[list[dict[str, Any]]]],
    metrics: Callable[[], Awaitable[bytes]],
    max_body_bytes: int,
) -> web.Application:
    """The admin side's routes. `token`: what `Authorization: Bearer` must carry just now; None asks for nothing."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (wanted := token()) is not None and request.path != "/health":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                return _error(401, "The admin side asks for `Authorization: Bearer TOKEN` (admin_token_file).")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, f"{error.reason}: the admin side serves /router/replicas and /router/explain.")

    async def health(_: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def list_replicas(_: web.Request) -> web.Response:
        return _json({"replicas": await replicas()})

    async def explain_request(request: web.Request) -> web.Response:
        body = await request.read()
        path = request.query.get("path") or _path_of(body)
        return _json(await explain(path, body))

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=await metrics(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(middlewares=[guard], client_max_size=max_body_bytes)
    app.router.add_get("/health", health)
    app.router.add_get("/router/replicas", list_replicas)
    app.router.add_get("/metrics", page)
    app.router.add_post("/router/explain", explain_request)
    return app


def _path_of(body: bytes) -> str:
    """Where a body without an address would have been sent."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and "prompt" in value:
        return "/v1/completions"
    return "/v1/chat/completions"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    kind = {401: "AuthenticationError", 404: "NotFoundError"}.get(status, "BadRequestError")
    return _json({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
