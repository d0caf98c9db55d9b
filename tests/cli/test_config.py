"""`mlxrun config ...` and the command line's frame: messages, exit codes, lazy commands."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from mlxrun import __version__
from mlxrun.cli import main as frame
from mlxrun.cli.logging_setup import JsonFormatter, set_up_logging
from mlxrun.cli.main import COMMANDS, main
from mlxrun.config.loading import load_config
from mlxrun.config.settings import Config, LogSettings
from mlxrun.errors import EngineDead


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxrun")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


def test_check_of_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("scheduler:\n  policy: fair\n")
    assert main(["config", "check", "a.yaml"]) == 0
    assert capsys.readouterr() == ("a.yaml: ok\n", "")


def test_check_shows_every_error_of_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    """design 12: all at once, with place and suggestion; exit 2."""
    Path("a.yaml").write_text("scheduler:\n  policy: fcsf\n  chunck: 64\n")
    Path("b.yaml").write_text("log:\n  format: jsn\n")
    Path("c.yaml").write_text("")
    assert main(["config", "check", "a.yaml", "b.yaml", "c.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "c.yaml: ok\n"
    assert err.splitlines() == [
        "mlxrun: a.yaml:2:11: scheduler.policy: 'fcsf' is not one of 'fcfs', 'priority', 'shortest', 'fair'"
        " (did you mean 'fcfs'?)",
        "mlxrun: a.yaml:3:3: scheduler.chunck: unknown key (did you mean 'chunk'?)",
        "mlxrun: b.yaml:2:11: log.format: 'jsn' is not one of 'text', 'json' (did you mean 'json'?)",
    ]


def test_check_without_a_file_takes_what_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    Path("mlxrun.yaml").write_text("log: {level: debug}\n")
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out == "built-in defaults: ok\nmlxrun.yaml: ok\n"


def test_show_names_the_origin_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text("scheduler:\n  policy: fair\n")
    monkeypatch.setenv("MLXRUN_LOG__LEVEL", "debug")
    assert main(["config", "show", "-c", "a.yaml", "--set", "scheduler.chunk=64"]) == 0
    rows = dict(row.split("  # ") for row in capsys.readouterr().out.splitlines() if "  # " in row)
    origins = {key.strip(): origin for key, origin in rows.items()}
    assert origins["policy: fair"] == "a.yaml:2:11"
    assert origins["level: debug"] == "MLXRUN_LOG__LEVEL"
    assert origins["chunk: 64"] == "--set scheduler.chunk"
    assert origins["path: embedded"] == "default"


def test_what_show_prints_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(
        "model:\n"
        "  revision: '1e3'\n"
        "  path: a/b\n"
        "  names: ['null', '#1', 'a: b', \"line\\nbreak\", '$${HOME}']\n"
        "  chat_template_args: {flag: true, text: 'no'}\n"
    )
    before = load_config(Path("a.yaml"))
    assert before.config.model.names == ("null", "#1", "a: b", "line\nbreak", "${HOME}")
    assert main(["config", "show", "-c", "a.yaml"]) == 0
    Path("b.yaml").write_text(capsys.readouterr().out)
    assert load_config(Path("b.yaml")).config == before.config


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--set", "log.level=error"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["log"] == {"level": "error", "format": "text", "prompts": False}
    assert found["origins"]["log.level"] == "--set log.level"
    assert found["config_hash"] == load_config(None, ["log.level=error"]).digest


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["scheduler"]["additionalProperties"] is False


def test_init_writes_a_config_of_defaults_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init"]) == 0
    text = Path("mlxrun.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=")
    schema = Path(text.splitlines()[0].partition("=")[2])
    assert json.loads(schema.read_text())["title"] == "mlxrun config"
    assert load_config(None).config == Config()
    assert main(["config", "init"]) == 2
    assert "mlxrun.yaml is there already; --force" in capsys.readouterr().err
    Path("mlxrun.yaml").write_text("")
    assert main(["config", "init", "mlxrun.yaml", "--force"]) == 0
    assert Path("mlxrun.yaml").read_text() == text


def test_init_into_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "nowhere/a.yaml"]) == 2
    assert capsys.readouterr().err.startswith("mlxrun: nowhere/a.yaml cannot be written: No such file")


def test_help_lists_the_commands_and_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and line in out for name, (_, line) in COMMANDS.items())
    assert "mlxrun batch jobs/eval.jsonl" in out


def test_every_subcommand_of_config_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check", "show", "schema", "init"):
        assert main(["config", name, "--help"]) == 0
        assert f"mlxrun config {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlxrun, version {__version__}\n"


def test_a_wrong_command_line_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["confg"]) == 2
    assert main(["config", "check", "--nope"]) == 2
    assert "No such command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (EngineDead("the engine\nhas stopped"), 3, ["mlxrun: the engine", "mlxrun: has stopped"]),
        (KeyboardInterrupt(), 130, ["mlxrun: interrupted"]),
        (ZeroDivisionError("oops"), 3, ["ZeroDivisionError: oops", "this is a bug in mlxrun"]),
    ],
)
def test_the_border_where_errors_end(
    raised: BaseException,
    status: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A MlxrunError is a sentence and its exit code; anything else shows where the bug is."""

    @click.command()
    def command() -> None:
        raise raised

    _put_in_place_of_doctor(command, monkeypatch)
    assert main(["doctor"]) == status
    err = capsys.readouterr().err
    assert all(line in err for line in said)
    assert ("Traceback" in err) == isinstance(raised, ZeroDivisionError)


def test_a_command_returns_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    _put_in_place_of_doctor(click.command()(lambda: 1), monkeypatch)
    assert main(["doctor"]) == 1


def _put_in_place_of_doctor(command: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "stand_in", command, raising=False)
    monkeypatch.setitem(COMMANDS, "doctor", ("mlxrun.cli.main:stand_in", ""))


@pytest.mark.usefixtures("_logging_restored")
def test_json_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogSettings(level="warning", format="json"))
    log = logging.getLogger("mlxrun.test")
    log.info("not shown")
    log.warning("%d rows\nwait", 3)
    (line,) = capsys.readouterr().err.splitlines()
    row = json.loads(line)
    assert (row["level"], row["logger"], row["message"]) == ("warning", "mlxrun.test", "3 rows\nwait")


def test_json_log_lines_hold_the_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.LogRecord(
            "mlxrun", logging.ERROR, "", 0, "failed", (), (ValueError, error, error.__traceback__)
        )
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]


@pytest.mark.usefixtures("_logging_restored")
def test_text_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogSettings(level="debug"))
    logging.getLogger("mlxrun.test").debug("shown")
    logging.getLogger("somebody.else").info("not shown")
    assert capsys.readouterr().err.endswith(" DEBUG shown\n")


def test_set_values_are_yaml() -> None:
    loaded = load_config(
        None, ["media.roots=[., ../images]", "model.chat_template_args={enable_thinking: false}"]
    )
    assert loaded.config.media.roots == (".", "../images")
    assert loaded.config.model.chat_template_args == {"enable_thinking": False}
    assert yaml.safe_load("{enable_thinking: false}") == loaded.config.model.chat_template_args


@pytest.mark.parametrize(
    ("name", "said"), [("batc", "Did you mean 'batch'?"), ("zzz", "No such command 'zzz'")]
)
def test_a_command_that_is_not_there(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    told = capsys.readouterr().err
    assert said in told and ("mean" in told) is (name == "batc")
