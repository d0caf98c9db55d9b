"""No test waits for a program without a limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.command_processes import run_program, start_program, wait_until
from tests.helpers.scorer_bombs import is_running

# It has a child, which keeps its output open.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{more}
"""


@pytest.mark.parametrize("more", ["time.sleep(600)", ""], ids=["hangs", "ends before its child"])
def test_a_program_that_takes_too_long_is_killed_with_what_it_has_started(more: str) -> None:
    with pytest.raises(AssertionError, match="it was killed after 3 s: .*sleep") as late:
        run_program([sys.executable, "-c", HANGS.format(more=more)], seconds=3.0)
    (said,) = late.value.__notes__
    pid = int(said.removeprefix("it has printed: "))
    wait_until(lambda: not is_running(pid))


def test_nothing_waits_for_a_line_that_does_not_come() -> None:
    with (
        pytest.raises(AssertionError, match="it was killed after 1 s"),
        start_program([sys.executable, "-c", "import time; time.sleep(600)"], seconds=1.0) as process,
    ):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"


def test_what_a_program_prints_and_its_exit_code(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); sys.exit('no')"
    done = run_program([sys.executable, "-c", code], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{tmp_path}\n", "no\n")
    with pytest.raises(AssertionError, match="no"):
        run_program([sys.executable, "-c", code], check=True)
