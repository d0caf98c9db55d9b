"""The entry point of the command."""

from __future__ import annotations

import subprocess
import sys

from mlxrun.cli import INTERRUPTED_EXIT
from tests.helpers.command_processes import run_program

CODE = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from mlxrun.cli.entry import main
sys.exit(main())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-c", code, "--version"])


def test_an_interrupt_while_it_is_imported_ends_it_quietly() -> None:
    done = run(CODE)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED_EXIT, "", "mlxrun: interrupted\n")


def test_it_runs_the_command_line() -> None:
    done = run(CODE.replace("os.kill", "max"))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("mlxrun, version")


def test_it_runs_as_a_module() -> None:
    done = run_program([sys.executable, "-m", "mlxrun", "--version"])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("mlxrun, version")
    assert run_program([sys.executable, "-m", "mlxrun", "nonsense"]).returncode == 2
