"""How a process ends that has loaded MLX: its own code, all cleaned up, and no abort."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.core.errors import ConfigError, ModelLoadError
from tests.helpers.command_processes import run_program

# An interpreter that is taken apart meets `Last`, as it would meet the threads of MLX.
PROGRAM = """
import atexit, os, sys, tempfile, threading, time, types
{loaded}
from mlxrun.cli import main

class Last:
    def __del__(self, abort=os.abort):
        abort()

def command(argv, *rest):
    global kept
    kept = tempfile.TemporaryDirectory(prefix="kept-", dir=".")
    atexit.register(lambda: open("registered", "w").write("done"))
    threading.Thread(target=lambda: (time.sleep(0.05), open("thread", "w").write("done"))).start()
    print("not flushed", end=".")
    print("nor this", end=".", file=sys.stderr)
    return run(argv, *rest)

last, run, main._run = Last(), main._run, command
sys.argv = ["mlxrun", *{arguments}]
sys.exit(main.main({argv}))
"""
LOADED = 'sys.modules["mlx.core"] = types.ModuleType("mlx.core")'


def end(
    tmp_path: Path, *arguments: str, argv: str = "", loaded: str = LOADED, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(arguments=json.dumps(arguments), argv=argv, loaded=loaded)
    return run_program(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE if stdout is None else stdout,
    )


CRASH = """
import sys
import click
from mlxrun.cli.main import main

@click.command()
def crash():
    import faulthandler, signal
    {before}
    signal.raise_signal(signal.SIGSEGV)

sys.argv = ["mlxrun"]
sys.exit(main(command=crash))
"""


def crash(before: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", CRASH.format(before=before)]
    return run_program(program)


def test_a_crash_inside_a_library_says_where_it_was() -> None:
    done = crash()
    assert done.returncode == -signal.SIGSEGV and done.stdout == ""
    assert "Fatal Python error: Segmentation fault" in done.stderr and "in crash" in done.stderr


def test_without_the_handler_a_crash_says_nothing() -> None:
    """The mutation twin."""
    done = crash("faulthandler.disable()")
    assert done.returncode == -signal.SIGSEGV and done.stderr == ""


def test_a_process_without_standard_error_runs() -> None:
    program = (
        "import sys; from mlxrun.cli.main import main; sys.argv = ['mlxrun', '--version']; sys.exit(main())"
    )
    command = f'exec "{sys.executable}" -c "{program}" 2>&-'
    done = run_program(["sh", "-c", command])
    assert done.returncode == 0 and done.stdout.startswith("mlxrun")


WITHOUT_STREAMS = """
import os, subprocess, sys
import click
from mlxrun.cli.main import main
from mlxrun.core.terminal import open_console

@click.command()
@click.argument("path")
def show(path):
    with open(path, "w") as file:
        open_console().print("a table")
        print("a line", file=sys.stderr)
        os.write(1, b"of a library")
        os.write(2, b"of a library")
        subprocess.run(["echo", "of a child"], check=True)
        file.write(str(file.fileno()))

sys.exit(main(command=show))
"""


def test_a_process_without_streams_writes_into_no_other_file(tmp_path: Path) -> None:
    """The next file had the number of a stream, and so what was printed; a console ended in a traceback."""
    output = tmp_path / "output"
    command = f'exec "{sys.executable}" -c "$0" "{output}" <&- >&- 2>&-'
    assert run_program(["sh", "-c", command, WITHOUT_STREAMS]).returncode == 0
    assert int(output.read_text()) > 2


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["config", "check", "none.yaml"], 2)])
def test_the_code_is_the_commands_and_nothing_is_lost(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    """Buffers, temporary folders, what is registered, and threads that are still at work."""
    done = end(tmp_path, *arguments)
    assert done.returncode == code
    assert done.stdout.startswith("not flushed.") and done.stderr.startswith("nor this.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["registered", "thread"]


@pytest.mark.parametrize(("argv", "loaded"), [('["--version"]', LOADED), ("", "")], ids=["given", "no mlx"])
def test_others_end_as_python_does(tmp_path: Path, argv: str, loaded: str) -> None:
    """The twin: the interpreter is taken apart where MLX is not loaded, and where a program calls `main`."""
    assert end(tmp_path, "--version", argv=argv, loaded=loaded).returncode == -6


def test_a_bug_that_is_no_exception_ends_as_python_does(tmp_path: Path) -> None:
    """No code is known then, so that none can hide it."""
    fail = (
        LOADED + "\nfrom mlxrun.cli import main\ndef fail(*arguments): raise SystemExit(7)\nmain._run = fail"
    )
    assert end(tmp_path, loaded=fail).returncode == -6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    """The last words of a command that was done otherwise."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = end(tmp_path, "config", "check", "none.yaml", stdout=full)
        assert done.returncode == 2 and "standard output: No space left on device" in done.stderr
        quiet = LOADED + "\nfrom mlxrun.cli import main\nmain._run = lambda *arguments: 0"
        done = end(tmp_path, loaded=quiet, stdout=full)
        assert done.returncode == 3 and "standard output: No space left on device" in done.stderr
    finally:
        os.close(full)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (ConfigError("server.port: cannot listen"), 2, "mlxrun: server.port: cannot listen\n"),
        (ModelLoadError("no such model"), 3, "mlxrun: no such model\n"),
        (ValueError("a slip"), 3, "this is a bug in mlxrun"),
    ],
)
def test_a_server_that_ends_says_why(
    outcome: int | Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A start that failed may have had an engine: it ends by the same door."""

    async def serves(*given: Any) -> int:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("mlxrun.cli.commands.serve.serve_until_signal", serves)
    monkeypatch.setattr("mlxrun.cli.options.set_up_logging", lambda settings: None)
    assert main(["serve", "--port", "0"]) == code
    shown = capsys.readouterr().err
    assert said in shown and bool(said) == bool(shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["batch", "job.jsonl", "--set", "engine.load_check=false"],
        ["doctor", "--no-model"],
        ["bench", "engine", "--workload", "uniform", "--scale", "0.01", "--repeat", "1", "--no-peer"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_load_mlx_leave_before_the_interpreter_ends(
    tmp_path: Path, arguments: list[str]
) -> None:
    """For real: none of them meets `Last`."""
    line = {"id": "a", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 2}
    (tmp_path / "job.jsonl").write_text(json.dumps(line) + "\n")
    done = end(tmp_path, *arguments, loaded="")
    assert done.returncode in (0, 1) and (arguments[0] == "doctor" or done.returncode == 0), done.stderr
    assert not list(tmp_path.glob("kept-*"))
