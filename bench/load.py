"""`bench load`: a small chat load on running routers, each request to the next of them in turn, and what came of
it every few seconds. Meant for a compose file or a test installation, not for a fleet that serves people.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass
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
ASK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a load. `hit_rate`: tokens cached of tokens asked, 0 to 1. `replicas`: answers of each."""

    requests: int
    failed: int
    hit_rate: float
    predicted_exactly: int
    ttft_mean_ms: float
    replicas: dict[str, int]


async def run(arguments: argparse.Namespace) -> int:
    """Send until `arguments.seconds` are over, or until cancelled. Returns 0, or 1 where a request failed or none was
    answered. Raises ValueError where no router names a model in time.
    """
    records: list[Record] = []
    loop = asyncio.get_running_loop()
    ends = None if arguments.seconds is None else loop.time() + arguments.seconds
    async with open_session() as session:
        patience = min(PATIENCE_S, arguments.seconds or PATIENCE_S)
        report.progress(f"waiting up to {patience:g} s for {arguments.url[0]}/v1/models to name a model")
        model = await first_model(session, arguments.url[0], patience)
        report.progress(f"{arguments.sessions} conversations at a time with {model} through {', '.join(arguments.url)}")
        scripts = MultiTurn().endless(arguments.seed)
        try:
            async with asyncio.timeout_at(ends), asyncio.TaskGroup() as group:
                for _ in range(arguments.sessions):
                    group.create_task(chat(Client(session, arguments.url, model, records.append), scripts, records))
                group.create_task(tell(records))
        except TimeoutError:
            pass
        finally:
            # Also after Ctrl-C, the usual end of a load without --seconds.
            _outcome(records, arguments)
    found = summary(records)
    return 1 if found.failed or not found.requests else 0


def _outcome(records: Sequence[Record], arguments: argparse.Namespace) -> None:
    document = {"command": "load", "seed": arguments.seed, **asdict(summary(records))}
    if arguments.json:
        report.print_json(document)
    else:
        print(line(records), flush=True)
    if arguments.out is not None:
        report.write_json(document, arguments.out / "load.json")


async def first_model(session: aiohttp.ClientSession, url: str, patience_s: float) -> str:
    """The first model that a router names, as soon as it does. Raises ValueError where it does not in time."""
    why = "it did not answer"
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    async with session.get(f"{url}/v1/models") as answer:
                        if answer.status == 200:
                            return str((await answer.json())["data"][0]["id"])
                        why = f"status {answer.status}"
                except aiohttp.ClientError as error:
                    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                except (ValueError, LookupError, TypeError):
                    why = "its answer is no list of models"
                await asyncio.sleep(ASK_EVERY_S)
    except TimeoutError:
        raise ValueError(f"{url}/v1/models named no model within {patience_s:g} s: {why}") from None


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


def summary(records: Sequence[Record]) -> Summary:
    """Put a run's records into numbers; failed requests are counted and in no rate."""
    answered = [record for record in records if record.error is None]
    asked = sum(record.prompt_tokens for record in answered)
    return Summary(
        requests=len(records),
        failed=len(records) - len(answered),
        hit_rate=sum(record.cached_tokens for record in answered) / asked if asked else 0.0,
        predicted_exactly=sum(record.predicted_tokens == record.cached_tokens for record in answered),
        ttft_mean_ms=sum(record.ttft_s for record in answered) * 1000 / len(answered) if answered else 0.0,
        replicas=dict(sorted(Counter(record.replica for record in answered).items())),
    )


def line(records: Sequence[Record]) -> str:
    """The same for people: one line, and one more for each of the first three kinds of failure."""
    found = summary(records)
    shares = ", ".join(f"{name or 'unnamed'} {count}" for name, count in found.replicas.items())
    text = (
        f"{found.requests} requests, {found.failed} failed, hit rate {found.hit_rate:.1%}, "
        f"{found.predicted_exactly} predicted exactly, TTFT {found.ttft_mean_ms:.0f} ms"
        + (f"; answered by {shares}" if shares else "")
    )
    failures = {record.error for record in records if record.error is not None}
    return text + "".join(f"\n  failed: {each}" for each in sorted(failures)[:3])
