from __future__ import annotations

from pathlib import Path

import pytest

from router.cli import main
from router.config import Address, ConfigError, load, page, parse_url

URL = "http://gpu1:8000"


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("replicas: [http://a:1]\nlisten: {port: 1000, host: 0.0.0.0}\nchoice: {tie_band_ms: 5}\n")
    settings = load(file=file, environ={})
    assert (settings.replicas, settings.listen.port, settings.listen.host) == (["http://a:1"], 1000, "0.0.0.0")
    settings = load(file=file, environ={"WARMROUTE_PORT": "2000", "WARMROUTE_REPLICAS": "http://b:1 http://c:1"})
    assert (settings.replicas, settings.listen.port) == (["http://b:1", "http://c:1"], 2000)
    settings = load(file=file, environ={"WARMROUTE_PORT": "2000"}, flags={"port": "3000"}, replicas=["http://d:1"])
    assert (settings.replicas, settings.listen.port, settings.choice.tie_band_ms) == (["http://d:1"], 3000, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lisen: {port: 1}", "`lisen`; did you mean `listen`?"),
        ("listen: {prot: 1}", "`listen.prot`; did you mean `port`?"),
        ("port: 1", "`port`; it belongs under `listen:`"),
        ("listen: 5", "`listen` must be a mapping"),
        ("[1]", "must hold a mapping"),
        ("a: [", "not YAML"),
        ("listen: {port: 99999}", "listen.port: must be a whole number from 0 to 65535"),
        ("listen: {port: many}", "listen.port: must be a whole number from 0 to 65535"),
        ("listen: {drain_seconds: .inf}", "listen.drain_seconds: must be a number of at least 0"),
        ("fleet: {probe_seconds: 0}", "fleet.probe_seconds: must be a number above 0"),
        ("listen: {show_choice: 5}", "listen.show_choice: must be true or false"),
        ("choice: {policy: best}", "choice.policy: must be cost, round_robin or least_load"),
        ("replicas: 5", "replicas: must be a list of URLs"),
        ("replicas: [5]", "replicas: must be a list of URLs"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(file=file, replicas=None if "replicas" in text else [URL], environ={})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_in_the_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean `WARMROUTE_PORT`"):
        load(replicas=[URL], environ={"WARMROUTE_PROT": "1"})


def test_a_wrong_value_is_told_with_where_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^WARMROUTE_PORT=abc: must be a whole number from 0 to 65535$"):
        load(replicas=[URL], environ={"WARMROUTE_PORT": "abc"})
    with pytest.raises(ConfigError, match=r"^--policy best: must be cost, round_robin or least_load$"):
        load(replicas=[URL], environ={"WARMROUTE_POLICY": "cost"}, flags={"policy": "best"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", True), ("ON", True), ("true", True), ("1", True), ("no", False), ("off", False), ("0", False)],
)
def test_words_for_true_and_false(text: str, value: bool) -> None:
    assert load(replicas=[URL], environ={"WARMROUTE_SHOW_CHOICE": text}).listen.show_choice is value


@pytest.mark.fault("address without scheme")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gpu1:8000", "did you mean `http://gpu1:8000`"),
        ("ftp://gpu1", "http or https"),
        ("http://:8000", "names no host"),
        ("http://gpu1:99999", "port"),
        ("http://gpu1:8000/v1", "leave out `/v1`"),
        ("http://u:p@gpu1:8000", "only scheme"),
        ("http://gpu1:8000/?x=1", "only scheme"),
    ],
)
def test_replicas_are_checked_at_start(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(replicas=[url], environ={})
    assert said in str(error.value)


def test_addresses() -> None:
    assert parse_url("http://gpu1") == Address("gpu1", 80, False, "")
    assert parse_url("https://gpu1/a/b/") == Address("gpu1", 443, True, "/a/b")
    assert parse_url("http://[::1]:8000").authority == "[::1]:8000"
    with pytest.raises(ConfigError, match="twice"):
        load(replicas=["http://a:80", "http://a"], environ={})
    with pytest.raises(ConfigError, match="no replicas"):
        load(environ={})


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (Path(__file__).parents[1] / "docs" / "settings.md").read_text() == page()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "gpu1:8000"], "did you mean `http://gpu1:8000`"),
        (["serve", URL, "--prot", "1"], "did you mean --port"),
        (["serve"], "no replicas given"),
        (["serve", URL, "--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
        (["serve", URL, "--config", "/nowhere"], "--config /nowhere"),
        (["serve", URL, "--api-key-file", "/nowhere"], "--api-key-file /nowhere"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(arguments) == 2
    except SystemExit as end:  # argparse's own way
        assert end.code == 2
    error = capsys.readouterr().err
    assert said in error.strip().splitlines()[-1]
    assert "Traceback" not in error


def test_the_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("lisen: {}\n")
    monkeypatch.setenv("WARMROUTE_CONFIG", str(file))
    assert main(["serve", URL]) == 2
    assert f"--config {file}: unknown key `lisen`; did you mean `listen`?" in capsys.readouterr().err
    file.write_text("replicas: 5\n")
    with pytest.raises(ConfigError, match="replicas: must be a list of URLs"):
        load(file=file, environ={"WARMROUTE_CONFIG": "elsewhere"})
