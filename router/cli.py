"""The command line: `warmroute serve URL...`. Flags are the settings' own names."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import functools
import gc
import json
import logging
import os
import resource
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from router import logs
from router.app import Router
from router.config import CONFIG_ENV, SECTIONS, ConfigError, Leaf, Settings, leaves, load
from router.index.shared_embedded import end_with_parent
from router.supervisor import Supervisor
from router.worker import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("warmroute")

# Objects made before the collector looks at the youngest; its looks before those at the middle-aged, and at the old.
GC_THRESHOLDS = (10_000, 20, 50)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a clean end, 2 for settings that cannot work."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["worker"]:
        return _work(*given[1:])
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(flag, ["--config", *(leaf.flag for leaf in leaves())], n=1)
        parser.error(f"unknown argument {flag}" + (f"; did you mean {close[0]}?" if close else ""))
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "explain":
        return explain(arguments)
    flags = {leaf.name: value for leaf in leaves() if (value := getattr(arguments, leaf.name)) is not None}
    config = arguments.config or os.environ.get(CONFIG_ENV)
    read = functools.partial(load, replicas=arguments.replica, file=Path(config) if config else None, flags=flags)
    return _run(read)


def _work(number: str, directory: str, supervisor: str) -> int:
    """One of several workers, as `router.supervisor` starts it: no command for people."""
    end_with_parent(int(supervisor))
    place = Place(int(number), Path(directory))
    return _run(place.settings, place)


def _run(read: Callable[[], Settings], place: Place | None = None) -> int:
    try:
        settings = read()
        logs.configure(
            level=settings.log.log_level,
            form=settings.log.log_format,
            worker=None if place is None else place.number,
        )
        if settings.listen.workers > 1 and place is None:
            return uvloop.run(_supervise(settings, read))
        return uvloop.run(_serve(settings, read, place))
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
        usage="warmroute serve URL [URL ...] [--SETTING VALUE ...]",
        allow_abbrev=False,
    )
    serve.add_argument("replica", nargs="*", metavar="URL", help="a replica's base URL, as http://gpu1:8000")
    serve.add_argument("--config", metavar="FILE", help=f"a YAML file of settings (or {CONFIG_ENV})")
    groups = {section: serve.add_argument_group(section, struct.__doc__ or "") for section, struct in SECTIONS.items()}
    for leaf in leaves():
        default = "unset" if leaf.default in (None, "") else leaf.default
        groups[leaf.section].add_argument(
            leaf.flag,
            dest=leaf.name,
            metavar=_metavar(leaf),
            help=f"{leaf.text} (default: {str(default).lower() if leaf.type is bool else default})".replace("%", "%%"),
        )
    asked = commands.add_parser(
        "explain",
        help="say where a request would go, and why, without sending it",
        description="Ask a running router's admin side what it would do with a request body.",
        allow_abbrev=False,
    )
    asked.add_argument("file", metavar="FILE", help="a request body in JSON; - reads it from standard input")
    asked.add_argument(
        "--router",
        default="http://127.0.0.1:8081",
        metavar="URL",
        help="the admin side's address (default: http://127.0.0.1:8081)",
    )
    asked.add_argument("--path", default="", metavar="PATH", help="the path the body is for (default: by its members)")
    asked.add_argument("--token-file", default="", metavar="FILE", help="file with the admin side's token")
    asked.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    return parser


def _metavar(leaf: Leaf) -> str:
    """What stands for a setting's value in the help: its choices, or the unit that its name ends with."""
    if leaf.choices:
        return f"{{{','.join(leaf.choices)}}}"
    unit = leaf.name.rpartition("_")[2]
    if unit in ("seconds", "bytes", "blocks", "ms", "host", "port", "file"):
        return unit.upper()
    return "N" if leaf.type in (int, float) else "TEXT"


def explain(arguments: argparse.Namespace) -> int:
    """Print what a router would do with a body. Returns 0, or 1 where it could not be asked."""
    try:
        body = sys.stdin.buffer.read() if arguments.file == "-" else Path(arguments.file).read_bytes()
        headers = {"Content-Type": "application/json"}
        if arguments.token_file:
            headers["Authorization"] = f"Bearer {Path(arguments.token_file).read_text().strip()}"
        query = f"?path={urllib.parse.quote(arguments.path)}" if arguments.path else ""
        url = f"{arguments.router.rstrip('/')}/router/explain{query}"
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--router {arguments.router} is no URL; did you mean http://{arguments.router}?")
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:  # noqa: S310
            document = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode("utf-8", "replace")
        hint = "; is this the admin side, not the clients'?" if error.code == 404 else ""
        print(f"warmroute: {arguments.router} answered {error.code}: {said}{hint}", file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(
            f"warmroute: no admin side of a router at {arguments.router} ({error.reason}); --router takes the address "
            "that `warmroute serve` prints as `admin side on`",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"warmroute: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if arguments.json else document["words"])
    return 0


async def _serve(settings: Settings, read: Callable[[], Settings], place: Place | None) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # what it would reload is being read just now
    files = _raise_file_limit()
    router = Router(settings, place)
    opening, stopping = asyncio.create_task(router.__aenter__()), asyncio.create_task(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        opening.cancel()
        await asyncio.wait({opening})
        return 0
    await opening
    try:

        def terminate() -> None:
            router.terminated = True
            stop.set()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = asyncio.create_task(_reload(router, read))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        said = router.announcement()
        # A stream holds two: the client's and the replica's.
        if files // 2 < settings.listen.max_connections:
            said += f"\n  open files: {files}, enough for about {files // 2} streams at one time"
        if place is None:
            print(said, file=sys.stderr, flush=True)
        else:
            await place.tell_ready(said)
        # What is here now stays. Requests leave next to nothing that only the collector finds, but make so much that it
        # would look at everything again and again: a tenth of all CPU time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await stop.wait()
        # A second signal means now.
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, router.cut)
    finally:
        await router.__aexit__()
    return 0


async def _supervise(settings: Settings, read: Callable[[], Settings]) -> int:
    """Several workers."""
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(settings)

    def reload() -> None:
        try:
            supervisor.reload(read())
        except ConfigError as error:
            log.error("settings not reloaded, the old ones stay: %s", error)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.end, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    async with supervisor:
        if not supervisor.done.is_set():
            print(supervisor.announcement, file=sys.stderr, flush=True)
        await supervisor.done.wait()
    return supervisor.status


async def _reload(router: Router, read: Callable[[], Settings]) -> None:
    try:
        await router.reload(read())
    except ConfigError as error:
        log.error("settings not reloaded, the old ones stay: %s", error)
    except Exception:
        log.exception("reloading the settings failed inside the router")


def _raise_file_limit() -> int:
    """Allow ourselves as many open files as the system lets us; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


if __name__ == "__main__":
    sys.exit(main())
