"""KV blocks from a prefill replica to a decode replica, as vLLM's NIXL pull connector does it.

distributed/kv_transfer/kv_connector/v1/nixl: the prefill replica keeps the blocks of a finished request for a lease and
says in its answer where they are; the decode replica reads them while the request waits, extends the lease until then,
and says when it is done. This is the scheduler's side of both, in modelled time and without I/O: what has to be said to
the other replica stands in :attr:`Transfers.outbox`, and what it said comes back through the methods named after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_backend.connector import Fetched, TierEvent
from fake_backend.link import Link
from fake_backend.pool import CacheEvent
from fake_backend.request import Request, State

LEASE_SECONDS = 30.0
KNOWN_PEER_FAILS_AFTER = 0.1
NEW_PEER_FAILS_AFTER = 5.0
"""How long vLLM tries before it gives up on a peer that it has, or has not, talked to before."""

_PLACE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class EngineDeathError(Exception):
    """A request that takes the whole engine with it, as it does with vLLM 0.32."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a prefill replica listens."""

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Letter:
    """To be sent to a prefill replica: ``read`` asks whether blocks can be had, ``done`` that they may go."""

    kind: str
    peer: Peer
    remote_request: str
    request: Request | None = None


@dataclass(slots=True)
class Counts:
    """What the NIXL series of /metrics show."""

    transfers: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, bytes) of transfers since somebody last took this list."""
    failed_transfers: int = 0
    expired: int = 0
    late_notifications: int = 0


@dataclass(slots=True)
class _Load:
    request: Request
    local: int
    external: int
    peer: Peer | None
    begun: float
    fails_at: float | None = None


@dataclass(slots=True)
class _Pinned:
    blocks: Sequence[int]
    until: float


class Transfers:
    """Both roles of one engine. ``recompute``: a failed load is prefilled here instead of failing the request."""

    def __init__(
        self,
        engine_id: str,
        link: Link,
        bytes_per_token: float,
        *,
        lease: float = LEASE_SECONDS,
        recompute: bool = False,
    ) -> None:
        self.engine_id = engine_id
        self.link = link
        self.lease = lease
        self.counts = Counts()
        self.outbox: list[Letter] = []
        self._bytes_per_token = bytes_per_token
        self._recompute = recompute
        self._loads: dict[str, _Load] = {}
        self._begun: set[str] = set()
        self._pinned: dict[str, _Pinned] = {}
        self._freed: list[Sequence[int]] = []
        self._known: set[Peer] = set()

    def match(self, request: Request, local_tokens: int) -> int:
        """All of a prompt that was computed elsewhere; a preempted request is computed here, its blocks are gone."""
        params = _params(request)
        if not params.get("do_remote_prefill") or request.id in self._begun:
            return 0
        if params.get("remote_block_ids") is None:
            raise EngineDeathError("remote_block_ids is null in a request for remote prefill")
        return max(0, request.prompt_tokens - local_tokens)

    def start(self, request: Request, local_tokens: int, external_tokens: int, now: float) -> None:
        params = _params(request)
        self._begun.add(request.id)
        complete = all(params.get(name) is not None for name in _PLACE)
        peer = None
        if complete:
            peer = _peer(params)
            self.outbox.append(Letter("read", peer, str(params["remote_request_id"]), request))
        # Without a place the request waits for ever, as it does in vLLM.
        self._loads[request.id] = _Load(request, local_tokens, external_tokens, peer, now)

    def granted(self, request: Request, now: float) -> None:
        """The prefill replica answered: the blocks can be read."""
        load = self._loads.get(request.id)
        if load is not None and load.peer is not None:
            self._known.add(load.peer)
            load.begun = now
            self.link.start(request.id, load.external * self._bytes_per_token, now)

    def denied(self, request: Request, now: float) -> None:
        """The prefill replica did not answer, or is not the one that was asked for."""
        load = self._loads.get(request.id)
        if load is not None and load.fails_at is None:
            patience = KNOWN_PEER_FAILS_AFTER if load.peer in self._known else NEW_PEER_FAILS_AFTER
            load.fails_at = now + patience

    def broken(self, request: Request, now: float) -> None:
        """The prefill replica went away while its blocks were being read."""
        self.link.cancel(request.id, now)
        load = self._loads.get(request.id)
        if load is not None:
            load.fails_at = now

    def refuse(self, params: Mapping[str, Any]) -> None:
        """A request for remote prefill was turned away before it got here: its blocks may go."""
        if params.get("do_remote_prefill") and all(params.get(name) is not None for name in _PLACE):
            self.outbox.append(Letter("done", _peer(params), str(params["remote_request_id"])))

    def arrived(self, now: float) -> list[Fetched]:
        found: list[Fetched] = []
        for name in self.link.done(now):
            load = self._loads.pop(name, None)
            if load is None or load.peer is None:
                continue
            self.counts.transfers.append((now - load.begun, load.external * self._bytes_per_token))
            remote = str(_params(load.request)["remote_request_id"])
            self.outbox.append(Letter("done", load.peer, remote))
            found.append(Fetched(load.request, load.local + load.external))
        for load in [load for load in self._loads.values() if load.fails_at is not None and load.fails_at <= now]:
            del self._loads[load.request.id]
            self.counts.failed_transfers += 1
            found.append(Fetched(load.request, load.local, failed=not self._recompute))
        return found

    def finished(self, request: Request, now: float) -> bool:
        load = self._loads.get(request.id)
        if load is not None:
            if load.peer is None:
                raise EngineDeathError("a request was aborted while it waited for a transfer that was never begun")
            del self._loads[request.id]
            self.link.cancel(request.id, now)
            self.outbox.append(Letter("done", load.peer, str(_params(request)["remote_request_id"])))
        self._begun.discard(request.id)
        if not _params(request).get("do_remote_decode") or request.finish_reason not in ("length", "stop"):
            return False
        if not request.blocks:
            return False
        self._pinned[request.id] = _Pinned(list(request.blocks), now + self.lease)
        return True

    def released(self, now: float) -> list[Sequence[int]]:
        for name in [name for name, pinned in self._pinned.items() if pinned.until <= now]:
            self._freed.append(self._pinned.pop(name).blocks)
            self.counts.expired += 1
        freed, self._freed = self._freed, []
        return freed

    def evicted(self, events: Sequence[CacheEvent], now: float) -> None:
        """Nothing here depends on what the pool evicts."""

    def take_events(self) -> list[TierEvent]:
        """Another replica's cache is its own to tell of."""
        return []

    def next_event(self) -> float | None:
        moments = [pinned.until for pinned in self._pinned.values()]
        moments += [load.fails_at for load in self._loads.values() if load.fails_at is not None]
        link = self.link.next_event()
        if link is not None:
            moments.append(link)
        return 0.0 if self._freed else min(moments, default=None)

    def read(self, remote_request: str) -> bool:
        """A decode replica begins to read; False if the blocks are not kept any more, which nobody tells it."""
        return remote_request in self._pinned

    def heartbeat(self, remote_request: str, now: float) -> None:
        """A decode replica still wants the blocks: the lease goes on for two thirds of its length."""
        pinned = self._pinned.get(remote_request)
        if pinned is not None:
            pinned.until = max(pinned.until, now + self.lease * 2 / 3)

    def done(self, remote_request: str) -> None:
        """A decode replica has what it wanted, or doesn't want it any more."""
        pinned = self._pinned.pop(remote_request, None)
        if pinned is None:
            self.counts.late_notifications += 1
        else:
            self._freed.append(pinned.blocks)

    @property
    def pinned(self) -> Mapping[str, Sequence[int]]:
        """Blocks kept for decode replicas, by request."""
        return {name: pinned.blocks for name, pinned in self._pinned.items()}

    def stage(self, name: str) -> int:
        """Requests by stage of their load, as vllm:num_requests_kv_fetch_by_stage has it."""
        return len(self._loads) if name == "in_progress" else 0


def _peer(params: Mapping[str, Any]) -> Peer:
    return Peer(str(params["remote_engine_id"]), str(params["remote_host"]), int(params["remote_port"]))


def _params(request: Request) -> Mapping[str, Any]:
    return request.transfer if isinstance(request.transfer, Mapping) else {}


def describe(request: Request, engine_id: str, host: str, port: int, devices: int) -> dict[str, Any] | None:
    """What a prefill replica's answer says: where its blocks are. None if they were not kept."""
    if not _params(request).get("do_remote_decode") or request.state is not State.FINISHED:
        return None
    if request.finish_reason not in ("length", "stop") or not request.blocks:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(request.blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request.id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": devices,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": request.computed,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": request.cached_tokens or 0,
    }
