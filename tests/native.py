"""Extension modules that are written in C, compiled for a test as strictly as the compiler can."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_STRICT = ["-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]


def compiled(name: str, source: Path, directory: Path, *libraries: str) -> Any:
    """The module `name`. Skips the test where there is no compiler, or none of the headers that it needs.

    NATIVE_FLAGS in the environment are more of the compiler's options, such as -fsanitize=address.
    """
    at = directory / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["cc", "-shared", "-fPIC", *_STRICT, *os.environ.get("NATIVE_FLAGS", "").split()]
    command += [f"-I{sysconfig.get_path('include')}", str(source), "-o", str(at)]
    command += [f"-l{library}" for library in libraries]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    except subprocess.CalledProcessError as error:
        if "h: No such file" in error.stderr or any(f"-l{library}" in error.stderr for library in libraries):
            pytest.skip("there are no headers of Python, or of what it is linked with")
        raise AssertionError(error.stderr) from None
    spec = importlib.util.spec_from_file_location(name, at)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
