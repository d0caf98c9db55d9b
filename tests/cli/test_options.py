"""The options that commands share: the config file, --set, and a command's own options."""

from __future__ import annotations

import errno
import io
import logging
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlxrun.cli.main import main
from mlxrun.cli.options import (
    add_config_options,
    add_json_option,
    add_model_argument,
    list_first,
    load_command_config,
    make_repeat_option,
    write_new_file,
)
from mlxrun.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_several_models_are_refused_in_their_place(tmp_path: Path) -> None:
    """With what helps. A command that takes them has them."""
    (tmp_path / "mlxrun.yaml").write_text("version: 1\nmodels:\n  chat: embedded\n")
    place = r"^mlxrun\.yaml:3:3: models: only `mlxrun serve` without --ray has several; "
    with pytest.raises(ConfigError, match=f"{place}give a config of one model$"):
        load_command_config(None, ())
    with pytest.raises(ConfigError, match=f"{place}start it$"):
        load_command_config(None, (), remedy="start it")
    assert load_command_config(None, (), several=True).config.models == {"chat": "embedded"}


def test_a_command_gets_the_options_as_they_are_typed() -> None:
    found: dict[str, object] = {}

    @click.command()
    @add_config_options
    @add_json_option
    @make_repeat_option("Runs.")
    def command(**options: object) -> None:
        found.update(options)

    arguments = ["-c", "a.yaml", "--set", "log.level=debug", "--set", "x", "--repeat", "2", "--json", "-"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert found == {
        "config_path": Path("a.yaml"),
        "sets": ("log.level=debug", "x"),
        "repeat": 2,
        "json_path": Path("-"),
    }


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [([], None), (["a"], "a"), (["--model", "a"], "a"), (["a", "--model", "b"], "--model b: the model is a")],
    ids=["none", "argument", "option", "both"],
)
def test_the_model_may_be_named_as_other_programs_have_it(arguments: list[str], wanted: str | None) -> None:
    @click.command()
    @add_model_argument
    def command(model: str | None) -> None:
        click.echo(str(model))

    assert str(wanted) in CliRunner().invoke(command, arguments).output


def test_the_config_is_loaded_and_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, then variables, then --set, then the options of the command."""
    Path("a.yaml").write_text("server: {port: 1, host: 127.0.0.1}\nlog: {level: error}\n")
    monkeypatch.setenv("MLXRUN_SERVER__PORT", "2")
    assert load_command_config(Path("a.yaml"), ()).config.server.port == 2
    assert logging.getLogger("mlxrun").level == logging.ERROR
    assert load_command_config(Path("a.yaml"), ["server.port=3"]).config.server.port == 3
    options = [("--port", "server.port", "4")]
    loaded = load_command_config(Path("a.yaml"), ["server.port=3"], options)
    assert (loaded.config.server.port, str(loaded.origins["server.port"])) == (4, "--port")


def test_what_only_a_run_could_refuse_is_found_here() -> None:
    """Names of parsers and the syntax of a template, before a model is loaded."""
    Path("t.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError) as caught:
        load_command_config(None, ["parsers.tools=nonsense", "model.chat_template=t.jinja"])
    parsers, template = sorted(str(caught.value).splitlines(), reverse=True)
    assert parsers.startswith("--set parsers.tools: ") and "nonsense" in parsers
    assert template.startswith("--set model.chat_template: ") and "t.jinja:1: " in template


@pytest.mark.parametrize(
    ("count", "shown"), [(0, []), (3, ["0", "1", "2"]), (5, ["0", "1", "2", "... and 2 more"])]
)
def test_of_a_long_list_the_others_are_counted(count: int, shown: list[str]) -> None:
    assert list(list_first(range(count), 3)) == shown


@pytest.mark.parametrize(
    "command", ["serve", "chat", "fit", "show", "doctor", "service install", "batch job.jsonl --model"]
)
@pytest.mark.parametrize("model", ["./none", "none.gguf"])
def test_a_wrong_model_is_named_as_it_was_given(
    command: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    (tmp_path / "job.jsonl").write_text('{"custom_id": "a", "body": {"messages": []}}\n')
    assert main([*command.split(), model]) in (2, 3)
    said = capsys.readouterr().err
    name = "--model: model.path" if "--model" in command else "MODEL: "
    assert said.startswith(f"mlxrun: {name}") and "none" in said and "--set" not in said


def test_a_full_disk_leaves_a_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a config would be read as one by every later command."""

    def fail(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlxrun.core.durable_writes.sync_file", fail)
    old = tmp_path / "old.yaml"
    old.write_text("version: 1\n")
    for path, force in ((old, True), (tmp_path / "new.yaml", False)):
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            write_new_file(path, "log: {level: debug}\n", force)
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"] and old.read_text() == "version: 1\n"
