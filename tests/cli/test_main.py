"""The command line: help, exit codes, messages, commands that are imported when they are called."""

from __future__ import annotations

import os
import sys

import click
import pytest

from mlxrun import __version__
from mlxrun.cli.main import COMMANDS, main, report_error
from mlxrun.core.errors import ConfigError, EngineDead
from tests.helpers.command_processes import run_program


def test_help_lists_the_commands_and_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and line in out for name, line in COMMANDS.items())
    assert "mlxrun batch jobs/eval.jsonl" in out


@pytest.mark.parametrize("name", ["service", "cache", "job", "config", "bench"])
def test_a_group_alone_shows_its_help_in_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    said = capsys.readouterr()
    assert "\\n" not in said.out + said.err and "\nCommands:\n" in said.out + said.err
    assert "..." not in (said.out + said.err).replace("[ARGS]...", "")


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
        (EngineDead("the engine\nhas stopped"), 3, ["mlxrun: the engine\\nhas stopped\n"]),
        (ConfigError.from_problems(["a", "b"]), 2, ["mlxrun: a\nmlxrun: b\n"]),
        (KeyboardInterrupt(), 130, ["mlxrun: interrupted"]),
        (ZeroDivisionError("oops"), 3, ["ZeroDivisionError: oops", "this is a bug in mlxrun"]),
    ],
)
def test_errors_become_messages_and_exit_codes(
    raised: BaseException,
    status: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A MlxrunError is a message with an exit code; anything else shows its traceback."""

    @click.command()
    def command() -> None:
        raise raised

    _replace_doctor(command, monkeypatch)
    assert main(["doctor"]) == status
    err = capsys.readouterr().err
    assert all(line in err for line in said)
    assert ("Traceback" in err) == isinstance(raised, ZeroDivisionError)


def test_a_command_returns_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_doctor(click.command()(lambda: 1), monkeypatch)
    assert main(["doctor"]) == 1


def _replace_doctor(command: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.cli.commands.doctor.command", command)


@pytest.mark.parametrize(
    ("name", "said"),
    [("batc", "Did you mean 'batch'?"), ("run", "Did you mean 'chat'?"), ("zzz", "No such command 'zzz'")],
)
def test_a_command_that_is_not_there(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    error = capsys.readouterr().err
    assert said in error and ("mean" in error) is (name != "zzz")


def complete(words: str) -> list[str]:
    """What the shell is offered after these words."""
    environ = {**os.environ, "_MLXRUN_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environ["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    command = "from mlxrun.cli.main import main; main()"
    done = run_program([sys.executable, "-c", command], env=environ)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mlxrun ", [f"plain,{name}" for name in COMMANDS]),
        ("mlxrun ba", ["plain,batch"]),
        ("mlxrun batch --re", ["plain,--retry-failed"]),
        ("mlxrun job make --templ", ["plain,--template"]),
        ("mlxrun config ch", ["plain,check"]),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, offered: list[str]) -> None:
    assert complete(words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    """As README.md tells users to load it."""
    environ = {**os.environ, "_MLXRUN_COMPLETE": f"{shell}_source"}
    command = "from mlxrun.cli.main import main; main()"
    done = run_program([sys.executable, "-c", command], env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_MLXRUN_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize("name", ["mlx", "mlx.core"])
def test_mlx_that_cannot_be_imported_is_no_bug(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ImportError("libmlx.so: no such file", name=name)) == 3
    err = capsys.readouterr().err
    assert err.startswith("mlxrun: MLX cannot be imported: libmlx.so: no such file; pip install")
    assert "bug" not in err and "Traceback" not in err
    assert report_error(ImportError("no such module", name="other")) == 3
    assert "this is a bug in mlxrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["score", "verify", "replay", "bundle", "report", "compare", "history h.json", "job make"]
)
@pytest.mark.parametrize("path", ["a/" * 2500 + "x", "a" * 5000, "a" * 5000 + ".yaml"], ids=len)
def test_a_path_that_no_file_has(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The system refuses to look for it. It is bad input, as a file that does not exist is."""
    assert main([*command.split(), path]) == 2
    said = capsys.readouterr().err
    assert said.endswith(": File name too long\n") and len(said.splitlines()) == 1, said
