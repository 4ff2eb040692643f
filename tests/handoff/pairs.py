"""Fakes with a NIXL connector, and what the tests ask of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.wire.scripted import until

if TYPE_CHECKING:
    from fake_backend.server import Server
    from tests.end_to_end.conftest import Fleet
    from tests.wire.scripted import Reply

PROMPT = "The sea is wide and the night is long. " * 40
SPEED = "0.01"
"""Wall seconds per modelled second."""
LASTING = {"kv_connector_extra_config": {"kv_lease_duration": 6000}}
"""A lease of a minute: nothing here runs into its end, however busy the machine."""
SHORT = {"kv_connector_extra_config": {"kv_lease_duration": 300}}
"""Over after three seconds, for tests that wait for its end."""


def connector(role: str, **more: object) -> tuple[str, ...]:
    config = {"kv_connector": "NixlConnector", "kv_role": role} | LASTING | more
    return ("--kv-transfer-config", json.dumps(config), "--time-scale", SPEED)


async def producer(fleet: Fleet, *flags: str, **more: object) -> Server:
    return await fleet.fake(*connector("kv_producer", **more), *flags)


async def consumer(fleet: Fleet, *flags: str, **more: object) -> Server:
    return await fleet.fake(*connector("kv_consumer", **more), *flags)


def chat(text: str = PROMPT, **more: Any) -> bytes:
    answer = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return json.dumps(
        {"model": "Qwen3-0.6B", "messages": [{"role": "user", "content": text}], **answer, **more}
    ).encode()


def completion(text: str = PROMPT, **more: Any) -> bytes:
    answer = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return json.dumps({"model": "Qwen3-0.6B", "prompt": text, **answer, **more}).encode()


def transfers(fake: Server) -> Any:
    nixl = fake.replica.ranks[0].nixl
    assert nixl is not None
    return nixl.transfers


async def nothing_pinned(*fakes: Server) -> None:
    """Within a lease at the most no prefill replica keeps blocks for others."""
    for fake in fakes:
        await until(lambda fake=fake: not transfers(fake).pinned, "no block is kept for a decode replica")  # type: ignore[misc]


def text(reply: Reply) -> str:
    """The words of an answer, whole or streamed."""
    assert reply.status == 200, reply.body
    if not (reply.header(b"content-type") or b"").startswith(b"text/event-stream"):
        (choice,) = json.loads(reply.body)["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    assert reply.body.endswith(b"data: [DONE]\n\n"), reply.body
    words = []
    for line in reply.body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            words += [_said(choice) for choice in event["choices"]]
    return "".join(words)


def _said(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content") or "" if "delta" in choice else str(choice["text"])
