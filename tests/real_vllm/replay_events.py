"""Print every batch of KV events that an engine still remembers, one JSON object a line.

Runs in vLLM's own environment, which has ZeroMQ. The replay socket answers a start sequence number with all batches
from there on and ends with sequence number -1 (vLLM distributed/kv_events.py `ZmqEventPublisher`).

    DIR/venv/bin/python tests/real_vllm/replay_events.py REPLAY_PORT
"""

from __future__ import annotations

import json
import sys

import msgspec
import zmq


def main() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        *_, number, payload = socket.recv_multipart()
        sequence = int.from_bytes(number, "big", signed=True)
        if sequence < 0:
            break
        _, events, *_ = msgspec.msgpack.decode(payload)
        sys.stdout.write(
            json.dumps({"seq": sequence, "events": events, "payload": payload.hex()}, default=bytes.hex) + "\n"
        )
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
