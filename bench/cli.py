"""`python -m bench COMMAND`: every command is bounded, seeded, and leaves no process behind."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench import demo, hit_rate, load, overhead_decision, overhead_redis, simulate
from bench.processes import StartError
from router.prompt.blocks import ALGORITHMS

_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    try:
        status = run_until_signal(arguments.run(arguments))
    except (StartError, demo.PortTakenError, OSError, ValueError) as error:
        sys.exit(f"bench: {error}")
    sys.exit(arguments.on_ctrl_c if status == _INTERRUPTED else status)


def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; on SIGINT, SIGTERM or SIGHUP cancel it, let it clean up, and return 128 + the signal's number."""
    received: list[signal.Signals] = []

    async def watched() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: signal.Signals) -> None:
            # Once: the clean-up that follows is bounded, and a second Ctrl-C must not cut it short.
            if not received:
                task.cancel()
            received.append(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        return 128 + received[0] if received else 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m bench", description="Measure warmroute on this machine, without a GPU."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    rates = commands.add_parser(
        "hit-rate",
        help="hit rate, TTFT and balance of each policy on the same chat workload, beside the ceilings",
        description=hit_rate.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    rates.add_argument("--replicas", type=_positive, default=4, help="fake replicas behind the router")
    rates.add_argument(
        "--sessions", type=_positives, default="32", metavar="N[,N...]", help="conversations; a list runs each"
    )
    rates.add_argument("--turns", type=_positive, default=6, help="user messages in a conversation")
    rates.add_argument("--system-chars", type=_natural, default=4000, help="length of the system prompt all share")
    rates.add_argument(
        "--policies",
        type=_names,
        default=f"round_robin,least_load,{hit_rate.DEFAULT_POLICY}",
        metavar="NAME[,NAME...]",
        help="the router's policies to compare",
    )
    rates.add_argument("--check", action="store_true", help=f"exit 1 where {hit_rate.DEFAULT_POLICY} misses the bar")
    _common(rates)
    rates.set_defaults(run=hit_rate.run, on_ctrl_c=_INTERRUPTED)

    replay = commands.add_parser(
        "simulate",
        help="a recorded trace through the router's choice over fake engines, in virtual time",
        description=simulate.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    replay.add_argument(
        "trace", metavar="TRACE", help="JSON lines with timestamp, input_length, output_length, hash_ids"
    )
    replay.add_argument("--replicas", type=_positive, default=8, help="engines behind the choice")
    replay.add_argument(
        "--policy",
        dest="policies",
        type=_names,
        default=hit_rate.DEFAULT_POLICY,
        metavar="NAME[,NAME...]",
        help="policies",
    )
    replay.add_argument("--model", default="Llama-3.1-8B", help="what each replica serves")
    replay.add_argument("--gpu", default="H100", help="what each replica runs on")
    replay.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs a replica")
    replay.add_argument("--blocks", type=_positive, default=None, help="blocks a replica (default: what its GPU holds)")
    replay.add_argument("--max-num-batched-tokens", type=_positive, default=2048, help="tokens a step computes at most")
    replay.add_argument("--jitter", type=_delay, default=0.0, help="seconds of seeded delay a request, at the most")
    replay.add_argument("--speed", type=_seconds, default=1.0, help="play the trace this many times as fast")
    replay.add_argument("--requests", type=_positive, default=None, help="only the first so many")
    _common(replay)
    replay.set_defaults(run=simulate.run, on_ctrl_c=_INTERRUPTED)

    steady = commands.add_parser(
        "load",
        help="a chat load on routers that already run",
        description=load.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    steady.add_argument("url", nargs="+", metavar="URL", help="a router, as http://127.0.0.1:8080")
    steady.add_argument("--sessions", type=_positive, default=8, help="conversations at one time")
    steady.add_argument("--seconds", type=_seconds, default=None, help="end after this long (default: on Ctrl-C)")
    _common(steady)
    steady.set_defaults(run=load.run, on_ctrl_c=0)

    overhead = commands.add_parser("overhead", help="what the router itself costs")
    costs = overhead.add_subparsers(required=True, metavar="WHAT")
    decision = costs.add_parser(
        "decision",
        help="reading a prompt and choosing a replica, in CPU time beside json.loads of the body",
        description=overhead_decision.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    decision.add_argument("--tokenizer", type=Path, default=overhead_decision.TINY, help="the model's tokenizer files")
    decision.add_argument("--algorithm", choices=ALGORITHMS, default="sha256", help="how replicas hash blocks")
    decision.add_argument("--runs", type=_positive, default=9, help="the more, the steadier")
    decision.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    _common(decision)
    decision.set_defaults(run=overhead_decision.run, on_ctrl_c=_INTERRUPTED)

    store = costs.add_parser(
        "redis",
        help="the index that routers share: a decision's question, what is told, what a block takes",
        description=overhead_redis.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    store.add_argument("--server", default="", metavar="URL", help="a server to measure (default: a private one)")
    store.add_argument("--runs", type=_several, default=300, help="questions; the more, the steadier")
    store.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    _common(store)
    store.set_defaults(run=overhead_redis.run, on_ctrl_c=_INTERRUPTED)

    show = commands.add_parser(
        "demo",
        help="replicas, router and a chat load, live in the terminal, with round robin beside it",
        description=demo.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.add_argument("--port", type=_port, default=8080, help="where the router listens")
    show.add_argument("--seconds", type=_seconds, default=None, help="end after this long (default: on Ctrl-C)")
    show.add_argument("--seed", type=int, default=0, help="of the workload")
    # Ctrl-C is the way to end a demo, no failure.
    show.set_defaults(run=demo.run, on_ctrl_c=0)
    return top


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=int, default=0, help="of the workload")
    command.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    command.add_argument("--out", type=Path, metavar="DIR", help="write the JSON and a picture here")


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _several(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is too few for a percentile")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (1 to 65535)")
    return number


def _delay(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no delay in seconds")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
