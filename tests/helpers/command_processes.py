"""Programs in processes of their own, for which no test waits without a limit; and commands of mlxrun, which
tests suspend, interrupt and kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.storm_counts import count

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds: longer is a hang, on whatever machine
_PROGRAM = """
import sys
{before}
from mlxrun.cli.main import main
sys.argv[0] = "mlxrun"
sys.exit(main())
"""


@contextmanager
def start_program(
    command: Sequence[str | Path], *, seconds: float = PATIENCE, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A program whose output can be read within the block, after which it is killed with all that it has
    started. The same ends it once the block has taken so many seconds, and the test fails: so nothing that
    reads from it or waits for it waits longer. `options`: of Popen."""
    given = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    process = subprocess.Popen(command, **given)
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill_session(process)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        _kill_session(process)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            with suppress(BrokenPipeError):
                pipe.close()
        process.wait(PATIENCE)
        assert not is_late.is_set(), f"it was killed after {seconds:g} s: {command}"


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a program for which nobody has waited yet, and what else is in its session."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def run_program(
    command: Sequence[str | Path], *, seconds: float = PATIENCE, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what `subprocess.run` does, with all output as text.
    AssertionError, with what it has printed, if it takes longer than so many seconds, or fails and `check` is
    set. `options`: of Popen."""
    output = errors = ""
    try:
        with start_program(command, seconds=seconds, **{"stderr": subprocess.PIPE, **options}) as process:
            output, errors = process.communicate()
    except AssertionError as error:
        error.add_note(f"it has printed: {output}{errors}")
        raise
    assert not check or process.returncode == 0, errors
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start_command(
    folder: Path, *arguments: str, before: str = "", plain_user: bool = False, **environ: str | None
) -> subprocess.Popen[str]:
    """Start `mlxrun` with these arguments in a folder; what it prints is in `log`, there. `before`: code that
    runs first, such as one that shortens a limit; `plain_user`: permissions hold for it.
    `environ`: variables, None: without one."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, **environ}
    if plain_user:  # by the program itself: a fork of this process, with its threads, must not run Python
        before = f"from tests.helpers import plain_user; plain_user.drop_overrides()\n{before}"
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(before=before), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            cwd=folder,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,
        )


def read_log(folder: Path) -> str:
    """What the commands of a folder have printed."""
    path = folder / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_until(condition: Callable[[], bool], describe: Callable[[], str] = str) -> None:
    """Wait for something that has to come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, describe()
        time.sleep(0.01)


def is_asleep(pid: int) -> bool:
    """Whether the main thread of a process has waited for half a second, so that it waits for what comes
    from outside. One that is not scheduled is not asleep."""
    states = []
    for _ in range(10):
        found = run_program(["ps", "-o", "stat=", "-p", str(pid)], check=True)
        states.append(found.stdout[:1])
        time.sleep(0.05)
    return set(states) == {"S"}


@dataclass
class RunningCommand:
    """`mlxrun serve`, which is ready. `folder` has its log."""

    process: subprocess.Popen[str]
    url: str
    folder: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.partition("://")[2].partition(":")
        return host, int(port)


@contextmanager
def run_serve(
    folder: Path, *sets: str, before: str = "", plain_user: bool = False
) -> Iterator[RunningCommand]:
    """`mlxrun serve` on the embedded model with these settings, until the block ends."""
    given = [each for text in (f"server.data_path={folder / 'data'}", *sets) for each in ("--set", text)]
    process = start_command(folder, "serve", "--port", "0", *given, before=before, plain_user=plain_user)
    try:
        wait_until(
            lambda: "\nready: " in read_log(folder) or process.poll() is not None, lambda: read_log(folder)
        )
        found = re.search(r"listening on (https?://\S+?);", read_log(folder))
        assert found is not None and process.poll() is None, read_log(folder)
        yield RunningCommand(process, found[1], folder)
    finally:
        process.kill()
        process.wait()


def suspend(processes: Iterable[int], seconds: float) -> None:
    """All of them stand still for so long. A process may have ended."""
    pids = list(processes)
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause)
    count("suspensions")
