"""A child is a module of this package; a suspended process loses no time."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import mlxrun
from mlxrun.core import processes
from mlxrun.core.processes import GAP, RunningClock, read_output, start_module, stop_process


def test_files_of_the_working_directory_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mlxrun", "click"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the folder')")
    for module in ("json", "click"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('of the folder')")
    with start_module("mlxrun", "--version", stdout=subprocess.PIPE) as process:
        out = process.communicate()[0]
    assert process.returncode == 0 and out.startswith(b"mlxrun")


def test_a_process_that_does_not_end_is_killed() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); input()"
    pipe = subprocess.PIPE
    for program, seconds, code in (("print(1, flush=True); input()", 60.0, -15), (stubborn, 0.1, -9)):
        with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None and process.stdout.readline()
            stop_process(process, seconds)
            assert process.returncode == code


def test_programs_of_the_system() -> None:
    """One that is not there, or takes too long, says nothing. Bytes that are not UTF-8 are replaced."""
    assert read_output("printf", "a\\377") == "a\N{REPLACEMENT CHARACTER}"
    assert read_output("no-such-program") == "" == read_output("sleep", "60", seconds=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system says it")
def test_files_in_memory_whose_names_are_odd(tmp_path: Path) -> None:
    """Such as an extension of Python in a folder that has been named in Latin-1."""
    odd = os.fsencode(tmp_path) + b"/\xe9 \xc2\x85"
    with open(odd, "wb+") as file:
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 4096):
            found = processes.list_mapped_files()
        assert os.fsdecode(odd) in found and all(path.startswith("/") for path in found)
        assert os.fsdecode(odd) not in processes.list_mapped_files()


def test_no_files_in_memory_where_the_system_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MAPS", Path("/nowhere"))
    assert processes.list_mapped_files() == []


def test_the_environment_and_options_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "a")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: (command, options))
    command, options = cast(Any, start_module("m", 1, "x", environment={"OWN": "b"}, stdin=3))
    assert command == [sys.executable, "-P", "-m", "m", "1", "x"]
    assert options["stdin"] == 3 and (options["env"]["KEPT"], options["env"]["OWN"]) == ("a", "b")
    assert options["env"]["PYTHONPATH"] == f"{Path(mlxrun.__file__).parents[1]}{os.pathsep}/elsewhere"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the system, which tests set."""
    times = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: times[0])  # type: ignore[attr-defined]
    return times


def test_it_counts_what_is_read_often(now: list[float]) -> None:
    clock = RunningClock()
    first = clock.read()
    for _ in range(100):
        now[0] += GAP
        clock.read()
    assert clock.read() - first == pytest.approx(100 * GAP)


def test_it_stands_still_in_a_suspension(now: list[float]) -> None:
    """Also of one in a wait, of which it is not known how much was left."""
    clock: Any = RunningClock()
    first = clock.read()
    now[0] += 3600.0
    assert clock.read() == first
    now[0] += 5.0
    assert clock.read(waited=5.0) == first + 5.0
    now[0] += 5.0 + GAP + 0.1
    assert clock.read(waited=5.0) == first + 5.0
    now[0] += 0.5
    assert clock.read() == first + 5.5


def find_in_sources(*words: str) -> list[tuple[str, str]]:
    root = Path(mlxrun.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    return [(str(path), word) for path, text in sources.items() for word in words if word in text]


def test_nothing_forks_and_goes_on_in_python() -> None:
    """Metal and the threads of BLAS do not survive it; a new process always runs a program."""
    forbidden = ("multiprocessing", "os.fork", "pty.fork", "preexec_fn", "ProcessPoolExecutor", "num_proc")
    assert find_in_sources(*forbidden) == []


def test_no_cancellation_is_lost() -> None:
    """`wait_for` of Python 3.11 swallows one that comes just as its work is done: whoever waits for the end
    of the cancelled task then waits for ever. `asyncio.timeout` does not."""
    assert find_in_sources("asyncio.wait_for(") == []
