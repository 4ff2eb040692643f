"""What the bench refuses before it starts anything, and that it says so in one line."""

from __future__ import annotations

import argparse
import json
import sys
import typing
from pathlib import Path

import pytest

from bench import report
from bench.cli import POLICIES, main, parser
from router.choose.policies import policy


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    """The exit status (or the line that it ended with), standard output and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    return end.value.code, shown.out, shown.err


def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 48, "output_length": 2, "hash_ids": [1, 2, 3]}))
    return str(path)


def test_the_policies_offered_are_those_that_there_are() -> None:
    assert set(POLICIES) == {"cost", "round_robin", "least_load"}
    for name in POLICIES:
        policy(name, tie_band_ms=1.0)


@pytest.mark.parametrize("command", [["hit-rate"], ["simulate", "trace.jsonl"]])
@pytest.mark.parametrize("flag", ["--policies", "--policy"])
def test_both_commands_take_either_spelling(command: list[str], flag: str) -> None:
    assert parser().parse_args([*command, flag, "cost, least_load,cost"]).policies == ["cost", "least_load"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hit-rate", "--policies", "cost,zzz"], "'zzz' is no policy; there are cost, round_robin, least_load"),
        (["simulate", "trace.jsonl", "--policy", "zzz"], "'zzz' is no policy; there are"),
        (["hit-rate", "--policies", ","], "',' is no policy"),
        (
            ["hit-rate", "--policies", "round_robin", "--check"],
            "--check holds cost to its bar: name it among --policies",
        ),
        (["hit-rate", "--sessions", "8,x"], "'x' is not a whole number"),
        (["hit-rate", "--replicas", "0"], "0 is less than 1"),
        (["load", "http://a", "--seconds", "soon"], "'soon' is not a positive number of seconds"),
        (["load", "http://a", "--seconds", "nan"], "'nan' is not a positive number of seconds"),
        (["load", "localhost:8080"], "'localhost:8080' is no address such as http://127.0.0.1:8080"),
        (["simulate", "trace.jsonl", "--jitter", "-1"], "'-1' is not a delay in seconds, 0 or more"),
        (["demo", "--port", "65536"], "65536 is not a port"),
    ],
)
def test_a_wrong_argument_is_a_usage_error_that_names_it(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = ended(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in error.splitlines()[-1]
    assert "value:" not in error


def test_an_unknown_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = ended(capsys, "simulate", trace(tmp_path), "--gpu", "X9")
    assert str(status).startswith("bench: --gpu must be one of A100-40, ")
    assert str(status).endswith("got 'X9'")
    assert (out, error) == ("", "")


def test_a_model_too_large_for_its_gpu_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = ended(capsys, "simulate", trace(tmp_path), "--model", "Llama-3.1-70B", "--gpu", "L4")
    assert isinstance(status, str)
    assert status.startswith("bench: No available memory for the cache blocks.")
    assert "\n" not in status
    assert (out, error) == ("", "")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.can_draw()
    # What Python itself notes of a package that cannot be imported.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, error = ended(capsys, "hit-rate", "--out", str(tmp_path / "new"))
    assert status == "bench: --out draws a picture: pip install 'warmroute[bench]'"
    assert (out, error) == ("", "")
    assert not (tmp_path / "new").exists()


def commands(top: argparse.ArgumentParser, name: str = "") -> typing.Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, with its own parser."""
    nested = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, top
    for action in nested:
        for word, command in action.choices.items():
            yield from commands(command, f"{name} {word}".strip())


def test_help_shows_only_defaults_that_say_something() -> None:
    shown = {name: command.format_help() for name, command in commands(parser())}
    assert list(shown) == [
        *("hit-rate", "simulate", "simulate split", "load"),
        *("overhead decision", "overhead redis", "overhead forward", "overhead workers", "demo"),
    ]
    for text in shown.values():
        for noise in ("(default: None)", "(default: False)", "(default: )", "==SUPPRESS=="):
            assert noise not in " ".join(text.split())
    assert "(default: 4)" in " ".join(shown["hit-rate"].split())
    # 0 is a default that says something.
    assert "of the workload (default: 0)" in " ".join(shown["demo"].split())


def test_every_command_but_the_demo_takes_the_common_flags() -> None:
    for name, command in commands(parser()):
        flags = {flag for action in command._actions for flag in action.option_strings}
        assert "--seed" in flags
        assert ({"--json", "--out"} <= flags) is (name != "demo")
