"""The control API, on paths that no vLLM has: ``/fake/faults``, ``/fake/restart``, ``/fake/refuse``, ``/fake/gpu``.

GET    /fake/faults                       the rules in force, and how often each was run into
POST   /fake/faults  {"kind": ...}        add one rule, or a list of them
DELETE /fake/faults                       drop all rules
POST   /fake/restart {"seconds": 0}       the cache is lost, the address comes back after so many seconds
POST   /fake/refuse  {"seconds": 1}       connections are refused for so long
POST   /fake/gpu     {"slowdown": 1}      every step takes so many times as long
POST   /fake/keep_alive {"seconds": 5}    idle connections are closed after so long
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.faults import FaultError, read_rule, shown
from fake_backend.wire import Exchange

if TYPE_CHECKING:
    from fake_backend.server import Server

_running: set[asyncio.Task[None]] = set()


async def handle(server: "Server", exchange: Exchange) -> None:
    """Answer one control request; 400 names what is wrong with it."""
    request = exchange.request
    try:
        value = orjson.loads(request.body) if request.body else {}
        answer = act(server, request.method, request.path, value)
    except (FaultError, orjson.JSONDecodeError) as error:
        exchange.reply(400, compact({"error": str(error)}), JSON_HEADERS)
        return
    if answer is None:
        exchange.reply(404, compact({"detail": "Not Found"}), JSON_HEADERS)
    else:
        exchange.reply(200, answer, JSON_HEADERS)


def act(server: "Server", method: str, path: str, value: Any) -> bytes | None:
    """Do what a control request says: the rules then in force, None for an unknown path. Raises FaultError."""
    match method, path:
        case "GET", "/fake/faults":
            pass
        case "POST", "/fake/faults":
            for rule in [read_rule(item) for item in (value if isinstance(value, list) else [value])]:
                server.faults.add(rule)
        case "DELETE", "/fake/faults":
            server.faults.clear()
        case "POST", "/fake/restart":
            _later(server.restart(_number(value, "seconds", 0.0)))
        case "POST", "/fake/refuse":
            _later(server.refuse(_number(value, "seconds", 1.0)))
        case "POST", "/fake/gpu":
            slowdown = _number(value, "slowdown", 1.0)
            for engine in server.replica.engines:
                engine.step_time = replace(engine.step_time, slowdown=slowdown)
        case "POST", "/fake/keep_alive":
            server.listener.keep_alive = _number(value, "seconds", 5.0)
        case _:
            return None
    return shown(server.faults.rules)


def _later(work: Any) -> None:
    """After the answer has gone out: the connection it goes over is among those that end."""

    async def run() -> None:
        await asyncio.sleep(0.05)
        await work

    task = asyncio.get_running_loop().create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)


def _number(value: Any, name: str, default: float) -> float:
    found = value.get(name, default) if isinstance(value, dict) else None
    if not isinstance(found, int | float) or isinstance(found, bool) or found < 0:
        raise FaultError(f"{name} must be a number of at least 0, got {value!r}")
    return float(found)
