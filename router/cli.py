"""The command line: `warmroute serve URL...`. Flags are the settings' own names."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import logging
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from router.app import Router
from router.config import ConfigError, Settings, leaves, load

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a clean end, 2 for settings that cannot work."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(flag, ["--config", *(leaf.flag for leaf in leaves())], n=1)
        parser.error(f"unknown argument {flag}" + (f"; did you mean {close[0]}?" if close else ""))
    if arguments.command is None:
        parser.print_help()
        return 0
    flags = {leaf.name: value for leaf in leaves() if (value := getattr(arguments, leaf.name)) is not None}
    try:
        settings = load(
            replicas=arguments.replica, file=Path(arguments.config) if arguments.config else None, flags=flags
        )
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
        return uvloop.run(_serve(settings))
    except ConfigError as error:
        print(f"warmroute: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute", description="The front door of a fleet of vLLM replicas.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"warmroute {version('warmroute')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="route requests to replicas",
        description="Route requests to these replicas. Settings may also stand in a file or in WARMROUTE_*.",
        allow_abbrev=False,
    )
    serve.add_argument("replica", nargs="*", metavar="URL", help="a replica's base URL, as http://gpu1:8000")
    serve.add_argument("--config", metavar="FILE", help="a YAML file of settings")
    for leaf in leaves():
        default = "unset" if leaf.default in (None, "") else leaf.default
        serve.add_argument(
            leaf.flag,
            dest=leaf.name,
            metavar=leaf.name.rpartition("_")[2].upper(),
            help=f"{leaf.text} (default: {default})".replace("%", "%%"),
        )
    return parser


async def _serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    async with Router(settings) as router:
        print(router.announcement(), file=sys.stderr, flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await stop.wait()
        # A second signal means now.
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, router.cut)
    return 0


if __name__ == "__main__":
    sys.exit(main())
