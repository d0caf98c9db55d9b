"""The lines of several conversations in one file, each by a process of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from mlxrun.cli.chat.line_history import MOST
from tests.helpers.command_processes import run_program, start_program

PROGRAM = """
import readline, sys
from pathlib import Path
from mlxrun.cli.chat.line_history import LineHistory
history = LineHistory(Path(sys.argv[1]))
history.load()
print(readline.get_current_history_length(), flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    readline.add_history(f"{sys.argv[2]}-{number}")
history.save()
"""


def make_command(path: Path, name: str, count: int) -> list[str | Path]:
    """A conversation in which lines are typed. It shows how many there were, and ends with a line."""
    return [sys.executable, "-c", PROGRAM, path, name, str(count)]


def test_conversations_that_end_together_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "typed"
    assert run_program(make_command(path, "first", 1), stdin=subprocess.DEVNULL).stdout == "0\n"
    with ExitStack() as stack:
        commands = [make_command(path, name, 40) for name in "abcd"]
        processes = [stack.enter_context(start_program(each, stdin=subprocess.PIPE)) for each in commands]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(60) for process in processes] == [0] * 4
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(["first-0", *(f"{name}-{at}" for name in "abcd" for at in range(40))])
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "typed"
    for name, count in (("a", MOST), ("b", 3)):
        assert run_program(make_command(path, name, count), stdin=subprocess.DEVNULL).returncode == 0
    lines = path.read_text().splitlines()
    assert len(lines) == MOST and lines[0] == "a-3" and lines[-3:] == ["b-0", "b-1", "b-2"]


def test_a_file_that_cannot_be_used_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_program(make_command(tmp_path / "file" / "typed", "a", 1), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "0\n")
