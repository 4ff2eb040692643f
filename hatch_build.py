"""Compiles what every request passes, with mypyc, into extension modules: the same source, at a fraction of the cost.

Without it the source runs as it is. A wheel is compiled where that is asked for (`HATCH_BUILD_HOOKS_ENABLE=1 pip wheel
.`; a C compiler is needed), and then fits one platform and one Python. `python hatch_build.py DIRECTORY` makes a
compiled copy of the checkout instead, to test and to measure.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What a request passes on its way. Not all of the router: what mypyc cannot compile, or what is not in a hurry, stays.
HOT = (
    *("router/course.py", "router/divided.py", "router/evidence.py", "router/journey.py", "router/learning.py"),
    *(
        "router/leg.py",
        "router/reading.py",
        "router/resuming.py",
        "router/series.py",
        "router/telemetry.py",
        "router/trail.py",
    ),
    *("router/choose/cost.py", "router/choose/dispatch.py", "router/choose/policies.py", "router/choose/split.py"),
    *("router/fleet/breaker.py", "router/fleet/discovery.py", "router/fleet/ledger.py", "router/fleet/rates.py"),
    *("router/fleet/replica.py", "router/index/feedback.py", "router/index/gallop.py", "router/index/held.py"),
    *("router/index/known.py", "router/index/memory.py", "router/index/neighbour_index.py"),
    *("router/index/residency.py", "router/index/shared_index.py", "router/index/shared_known.py"),
    *("router/prompt/blocks.py", "router/prompt/bodies.py", "router/prompt/cache.py", "router/prompt/chat.py"),
    *("router/prompt/continuing.py", "router/prompt/turns.py"),
    *(
        "router/prompt/frames.py",
        "router/prompt/hashing.py",
        "router/prompt/memo.py",
        "router/prompt/reader.py",
        "router/prompt/readers.py",
    ),
    *("router/prompt/request.py", "router/prompt/segments.py", "router/prompt/tokens.py"),
    *("router/wire/alarms.py", "router/wire/attempts.py", "router/wire/errand.py", "router/wire/errors.py"),
    *(
        "router/wire/front.py",
        "router/wire/gather.py",
        "router/wire/http.py",
        "router/wire/own.py",
        "router/wire/resumed.py",
        "router/wire/seam.py",
    ),
    *("router/wire/stream.py", "router/wire/upgrade.py", "router/wire/upstream.py"),
)
COPIED = ("router", "fake_backend", "bench", "tests", "docs", "pyproject.toml")
GROUP = "warmroute"


def copy(checkout: Path, directory: Path) -> None:
    """A copy of the checkout, as far as it is needed to compile, test and measure it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in COPIED:
        if (checkout / name).is_dir():
            shutil.copytree(checkout / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif (checkout / name).exists():
            shutil.copy(checkout / name, directory)


def compile_in(directory: Path) -> list[Path]:
    """Compile the hot modules of a copy, each beside its source. Returns the extensions, relative to `directory`."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    with contextlib.chdir(directory):
        flags = ["--config-file", "pyproject.toml", *HOT]
        extensions = mypycify(flags, opt_level="2", debug_level="0", group_name=GROUP)
        command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
        command.inplace = True
        command.ensure_finalized()
        command.run()
    made = sorted(found.relative_to(directory) for found in directory.rglob("*.so"))
    return [found for found in made if found.parts[0] != "build"]


class CompileHook(BuildHookInterface[Any]):
    """Puts the compiled modules into a wheel, beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # what is being edited must run as it reads
        directory = Path(self.root) / "build" / "wheel"
        copy(Path(self.root), directory)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for extension in compile_in(directory):
            build_data["force_include"][str(directory / extension)] = str(extension)


if __name__ == "__main__":
    to = Path(sys.argv[1]).absolute()
    copy(Path(__file__).parent, to)
    compile_in(to)
