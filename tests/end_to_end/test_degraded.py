"""A fleet that is routed by guesswork says so, loudly, with the likeliest cause; and takes it back when it is over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.end_to_end.conftest import Fleet


def gauge(page: bytes, replica: str) -> float:
    name = f'warmroute_cache_routing_degraded{{replica="{replica}"}} '.encode()
    (line,) = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


async def ask(client: Any, model: str, text: str) -> None:
    await client.completions.create(model=model, prompt=text, max_tokens=1)


@pytest.mark.fault("blind routing")
async def test_an_engine_that_caches_nothing_though_it_says_so(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Its cache is emptied behind the router's back before each request, so that every prediction is wrong."""
    caplog.set_level(logging.INFO)
    fake = await fleet.fake()
    router = await fleet.router(fake)
    client = await fleet.openai(router)
    name = router.fleet.ready()[0].name
    model = next(iter(router.fleet.ready()[0].models))
    text = "harbour " * 300
    for _ in range(3):
        await ask(client, model, text)
    assert gauge(router.telemetry.page(), name) == 0
    for _ in range(60):
        for engine in fake.replica.engines:
            assert engine.reset_prefix_cache()
        await ask(client, model, text)
    assert gauge(router.telemetry.page(), name) == 1
    told = [record.getMessage() for record in caplog.records if "degraded" in record.getMessage()]
    assert len(told) == 1
    assert "evicts more than expected" in told[0]
    for _ in range(200):
        await ask(client, model, text)
    assert gauge(router.telemetry.page(), name) == 0
    assert sum("sound again" in record.getMessage() for record in caplog.records) == 1
