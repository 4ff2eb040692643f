"""What VLLM_SERVER_DEV_MODE=1 adds: caches reset, engines put to sleep or paused."""

from fake_backend.errors import JSON_HEADERS, compact
from fake_backend.replica import Replica
from fake_backend.tier import CpuTier
from fake_backend.wire import Exchange

_EMPTY = (("vary", "Origin"),)


def _flag(exchange: Exchange, name: str) -> bool:
    return exchange.request.query.get(name, "false").lower() in ("1", "true", "yes", "on")


async def reset_prefix_cache(replica: Replica, exchange: Exchange) -> None:
    """Refused while blocks are in use, unless running requests may be sent back into line."""
    preempt = _flag(exchange, "reset_running_requests")
    results = [engine.reset_prefix_cache(preempt=preempt) for engine in replica.engines]
    success = all(results)
    if _flag(exchange, "reset_external"):
        for engine in replica.engines:
            if isinstance(engine.connector, CpuTier):
                engine.connector.clear()
    exchange.reply(200, compact({"success": success}), JSON_HEADERS)


async def reset_nothing(replica: Replica, exchange: Exchange) -> None:
    """The multimodal and encoder caches, which a text model doesn't have."""
    del replica
    exchange.reply(200, b"", _EMPTY)


async def sleep(replica: Replica, exchange: Exchange) -> None:
    """Level 1 offloads the weights, level 2 discards them; either way the KV cache is gone."""
    level = exchange.request.query.get("level", "1")
    for engine in replica.engines:
        engine.stopped = True
        engine.reset_prefix_cache(preempt=True)
    replica.sleeping = True
    replica.metrics.sleeping("discard_all" if level == "2" else "weights_offloaded")
    exchange.reply(200, b"", _EMPTY)


async def wake_up(replica: Replica, exchange: Exchange) -> None:
    replica.sleeping = False
    replica.metrics.sleeping("awake")
    _go_on(replica)
    exchange.reply(200, b"", _EMPTY)


async def is_sleeping(replica: Replica, exchange: Exchange) -> None:
    exchange.reply(200, compact({"is_sleeping": replica.sleeping}), JSON_HEADERS)


async def pause(replica: Replica, exchange: Exchange) -> None:
    """``abort`` (the default) ends what is there, ``keep`` freezes it, ``wait`` lets it finish; new requests wait."""
    mode = exchange.request.query.get("mode", "abort")
    replica.paused = True
    for engine in replica.engines:
        engine.scheduler.paused = True
        if mode == "abort":
            for request in list(engine.scheduler):
                engine.abort(request, replica.clock.now())
        elif mode == "keep":
            engine.stopped = True
    for rank in replica.ranks:
        rank.runtime.nudge()
    exchange.reply(200, compact({"status": "paused"}), JSON_HEADERS)


async def resume(replica: Replica, exchange: Exchange) -> None:
    replica.paused = False
    _go_on(replica)
    exchange.reply(200, compact({"status": "resumed"}), JSON_HEADERS)


async def is_paused(replica: Replica, exchange: Exchange) -> None:
    exchange.reply(200, compact({"is_paused": replica.paused}), JSON_HEADERS)


def _go_on(replica: Replica) -> None:
    for rank in replica.ranks:
        rank.engine.stopped = replica.sleeping
        rank.engine.scheduler.paused = replica.paused
        rank.runtime.nudge()
