"""Starts and ends processes: modules of this package, what these have started, and programs of the system.
It also measures the time in which this process ran.

SIGSTOP, Ctrl-Z or a paused container suspends a process. A time limit must not count that time: the process
would fail work as soon as it goes on. (While the machine sleeps, the monotonic clock stands still too.)

No system says how long a process was suspended. So `RunningClock` is read often, and a longer gap between two
readings does not count.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")  # of Linux


def start_module(
    module: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that runs a module with these arguments. `environment`: additional variables;
    `prefix`: words of a command that starts it, such as a sandbox; `options`: keyword arguments of Popen."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: files of the folder that this process was started in are no modules of the child.
    return subprocess.Popen(
        [*prefix, sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        **options,
    )


def stop_process(process: subprocess.Popen[Any], seconds: float) -> None:
    """End a process in order. One that has not ended after so many seconds is killed."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_output(*command: str, seconds: float = 5.0) -> str:
    """What a program of the system writes; empty if it cannot be run, or takes longer than `seconds`."""
    # Without close_fds, macOS starts the program by posix_spawn: this process, which may hold a model, is not
    # forked.
    options: dict[str, Any] = {"close_fds": False, "stdin": subprocess.DEVNULL, "timeout": seconds}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
        return str(done.stdout)
    return ""


MARK = "MLXRUN_CHILD"  # a variable of the environment, which processes inherit
_ROUNDS = 20  # looks for marked processes, as one that is found may just have started another


def list_mapped_files() -> list[str]:
    """The paths of the files that this process has in memory, such as its libraries; none where the system
    does not say it. A path need not be text in the locale's encoding."""
    try:
        rows = [row.split(maxsplit=5) for row in _MAPS.read_bytes().split(b"\n")]
    except OSError:
        return []
    return sorted(map(os.fsdecode, {row[5] for row in rows if len(row) == 6 and row[5].startswith(b"/")}))


def end_marked(mark: str) -> None:
    """Kill all other processes whose environment has this value of MARK: what a marked process has started,
    also in sessions of its own. Nothing is found without /proc, and no process that began with an empty
    environment."""
    for _ in range(_ROUNDS):
        found = [pid for pid in _list_marked(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _list_marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of another user, or ended
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


GAP = 1.0  # seconds between two readings that a busy machine may cause; a longer time was a suspension
STEP = 1.0  # seconds at most that are waited between two readings


class RunningClock:
    """Seconds in which this process ran. One thread reads it."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._suspended = 0.0

    def read(self, waited: float = 0.0) -> float:
        """The seconds since the start. `waited`: seconds that the caller meant to wait since the last
        reading."""
        now = time.monotonic()
        if now - self._last > waited + GAP:
            self._suspended += now - self._last
        self._last = now
        return now - self._suspended
