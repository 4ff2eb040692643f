"""What /metrics tells of the parts as they stand when it is read. What is counted as it happens: `router.telemetry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.fleet.breaker import Condition
from router.fleet.replica import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.core import Metric

    from router.fleet.discovery import Fleet
    from router.fleet.links import Links
    from router.fleet.rates import Rates
    from router.index.feedback import Feedback
    from router.index.memory import Index
    from router.index.shared import Shared
    from router.wire.front import Door


def of_replicas(fleet: Fleet, index: Index, rates: Rates, feedback: Feedback, *, now: float) -> Iterable[Metric]:
    """Each replica's state and load. `now`: seconds, by the clock of its breakers."""
    ready = _by_replica("replica_ready", "1 where the replica takes requests.")
    breaker = GaugeMetricFamily(
        "warmroute_breaker",
        "1 for the state that a replica's breaker is in: open gives it no requests, half_open a single one.",
        labels=["replica", "state"],
    )
    in_flight = _by_replica("in_flight", "Requests sent and not yet ended.")
    decoding = _by_replica("decoding", "Of these, past their first token.")
    blocks = _by_replica("index_blocks", "Blocks the replica is presumed to hold.")
    degraded = _by_replica(
        "cache_routing_degraded", "1 where predictions of cached tokens stay wrong; the log says why."
    )
    error = _by_replica("prediction_error", "Mean error of predicted cached tokens, as a share of the prompt.")
    slowness = _by_replica("prefill_slowness", "Its prefill time over the fleet's typical one.")
    for replica in (*fleet, *fleet.leaving):
        label = [replica.name]
        ready.add_metric(label, float(replica.state is State.READY))
        state = replica.breaker.state(now)
        for each in Condition:
            breaker.add_metric([replica.name, each.value], float(each is state))
        in_flight.add_metric(label, replica.load.in_flight)
        decoding.add_metric(label, replica.load.decoding)
        blocks.add_metric(label, index.blocks(replica.name))
        slowness.add_metric(label, rates.slowness(replica.name))
        record = feedback.of(replica.name)
        degraded.add_metric(label, float(record.cause is not None))
        if record.compared:  # of an engine that tells nothing no error is known, least of all none
            error.add_metric(label, record.error)
    rate = GaugeMetricFamily("warmroute_prefill_tokens_per_second", "The prefill rate assumed for the fleet.")
    rate.add_metric([], 1000 / rates.token_ms)
    return ready, breaker, in_flight, decoding, blocks, degraded, error, slowness, rate


def of_splits(fleet: Fleet, pinned: Mapping[str, int], links: Links) -> Iterable[Metric]:
    """`pinned`: blocks kept at each replica until they are fetched."""
    here = {replica.name for replica in (*fleet, *fleet.leaving)}
    kept = _by_replica("split_pinned_blocks", "Blocks kept for a replica that has yet to fetch them.")
    for name, count in pinned.items():
        if name in here:
            kept.add_metric([name], count)
    speed = GaugeMetricFamily(
        "warmroute_split_link_bytes_per_second",
        "How fast KV gets from one replica to another, as measured.",
        labels=["prefill", "decode"],
    )
    for prefill, decode, link in links.measured():
        if {prefill, decode} <= here:
            speed.add_metric([prefill, decode], link.bandwidth)
    return kept, speed


def of_store(shared: Shared) -> Iterable[Metric]:
    yield GaugeMetricFamily("warmroute_shared_online", "1 where the shared store is used.", float(shared.online))
    yield GaugeMetricFamily("warmroute_shared_queue_blocks", "Blocks it is to be told of.", shared.waiting_blocks)
    yield GaugeMetricFamily("warmroute_shared_untold_pages", "Of what engines hold, to be told.", shared.untold_pages)
    yield CounterMetricFamily("warmroute_shared_dropped_blocks", "Blocks never told.", shared.dropped_blocks)
    yield CounterMetricFamily("warmroute_shared_timeouts", "Decisions that waited in vain.", shared.timeouts)
    yield CounterMetricFamily("warmroute_shared_faults", "Times that the connection was given up.", shared.faults)


def of_clients(door: Door | None) -> Iterable[Metric]:
    """None: nobody was let in yet."""
    connections = GaugeMetricFamily("warmroute_client_connections", "Open connections from clients.")
    connections.add_metric([], len(door.connections) if door else 0)
    held = GaugeMetricFamily("warmroute_buffered_bytes", "Request bodies held.")
    held.add_metric([], door.held_bytes if door else 0)
    return connections, held


def _by_replica(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"warmroute_{name}", text, labels=["replica"])
