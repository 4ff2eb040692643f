"""`python -m bench COMMAND`: every command is bounded, seeded, and leaves no process behind."""

import argparse
import asyncio
import signal
import sys
import typing
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench import (
    demo,
    hit_rate,
    load,
    overhead_decision,
    overhead_forward,
    overhead_redis,
    overhead_workers,
    simulate,
    simulate_split,
)
from bench.forward_peers import NAMES as PEERS
from bench.processes import StartError
from fake_backend.budget import BudgetError
from fake_backend.models import ModelError
from fake_backend.settings import SettingsError
from router.config import leaves
from router.prompt.blocks import ALGORITHMS

_INTERRUPTED = 128 + signal.SIGINT
SIMULATE_SPLIT = "simulate split"
POLICIES = next(leaf.choices for leaf in leaves() if leaf.name == "policy")

T = typing.TypeVar("T")
_REFUSED = (StartError, demo.PortTakenError, SettingsError, ModelError, BudgetError, OSError, ValueError)
"""What cannot be done, said in one line."""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == "":
            return action.help
        return super()._get_help_string(action)


class _Described(_Formatter, argparse.RawDescriptionHelpFormatter):
    """Leaves a description's own lines alone."""


def main(argv: Sequence[str] | None = None) -> None:
    top = parser()
    typed = list(sys.argv[1:] if argv is None else argv)
    if typed[:2] == SIMULATE_SPLIT.split():
        typed[:2] = [SIMULATE_SPLIT]  # a command of two words beside one that takes a file; ./split is a file
    arguments = top.parse_args(typed)
    if arguments.run is hit_rate.run and arguments.check and hit_rate.DEFAULT_POLICY not in arguments.policies:
        top.error(f"--check holds {hit_rate.DEFAULT_POLICY} to its bar: name it among --policies")
    try:
        status = run_until_signal(arguments.run(arguments))
    except _REFUSED as error:
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
        formatter_class=_Formatter,
    )
    rates.add_argument("--replicas", type=_positive, default=4, help="fake replicas behind the router")
    rates.add_argument(
        "--sessions", type=_positives, default="32", metavar="N[,N...]", help="conversations; a list runs each"
    )
    rates.add_argument("--turns", type=_positive, default=6, help="user messages in a conversation")
    rates.add_argument("--system-chars", type=_natural, default=4000, help="length of the system prompt all share")
    _policies(rates, f"round_robin,least_load,{hit_rate.DEFAULT_POLICY}")
    rates.add_argument("--check", action="store_true", help=f"exit 1 where {hit_rate.DEFAULT_POLICY} misses the bar")
    _common(rates, "the JSON and a picture (pip install 'warmroute[bench]')")
    rates.set_defaults(run=hit_rate.run, on_ctrl_c=_INTERRUPTED)

    replay = commands.add_parser(
        "simulate",
        help="a recorded trace through the router's choice over fake engines, in virtual time",
        description=simulate.__doc__,
        formatter_class=_Formatter,
    )
    replay.add_argument(
        "trace",
        metavar="TRACE",
        help="JSON lines with timestamp (ms), input_length, output_length (tokens), hash_ids; its block size is "
        "found from these",
    )
    replay.add_argument("--replicas", type=_positive, default=8, help="engines behind the choice")
    _policies(replay, hit_rate.DEFAULT_POLICY)
    replay.add_argument("--model", default="Llama-3.1-8B", help="what each replica serves")
    replay.add_argument("--gpu", default="H100", help="what each replica runs on")
    replay.add_argument("--tensor-parallel-size", type=_positive, default=1, help="GPUs a replica")
    replay.add_argument("--blocks", type=_positive, default=None, help="blocks a replica (default: what its GPU holds)")
    replay.add_argument("--max-num-batched-tokens", type=_positive, default=2048, help="tokens a step computes at most")
    replay.add_argument("--jitter", type=_delay, default=0.0, help="seconds of seeded delay a request, at the most")
    replay.add_argument("--speed", type=_speed, default=1.0, help="play the trace this many times as fast")
    replay.add_argument("--requests", type=_positive, default=None, help="only the first so many")
    _common(replay)
    replay.set_defaults(run=simulate.run, on_ctrl_c=_INTERRUPTED)

    split = commands.add_parser(
        SIMULATE_SPLIT,
        help="prefill and decode on one replica or on two: every rule over fake engines, in virtual time",
        description=simulate_split.__doc__,
        formatter_class=_Formatter,
    )
    split.add_argument("--quick", action="store_true", help="two shapes, one fleet, short runs: to see it run")
    split.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    split.add_argument("--seeds", type=_positive, default=None, help="average so many (default: 3; with --quick, 1)")
    split.add_argument("--jobs", type=_positive, default=1, help="processes to share the runs")
    _common(split)
    split.set_defaults(run=simulate_split.run, on_ctrl_c=_INTERRUPTED)

    steady = commands.add_parser(
        "load",
        help="a chat load on routers that already run",
        description=load.__doc__,
        formatter_class=_Formatter,
    )
    steady.add_argument("url", nargs="+", type=_url, metavar="URL", help="a router, as http://127.0.0.1:8080")
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
        formatter_class=_Formatter,
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
        formatter_class=_Formatter,
    )
    store.add_argument("--server", default="", metavar="URL", help="a server to measure (default: a private one)")
    store.add_argument("--runs", type=_several, default=300, help="questions; the more, the steadier")
    store.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    _common(store)
    store.set_defaults(run=overhead_redis.run, on_ctrl_c=_INTERRUPTED)

    forward = costs.add_parser(
        "forward",
        help="passing bytes on, in CPU time beside nginx and other routers",
        description=overhead_forward.__doc__,
        formatter_class=_Described,
    )
    forward.add_argument("--repeats", type=_positive, default=5, help="runs of each router in each row")
    forward.add_argument("--seconds", type=_positive, default=2, help="length of a run")
    forward.add_argument(
        "--peers",
        type=_some_of("router", PEERS),
        default=",".join(PEERS[:4]),
        metavar="NAME[,NAME...]",
        help=f"what to compare with, of {', '.join(PEERS)}",
    )
    forward.add_argument(
        "--rows",
        type=_some_of("row", overhead_forward.KEYS),
        default=",".join(overhead_forward.KEYS),
        metavar="NAME[,NAME...]",
        help=f"what to measure, of {', '.join(overhead_forward.KEYS)}",
    )
    forward.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    _common(forward)
    forward.set_defaults(run=overhead_forward.run, on_ctrl_c=_INTERRUPTED)

    workers = costs.add_parser(
        "workers",
        help="what several workers on one port carry beside one",
        description=overhead_workers.__doc__,
        formatter_class=_Described,
    )
    workers.add_argument("--workers", type=_workers, default=2, help="how many")
    workers.add_argument("--repeats", type=_positive, default=5, help="runs of each")
    workers.add_argument("--seconds", type=_positive, default=3, help="length of a run")
    workers.add_argument("--check", action="store_true", help="exit 1 where the bar is missed")
    _common(workers)
    workers.set_defaults(run=overhead_workers.run, on_ctrl_c=_INTERRUPTED)

    show = commands.add_parser(
        "demo",
        help="replicas, router and a chat load, live in the terminal, with round robin beside it",
        description=demo.__doc__,
        formatter_class=_Formatter,
    )
    show.add_argument("--port", type=_port, default=8080, help="where the router listens")
    show.add_argument("--seconds", type=_seconds, default=None, help="end after this long (default: on Ctrl-C)")
    show.add_argument("--seed", type=_whole, default=0, help="of the workload")
    # Ctrl-C is the way to end a demo, no failure.
    show.set_defaults(run=demo.run, on_ctrl_c=0)
    return top


def _policies(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--policies",
        "--policy",
        type=_names,
        default=default,
        metavar="NAME[,NAME...]",
        help=f"the router's policies to compare, of {', '.join(POLICIES)}",
    )


def _common(command: argparse.ArgumentParser, written: str = "the JSON") -> None:
    command.add_argument("--seed", type=_whole, default=0, help="of the workload")
    command.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    command.add_argument("--out", type=Path, metavar="DIR", help=f"write {written} here")


def _whole(text: str) -> int:
    return _read(int, text, "a whole number")


def _natural(text: str) -> int:
    return _within(_whole(text), lambda number: number >= 0, f"{text} is negative")


def _positive(text: str) -> int:
    return _within(_whole(text), lambda number: number >= 1, f"{text} is less than 1")


def _several(text: str) -> int:
    return _within(_whole(text), lambda number: number >= 2, f"{text} is too few for a percentile")


def _workers(text: str) -> int:
    return _within(_whole(text), lambda number: 2 <= number <= 256, f"{text} is not from 2 to 256")


def _port(text: str) -> int:
    return _within(_whole(text), lambda number: 1 <= number <= 65535, f"{text} is not a port (1 to 65535)")


def _delay(text: str) -> float:
    said = "a delay in seconds, 0 or more"
    return _within(_read(float, text, said), lambda number: 0 <= number < float("inf"), f"{text!r} is not {said}")


def _seconds(text: str) -> float:
    said = "a positive number of seconds"
    return _within(_read(float, text, said), lambda number: 0 < number < float("inf"), f"{text!r} is not {said}")


def _speed(text: str) -> float:
    said = "a positive number"
    return _within(_read(float, text, said), lambda number: 0 < number < float("inf"), f"{text!r} is not {said}")


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _url(text: str) -> str:
    said = f"{text!r} is no address such as http://127.0.0.1:8080"
    return _within(text.rstrip("/"), lambda url: url.startswith(("http://", "https://")), said)


def _names(text: str) -> list[str]:
    return _some_of("policy", POLICIES)(text)


def _some_of(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{(unknown or [text])[0]!r} is no {kind}; there are {', '.join(known)}")
        return names

    return read


def _read(kind: Callable[[str], T], text: str, said: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {said}") from None


def _within(value: T, right: Callable[[T], bool], said: str) -> T:
    if not right(value):
        raise argparse.ArgumentTypeError(said)
    return value
