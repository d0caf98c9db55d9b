"""Prepares the system for commands that run long: enough open files, and a machine that stays awake."""

from __future__ import annotations

import logging
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from mlxrun.core.processes import stop_process

log = logging.getLogger(__name__)

OPEN_FILES = 10_240  # the most that macOS accepts; a shell there begins with 256
_FEW = 1_024  # connections, files of jobs and of the cache, and libraries
_END_SECONDS = 5.0  # that the program which keeps the machine awake may take to end


def raise_open_files() -> None:
    """Let this process open OPEN_FILES files at once, or as many as its hard limit allows. The log says if
    they are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        wanted = soft
    reason = f"the hard limit is {hard}"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        wanted, reason = soft, str(error)
    if wanted != resource.RLIM_INFINITY and wanted < _FEW:
        log.warning(
            "at most %d files may be open at once (%s): connections and jobs beyond that fail; raise it with "
            "`ulimit -n`",
            wanted,
            reason,
        )


@contextmanager
def keep_awake(setting: str) -> Iterator[None]:
    """Keep the machine awake during the block, as `batch.keep_awake` (`setting`) says. The display may go
    dark."""
    command = _find_inhibitor(setting)
    if command is None:
        yield
        return
    null = subprocess.DEVNULL
    # A session of its own: Ctrl-C lets the job finish its lines, and no terminal is asked for a password.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
    ) as process:
        try:
            yield
        finally:
            end_process(process)


def _find_inhibitor(setting: str) -> list[str] | None:
    """The command that keeps the machine awake. It ends with this process, however that ends: caffeinate
    waits for its number, and `cat` for the end of its input."""
    system = platform.system()
    if setting == "never" or (setting == "auto" and system != "Darwin"):
        return None
    caffeinate, inhibit = shutil.which("caffeinate"), shutil.which("systemd-inhibit")
    if system == "Darwin" and caffeinate:
        return [caffeinate, "-i", "-w", str(os.getpid())]
    if system != "Darwin" and inhibit:
        return [inhibit, "--what=idle:sleep", "--who=mlxrun", "--why=a job runs", "--mode=block", "cat"]
    if setting == "always":
        name = "caffeinate" if system == "Darwin" else "systemd-inhibit"
        log.warning("batch.keep_awake: there is no %s here, so the machine may fall asleep", name)
    return None


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End the program; the log says if it had ended before the job, so that the machine could sleep."""
    early = process.poll()
    if early is not None:
        name = os.path.basename(str(process.args[0]))  # type: ignore[index]
        log.warning("batch.keep_awake: %s ended early, with exit code %d", name, early)
    source: IO[bytes] | None = process.stdin
    if source is not None:
        source.close()
    stop_process(process, _END_SECONDS)
