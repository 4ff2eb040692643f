"""One data-parallel rank put together: an engine, what drives it, and whom it tells of its blocks."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from fake_backend import budget, transfer
from fake_backend.clock import Clock
from fake_backend.connector import Connector
from fake_backend.engine import Engine, Outcome
from fake_backend.faults import Faults
from fake_backend.kv_events import Describer, Encoding
from fake_backend.nixl import Nixl
from fake_backend.publisher import Publisher
from fake_backend.runtime import Runtime, Ticket, content_of
from fake_backend.scheduler import SchedulerConfig
from fake_backend.settings import Settings
from fake_backend.tier import CpuTier
from fake_backend.timing import StepTime


class Rank:
    """Made new for every start and restart of the replica."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        config: SchedulerConfig,
        step_time: StepTime,
        clock: Clock,
        encoding: Encoding,
        faults: Faults,
    ) -> None:
        self.number = number
        self.count: Callable[[Engine, Outcome, float], None] | None = None
        """Takes in what each step brought, for /metrics."""
        self.publisher: Publisher | None = None
        self._settings = settings
        self._clock = clock
        self._encoding = encoding
        self._faults = faults
        self._describer = Describer(encoding, content_of)
        self._bytes_per_token = budget.kv_bytes_per_token(settings.model, settings.demand.kv_dtype, 1)
        self.nixl: Nixl | None = None
        if settings.kv_transfer is not None:
            devices = settings.demand.tensor_parallel
            self.nixl = Nixl(settings.kv_transfer, number, settings.kv_link, self._bytes_per_token, devices)
        self.engine = Engine(
            config,
            settings.plan.num_blocks,
            step_time,
            caching=settings.prefix_caching,
            record_events=settings.kv_events is not None,
            connector=self._connector(),
        )
        self.runtime = Runtime(self.engine, clock, self._observe, self._attend if self.nixl is not None else None)

    async def open(self) -> None:
        """Publish, listen, and run. Raises OSError where an endpoint can't be had."""
        if self.nixl is not None:
            await self.nixl.open(self._clock.now, self.runtime.nudge, self._settings.time_scale)
        if self._settings.kv_events is not None:
            self.publisher = Publisher(self._settings.kv_events, self.number)
            self.publisher.start()
        self.runtime.start()

    async def close(self) -> None:
        await self.runtime.stop()
        if self.nixl is not None:
            await self.nixl.close()
        if self.publisher is not None:
            await self.publisher.stop()
            self.publisher = None

    @property
    def load(self) -> int:
        """As vLLM's own balance over ranks weighs it (v1/engine/core_client.py): waiting counts four times."""
        running = len(self.engine.scheduler.running)
        return 4 * (len(self.engine.scheduler) - running) + running

    def transfer_params(self, ticket: Ticket) -> Mapping[str, Any] | None:
        """What a prefill replica hands back for the decode replica; None without a KV connector."""
        if self.nixl is None:
            return None
        nixl = self.nixl
        return transfer.describe(ticket.request, nixl.transfers.engine_id, nixl.host, nixl.port, nixl.devices)

    def refused(self, params: Mapping[str, Any]) -> None:
        """A request was turned away before it got here: a prefill replica may free what it keeps for it."""
        if self.nixl is not None:
            self.nixl.transfers.refuse(params)
            self._attend()

    def _connector(self) -> Connector | None:
        if self.nixl is not None:
            return self.nixl.transfers
        if self._settings.offloading_gib is None:
            return None
        size = self._settings.block_size
        capacity = int(self._settings.offloading_gib * budget.GIB / (self._bytes_per_token * size))
        return CpuTier(capacity, size, self._bytes_per_token)

    def _observe(self, outcome: Outcome, now: float) -> None:
        if self.count is not None:
            self.count(self.engine, outcome, now)
        if outcome.cache_events and self.publisher is not None:
            events = [shown for event in outcome.cache_events for shown in self._describer.describe(event)]
            rule = self._faults.find("events")
            payload = self._encoding.payload(events, time.time(), self.number)
            self.publisher.publish(payload, rule.kind if rule else None)

    def _attend(self) -> None:
        if self.nixl is not None and self.nixl.courier is not None:
            self.nixl.courier.deliver()
