"""A replica as the admin side lists it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.fleet.replica import Replica
    from router.index.feedback import Record


def listed(replica: Replica, record: Record, *, blocks: int, residency: str | None, now: float) -> dict[str, Any]:
    """All that is known of it. `record`: how predictions of its hits fared. `blocks`, `residency`: what it is thought
    to hold, in number and in words. `now`: seconds, by the loop's clock."""
    metrics = replica.metrics
    return {
        "replica": replica.name,
        "state": replica.state.name.lower(),
        "why": replica.why or None,
        "role": replica.role.value,
        "breaker": {
            "state": replica.breaker.state(now).value,
            "failures_in_a_row": replica.breaker.failures,
            "next_trial_in_seconds": round(replica.breaker.seconds_left(now), 3),
        },
        "epoch": replica.epoch,
        "models": {
            card.id: {"root": card.root, "parent": card.parent, "max_model_len": card.max_model_len}
            for card in replica.models.values()
        },
        "block_size": replica.block_size,
        "num_gpu_blocks": replica.cache.num_gpu_blocks,
        "algorithm": replica.algorithm,
        "prefix_caching": replica.cache.prefix_caching,
        "blocks_presumed": blocks,
        "residency": residency,
        "in_flight": replica.load.in_flight,
        "decoding": replica.load.decoding,
        "waiting_ms": round(replica.load.waiting_ms(now), 3),
        "engine": {
            "running": metrics.running,
            "waiting": metrics.waiting,
            "kv_usage": metrics.kv_usage,
            "read_seconds_ago": None if replica.scraped_at is None else round(now - replica.scraped_at, 3),
        },
        "predictions": {
            "compared": record.compared,
            "exact": record.exact,
            "predicted_tokens": record.predicted,
            "delivered_tokens": record.delivered,
            "error": round(record.error, 4),
            "pool_share": round(record.pool_share, 3),
            "degraded": record.cause,
        },
    }
