"""`bench load`: a small chat load on running routers, each request to the next of them in turn, and what came of
it every few seconds. Meant for a compose file or a test installation, not for a fleet that serves people.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from bench import report
from bench.client import Client, Record, open_session
from bench.workloads import MultiTurn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from bench.workloads import Script

EVERY_S = 5.0
PATIENCE_S = 120.0
AFTER_FAILURE_S = 1.0


async def run(arguments: argparse.Namespace) -> int:
    """Send until `arguments.seconds` are over, or until cancelled. Returns 0, or 1 where a request failed."""
    records: list[Record] = []
    async with open_session() as session:
        model = await first_model(session, arguments.url)
        report.progress(f"{arguments.sessions} conversations at a time with {model} through {', '.join(arguments.url)}")
        scripts = MultiTurn().endless(arguments.seed)
        try:
            async with asyncio.timeout(arguments.seconds), asyncio.TaskGroup() as group:
                for _ in range(arguments.sessions):
                    group.create_task(chat(Client(session, arguments.url, model, records.append), scripts, records))
                group.create_task(tell(records))
        except TimeoutError:
            pass
    document = summary(records)
    if arguments.json:
        report.print_json(document)
    else:
        report.progress(line(records))
    return 1 if document["failed"] else 0


async def first_model(session: aiohttp.ClientSession, urls: Sequence[str]) -> str:
    """The first model that the first router names, as soon as it does. Raises ValueError where none does in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with session.get(f"{urls[0]}/v1/models") as answer:
                        if answer.status == 200:
                            return str((await answer.json())["data"][0]["id"])
                except (aiohttp.ClientError, ValueError, LookupError):
                    pass
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise ValueError(f"{urls[0]} named no model within {PATIENCE_S:g} s") from None


async def chat(client: Client, scripts: Iterator[Script], records: list[Record]) -> None:
    """One conversation after another, as one user would."""
    while True:
        await client.play(next(scripts))
        if records and records[-1].error is not None:
            await asyncio.sleep(AFTER_FAILURE_S)


async def tell(records: list[Record]) -> None:
    """One line every few seconds on what happened in them."""
    told = 0
    while True:
        await asyncio.sleep(EVERY_S)
        report.progress(line(records[told:]))
        told = len(records)


def summary(records: Sequence[Record]) -> dict[str, object]:
    """Counts, hit rate (tokens cached of tokens asked, 0 to 1) and how many predictions were exact."""
    answered = [record for record in records if record.error is None]
    asked = sum(record.prompt_tokens for record in answered)
    return {
        "requests": len(records),
        "failed": len(records) - len(answered),
        "hit_rate": sum(record.cached_tokens for record in answered) / asked if asked else 0.0,
        "predicted_exactly": sum(record.predicted_tokens == record.cached_tokens for record in answered),
        "ttft_mean_ms": sum(record.ttft_s for record in answered) * 1000 / len(answered) if answered else 0.0,
        "replicas": {name: sum(r.replica == name for r in answered) for name in sorted({r.replica for r in answered})},
    }


def line(records: Sequence[Record]) -> str:
    found = summary(records)
    text = (
        f"{found['requests']} requests, {found['failed']} failed, hit rate {found['hit_rate']:.1%}, "
        f"{found['predicted_exactly']} predicted exactly, TTFT {found['ttft_mean_ms']:.0f} ms; {found['replicas']}"
    )
    failures = {record.error for record in records if record.error is not None}
    return text + "".join(f"\n  failed: {each}" for each in sorted(failures)[:3])
