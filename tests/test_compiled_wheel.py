"""What a compiled wheel is made of. That it runs is for `make test-compiled` to show."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture
def build() -> ModuleType:
    path = CHECKOUT / "hatch_build.py"
    if not path.exists():
        pytest.skip("this is the compiled copy")
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_to_be_compiled_is_there(build: ModuleType) -> None:
    assert [name for name in build.HOT if not (CHECKOUT / name).is_file()] == []
    assert len(set(build.HOT)) == len(build.HOT)
    for name in build.NATIVE:
        source = CHECKOUT / name
        assert source.is_file()
        assert source.with_suffix(".pyi").is_file()
        assert not source.with_suffix(".py").exists()  # it would be the same module


def test_what_gives_other_threads_a_turn_stays_interpreted(build: ModuleType) -> None:
    assert "router/prompt/others.py" not in build.HOT


def test_nothing_compiled_waits_while_an_exception_is_at_hand(build: ModuleType) -> None:
    # A coroutine of mypyc's leaves it behind in the thread then, and whatever is raised later holds on to it.
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)
    found = []
    for name in build.HOT:
        for node in ast.walk(ast.parse((CHECKOUT / name).read_text())):
            if isinstance(node, ast.Try):
                within = [*node.finalbody, *(each for handler in node.handlers for each in handler.body)]
                found += [
                    f"{name}:{each.lineno}" for part in within for each in ast.walk(part) if isinstance(each, waits)
                ]
    assert found == []


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_wheel_carries_the_extensions_and_an_editable_install_none(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "a.py").touch()

    def compiled(directory: Path) -> list[Path]:
        assert (directory / "router" / "a.py").exists()
        return [Path("router/a.so"), Path("warmroute__mypyc.so")]

    monkeypatch.setattr(build, "compile_in", compiled)
    data: dict[str, Any] = {"force_include": {}}
    hook = build.CompileHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    hook.initialize(version, data)
    if version == "editable":
        assert data == {"force_include": {}}
        return
    at = tmp_path / "build" / "wheel"
    assert data["force_include"] == {
        str(at / "router/a.so"): "router/a.so",
        str(at / "warmroute__mypyc.so"): "warmroute__mypyc.so",
    }
    assert (data["pure_python"], data["infer_tag"]) == (False, True)
