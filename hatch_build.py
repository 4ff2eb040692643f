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

# What a request passes on its way, by directory. Not all of the router: what mypyc cannot compile, or what is not in a
# hurry, stays.
_HOT = {
    "router": "course divided evidence journey learning leg passage reading resuming series telemetry trail turn",
    "router/choose": "cost dispatch policies split",
    "router/fleet": "breaker discovery ledger rates replica",
    "router/index": "abridging feedback gallop held known memory neighbour_index residency runs shared_index "
    "shared_known",
    "router/prompt": "blocks bodies cache chat continuing frames hashing memo reader readers request segments "
    "tokens turns",
    "router/wire": "alarms attempts errand errors front gather http known likeness own resumed seam stream "
    "upgrade upstream",
}
# What is written in C, beside Python that says the same, and what it is linked with. Left out, with a warning, where
# the headers of that are missing.
NATIVE = {"router/prompt/digests.c": ["crypto"], "router/index/native.c": []}
HOT = tuple(f"{directory}/{module}.py" for directory, modules in _HOT.items() for module in modules.split())
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
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    with contextlib.chdir(directory):
        flags = ["--config-file", "pyproject.toml", *HOT]
        extensions = mypycify(flags, opt_level="2", debug_level="0", group_name=GROUP)
        extensions += [
            Extension(source.removesuffix(".c").replace("/", "."), [source], libraries=libraries, optional=True)
            for source, libraries in NATIVE.items()
        ]
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
