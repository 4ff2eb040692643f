"""/v1/responses and /v1/messages beside what real vLLM answered to the same bodies: events, members, types."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fake_backend.server import Server

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm" / "apis.json").read_text())


def shape(value: Any) -> Any:
    """A value with its members, each as the name of its type; lists by their first entry."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def events(text: str) -> list[tuple[str, Any]]:
    """Names and shapes of a stream's events, repeats of one kind as one: deltas are as many as tokens with text."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), shape(json.loads(data.removeprefix("data: ")))))
    return [kind for kind, _ in groupby(found)]


@pytest.mark.parametrize("name", RECORDED)
async def test_an_answer_has_the_shape_of_the_real_one(start: Callable[..., Awaitable[Server]], name: str) -> None:
    recorded = RECORDED[name]
    server = await start("--served-model-name", "tiny", "--max-model-len", "8192", "--enable-prompt-tokens-details")
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            server.url + recorded["path"],
            data=recorded["request"].encode(),
            headers={"Content-Type": "application/json"},
        ) as answer,
    ):
        text = await answer.text()
    assert answer.status == 200
    if "stream" in name:
        assert events(text) == events(recorded["answer"])
    else:
        assert shape(json.loads(text)) == shape(json.loads(recorded["answer"]))
