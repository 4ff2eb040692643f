"""``python -m fake_backend``: serve, or print a budget."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from fake_backend import budget_table, settings
from fake_backend.answers import AnswerSpecError
from fake_backend.budget import BudgetError
from fake_backend.models import ModelError
from fake_backend.server import Server
from fake_backend.settings import Settings, SettingsError
from router.prompt.tokens import TokenizerError

log = logging.getLogger("fake_backend")

_REFUSALS = (SettingsError, BudgetError, ModelError, AnswerSpecError, TokenizerError, ValueError)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 for what vLLM would refuse to start with, 2 for unknown flags."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S")
    try:
        if arguments[:1] == ["budget"]:
            print(budget_table.table(arguments[1:]))
            return 0
        if arguments[:1] == ["serve"]:
            arguments = arguments[1:]
        chosen = settings.read(arguments)
        return uvloop.run(_serve(chosen))
    except _REFUSALS as error:
        print(f"fake_backend: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fake_backend: {error}", file=sys.stderr)
        return 1


async def _serve(chosen: Settings) -> int:
    """Exit status: 0 after a signal, 1 when the engine has died."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = Server(chosen)
    try:
        await server.start()
    except OSError as error:
        raise SettingsError(f"cannot listen on --host {chosen.host} --port {chosen.port}: {error}") from error
    _announce(chosen, server)
    try:
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, server.died)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        return 0 if stop.is_set() else 1
    finally:
        await server.stop()


def _announce(chosen: Settings, server: Server) -> None:
    plan, demand = chosen.plan, chosen.demand
    if plan.reduced_from:
        log.info(
            "Auto-fit max_model_len: reduced from %d to %d to fit in available KV cache memory",
            plan.reduced_from,
            plan.max_model_len,
        )
    tokens = plan.num_blocks * demand.block_size
    log.info("GPU KV cache size: %s tokens (%d blocks of %d)", f"{tokens:,}", plan.num_blocks, demand.block_size)
    log.info(
        "Maximum concurrency for %s tokens per request: %.2fx", f"{plan.max_model_len:,}", tokens / plan.max_model_len
    )
    log.info(
        "%s as %s on %d x %s, tokenizer %s, listening on %s",
        demand.model.name,
        ", ".join(chosen.served_names),
        demand.tensor_parallel,
        demand.gpu.name,
        chosen.tokenizer,
        server.url,
    )
