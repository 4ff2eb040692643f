"""Load in a response header, for balancers that read it there (ORCA): ``endpoint-load-metrics``."""

import json

from fake_backend.replica import Replica
from fake_backend.wire import Exchange


def add(replica: Replica, exchange: Exchange) -> None:
    """Add the header if the request asks for it with ``endpoint-load-metrics-format: TEXT`` or ``JSON``."""
    form = exchange.request.headers.get("endpoint-load-metrics-format", "").lower()
    if form not in ("text", "json"):
        return
    engine = replica.engines[0]
    waiting = float(len(engine.scheduler.waiting) + len(engine.scheduler.deferred))
    named = {"num_requests_waiting": waiting, "kv_cache_usage_perc": engine.pool.usage}
    if form == "text":
        value = "TEXT " + ", ".join(f"named_metrics.{name}={number}" for name, number in named.items())
    else:
        value = "JSON " + json.dumps({"named_metrics": named})
    exchange.extra_headers.append(("endpoint-load-metrics", value))
