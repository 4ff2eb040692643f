"""The ZeroMQ side of KV events: a PUB socket, and a ROUTER that replays what was published."""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from fake_backend.kv_events import binds, offset_endpoint

log = logging.getLogger("fake_backend")

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""

_DEFAULTS: dict[str, Any] = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10_000,
    "hwm": 100_000,
    "max_queue_size": 100_000,
    "topic": "",
}


class Publisher:
    """One data-parallel rank's publisher. Raises OSError where an endpoint can't be had."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.config = _DEFAULTS | config
        for name in ("endpoint", "replay_endpoint"):
            if self.config[name]:
                self.config[name] = offset_endpoint(self.config[name], rank)
        self._topic = str(self.config["topic"]).encode()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self.config["buffer_steps"])
        self._late: list[bytes] | None = None
        self._context = zmq.asyncio.Context()
        self._pub = zmq.Context(self._context).socket(zmq.PUB)
        self._pub.set_hwm(self.config["hwm"])
        self._replay: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            self.config["endpoint"] = self._open(self._pub, self.config["endpoint"])
            if self.config["replay_endpoint"]:
                self._replay = self._context.socket(zmq.ROUTER)
                self.config["replay_endpoint"] = self._open(self._replay, self.config["replay_endpoint"])
        except zmq.ZMQError as error:
            self._close()
            raise OSError(f"KV events cannot be published at {self.config['endpoint']}: {error}") from error

    @property
    def published(self) -> int:
        """Batches so far: the number of the next one."""
        return self._sequence

    def _open(self, socket: Any, endpoint: str) -> str:
        if not binds(endpoint):
            socket.connect(endpoint)
            return endpoint
        if endpoint == "tcp://*:0":
            socket.bind("tcp://127.0.0.1:0")
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        socket.bind(endpoint)
        return endpoint

    def start(self) -> None:
        if self._replay is not None:
            self._task = asyncio.get_running_loop().create_task(self._serve_replay(self._replay))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._close()

    def _close(self) -> None:
        # The context knows only the sockets made by itself; ending it would wait for the other one.
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    def publish(self, payload: bytes, fault: str | None = None) -> None:
        """Number a batch, remember it for replay, and send it; ``fault`` is what goes wrong with the sending."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._buffer.append((sequence, payload))
        frames = [self._topic, sequence.to_bytes(8, "big"), payload]
        match fault:
            case "events_lost":
                return
            case "events_repeated":
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            case "events_reordered":
                self._late = frames
                return
        self._pub.send_multipart(frames, zmq.NOBLOCK)
        late, self._late = self._late, None
        if late is not None:
            self._pub.send_multipart(late, zmq.NOBLOCK)

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                log.warning("Invalid replay request of %d frames", len(frames))
                continue
            client, _empty, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await router.send_multipart([client, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", END, b""])
