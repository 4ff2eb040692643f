"""One engine's NIXL connector, put together: what ``--kv-transfer-config`` and vLLM's environment variables say."""

import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fake_backend.link import Link
from fake_backend.side_channel import Courier, SideChannel
from fake_backend.transfer import LEASE_SECONDS, Transfers

CONNECTORS = ("NixlConnector", "NixlPullConnector")
DEFAULT_PORT = 5600
LABELS = ("model_name", "engine")


class TransferConfigError(ValueError):
    """A ``--kv-transfer-config`` that this fake cannot play; one clear line."""


def check(config: dict[str, Any]) -> None:
    """Raises TransferConfigError."""
    if config.get("kv_connector") not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        raise TransferConfigError(f"--kv-transfer-config: kv_connector must be one of {known}, got {config!r}")
    if config.get("kv_role") not in ("kv_producer", "kv_consumer", "kv_both"):
        raise TransferConfigError(
            f"--kv-transfer-config: kv_role must be kv_producer, kv_consumer or kv_both, got {config.get('kv_role')!r}"
        )
    if config.get("kv_load_failure_policy", "fail") not in ("fail", "recompute"):
        raise TransferConfigError("--kv-transfer-config: kv_load_failure_policy must be fail or recompute")


class Nixl:
    """Scheduler side, listener and courier of one data-parallel rank."""

    def __init__(self, config: dict[str, Any], rank: int, link: str, bytes_per_token: float, devices: int) -> None:
        check(config)
        extra = config.get("kv_connector_extra_config") or {}
        self.consumes = config["kv_role"] in ("kv_consumer", "kv_both")
        self.devices = devices
        self.host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
        port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", DEFAULT_PORT))
        self._port = port + rank if port else 0
        self.transfers = Transfers(
            str(config.get("engine_id") or uuid.uuid4()),
            Link.parse(link),
            bytes_per_token,
            lease=float(extra.get("kv_lease_duration", LEASE_SECONDS)),
            recompute=config.get("kv_load_failure_policy", "fail") == "recompute",
        )
        self.channel: SideChannel | None = None
        self.courier: Courier | None = None

    async def open(self, now: Callable[[], float], nudge: Callable[[], None], scale: float) -> None:
        """Raises OSError if the side channel's address is taken."""
        self.channel = SideChannel(self.transfers, self.host, self._port, now, nudge)
        await self.channel.open()
        self.courier = Courier(self.transfers, now, nudge, scale)

    async def close(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        if self.courier is not None:
            await self.courier.close()

    @property
    def port(self) -> int:
        return self.channel.port if self.channel is not None else self._port


class NixlSeries(Collector):
    """The series that a server with a NIXL connector has more than others."""

    def __init__(self, model_name: str, connectors: list[Nixl]) -> None:
        self._model_name = model_name
        self._connectors = connectors

    def collect(self) -> Iterable[Metric]:
        counters = (
            (
                "nixl_num_failed_transfers",
                "Number of failed NIXL KV Cache transfers, including handshake and notification failures. NOTE: KV "
                "expiry is tracked separately in vllm:nixl_num_kv_expired_reqs.",
                "failed_transfers",
            ),
            (
                "nixl_num_kv_expired_reqs",
                "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance.",
                "expired",
            ),
            (
                "nixl_num_notifications_after_expiry",
                "Number of completion notifications for requests that were no longer tracked, usually because their KV "
                "lease expired. The KV blocks may have been reused before the transfer finished. Counted per "
                "notification (one per remote rank), not per request.",
                "late_notifications",
            ),
        )
        for name, text, attribute in counters:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for rank, connector in enumerate(self._connectors):
                value = getattr(connector.transfers.counts, attribute)
                family.add_metric([self._model_name, str(rank)], value)
            yield family
        if any(connector.consumes for connector in self._connectors):
            stages = GaugeMetricFamily(
                "vllm:num_requests_kv_fetch_by_stage",
                "Number of waiting requests by async KV load stage. Stage labels: 'waiting_to_start' = needs an async "
                "KV load that has not started; 'in_progress' = load started and not yet reported finished; "
                "'completed_waiting' = load finished, request not running yet.",
                labels=(*LABELS, "stage"),
            )
            for rank, connector in enumerate(self._connectors):
                for stage in ("waiting_to_start", "in_progress", "completed_waiting"):
                    stages.add_metric([self._model_name, str(rank), stage], connector.transfers.stage(stage))
            yield stages
