"""The HTTP server: routes, authorisation, faults, and what every request has in common."""

import asyncio
import hmac
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from fake_backend import (
    chat,
    completions,
    control,
    dev,
    embeddings,
    fault_script,
    info,
    lora,
    messages,
    render,
    responses,
    tokens,
)
from fake_backend.errors import JSON_HEADERS, ApiError, compact, engine_failure
from fake_backend.faults import METRICS_KINDS, Faults
from fake_backend.metrics import CONTENT_TYPE
from fake_backend.replica import Replica
from fake_backend.settings import Settings
from fake_backend.wire import ClientGoneError, Exchange, Listener, Request

log = logging.getLogger("fake_backend")

Endpoint = Callable[[Replica, Exchange], Awaitable[None]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths that --api-key protects; all others stay open, as in vLLM."""

_COMMON: dict[tuple[str, str], Endpoint] = {
    ("GET", "/health"): info.health,
    ("GET", "/ping"): info.health,
    ("POST", "/ping"): info.health,
    ("GET", "/version"): info.version,
    ("GET", "/load"): info.load,
    ("GET", "/metrics"): info.metrics,
    ("GET", "/kv_event_sources"): info.kv_event_sources,
    ("GET", "/v1/models"): info.models,
    ("POST", "/tokenize"): tokens.tokenize,
    ("POST", "/detokenize"): tokens.detokenize,
}
_GENERATE: dict[tuple[str, str], Endpoint] = {
    ("POST", "/v1/chat/completions"): chat.handle,
    ("POST", "/v1/completions"): completions.handle,
    ("POST", "/v1/chat/completions/render"): render.render_chat,
    ("POST", "/v1/completions/render"): render.render_completion,
    ("POST", "/inference/v1/generate"): render.generate,
    ("POST", "/v1/responses"): responses.handle,
    ("POST", "/v1/messages"): messages.handle,
    ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
    ("POST", "/inference/v1/abort_requests"): render.abort_requests,
}
_LORA: dict[tuple[str, str], Endpoint] = {
    ("POST", "/v1/load_lora_adapter"): lora.load,
    ("POST", "/v1/unload_lora_adapter"): lora.unload,
}
_DEV: dict[tuple[str, str], Endpoint] = {
    ("POST", "/reset_prefix_cache"): dev.reset_prefix_cache,
    ("POST", "/reset_mm_cache"): dev.reset_nothing,
    ("POST", "/reset_encoder_cache"): dev.reset_nothing,
    ("POST", "/sleep"): dev.sleep,
    ("POST", "/wake_up"): dev.wake_up,
    ("GET", "/is_sleeping"): dev.is_sleeping,
    ("POST", "/pause"): dev.pause,
    ("POST", "/resume"): dev.resume,
    ("GET", "/is_paused"): dev.is_paused,
}
_POOL: dict[tuple[str, str], Endpoint] = {("POST", "/v1/embeddings"): embeddings.handle}


def _stored_response(request: Request) -> Endpoint | None:
    """The one route with a name in its path."""
    head, *rest = request.path.removeprefix("/v1/responses/").split("/")
    asks = (request.method, rest) in (("GET", []), ("POST", ["cancel"]))
    return responses.not_stored if asks and head and request.path.startswith("/v1/responses/") else None


class Server:
    """One replica behind one address. Usable in a process of its own (cli.py) or inside a test."""

    def __init__(self, settings: Settings) -> None:
        self.faults = Faults()
        self.replica = Replica(settings, self.faults)
        self._script: asyncio.Task[None] | None = None
        self.died = asyncio.Event()
        """The engine is dead, and the server with it unless VLLM_KEEP_ALIVE_ON_ENGINE_DEATH says otherwise."""
        self.replica.on_death = self._engine_died
        self.listener = Listener(self._handle, settings.host, settings.port)
        self.routes = self._routes(settings)
        self._paths: dict[str, list[str]] = {}
        for method, path in self.routes:
            self._paths.setdefault(path, []).append(method)

    def _routes(self, settings: Settings) -> dict[tuple[str, str], Endpoint]:
        # A real replica serves either kind of model; this one has embeddings beside text, for it has neither model.
        kinds = _POOL if settings.embedding else _GENERATE | _POOL
        dev = _DEV if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" else {}
        adapters = _LORA if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1" else {}
        return _COMMON | kinds | dev | adapters

    def _engine_died(self) -> None:
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1":
            return

        async def leave() -> None:
            await asyncio.sleep(0.05)  # what was under way is told so first
            await self.listener.close()
            self.died.set()

        self._leaving = asyncio.get_running_loop().create_task(leave())

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        return f"http://{self.listener.host}:{self.listener.port}"

    async def start(self) -> None:
        """Listen and run the engines. Raises OSError if the address is taken."""
        script = fault_script.read(self.replica.settings.faults) if self.replica.settings.faults else []
        await self.listener.open()
        try:
            await self.replica.start()
        except OSError:
            await self.listener.close()
            raise
        if script:
            act = partial(control.act, self)
            self._script = asyncio.get_running_loop().create_task(fault_script.play(script, self, act))

    async def stop(self) -> None:
        if self._script is not None:
            self._script.cancel()
        await self.listener.close()
        await self.replica.stop()

    async def restart(self, down: float = 0.0) -> None:
        """Vanish, lose everything in the cache, and come back at the same address after ``down`` seconds."""
        await self.listener.close(reset=True)
        await self.replica.restart()
        if down:
            await asyncio.sleep(down)
        await self.listener.open()

    async def refuse(self, seconds: float) -> None:
        """Refuse connections for a while, without losing the cache; open ones are reset."""
        await self.listener.close(reset=True)
        await asyncio.sleep(seconds)
        await self.listener.open()

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.stop()

    async def _handle(self, exchange: Exchange) -> None:
        request, replica = exchange.request, self.replica
        if request.path.startswith("/fake/"):
            await control.handle(self, exchange)
            return
        began = time.perf_counter()
        replica.in_server += 1
        route = "none"
        try:
            if replica.settings.request_id_headers:
                identity = request.headers.get("x-request-id") or uuid.uuid4().hex
                exchange.extra_headers.append(("x-request-id", identity))
            rule = self.faults.find(request.path)
            if rule is not None and await self.faults.before(rule, exchange):
                return
            if not self._authorised(exchange):
                exchange.reply(401, compact({"error": "Unauthorized"}), JSON_HEADERS[:1])
                return
            endpoint = self.routes.get((request.method, request.path)) or _stored_response(request)
            if endpoint is None:
                route = request.path if self._no_such_route(exchange) else "none"
                return
            route = request.path
            if rule is not None and rule.kind in METRICS_KINDS:
                text = self.faults.metrics(rule, replica.metrics.text())
                exchange.reply(200, text, (("content-type", CONTENT_TYPE), *info.VARY))
                return
            if rule is not None and rule.kind == "engine_error":
                raise engine_failure()
            await endpoint(replica, exchange)
        except ApiError as error:
            if error.status < 500 or error.status == 503:  # it never came to an engine
                replica.refused(request)
            if not exchange.status:
                exchange.reply(error.status, error.body(), JSON_HEADERS)
        except ClientGoneError:
            pass
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if not exchange.status:
                exchange.reply(500, engine_failure().body(), JSON_HEADERS)
        finally:
            replica.in_server -= 1
            if exchange.status:
                sizes = (len(request.body), exchange.bytes_out)
                took = time.perf_counter() - began
                replica.metrics.http.observe(request.method, route, exchange.status, sizes, took)

    def _authorised(self, exchange: Exchange) -> bool:
        keys = self.replica.settings.api_keys
        if not keys or not exchange.request.path.startswith(_GUARDED) or exchange.request.method == "OPTIONS":
            return True
        scheme, _space, token = exchange.request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and any(
            hmac.compare_digest(token.encode("utf-8", "surrogateescape"), key.encode()) for key in keys
        )

    def _no_such_route(self, exchange: Exchange) -> bool:
        """Answer 405 where the path exists (True), 404 where it doesn't."""
        methods = self._paths.get(exchange.request.path)
        if methods is None:
            exchange.reply(404, compact({"detail": "Not Found"}), JSON_HEADERS)
            return False
        headers = (("allow", ", ".join(sorted(methods))), *JSON_HEADERS)
        exchange.reply(405, compact({"detail": "Method Not Allowed"}), headers)
        return True
