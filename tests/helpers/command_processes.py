"""Commands of mlxrun in processes of their own, which tests suspend, interrupt and kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.plain_user import drop_overrides
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


def start_command(
    folder: Path, *arguments: str, before: str = "", plain_user: bool = False, **environ: str | None
) -> subprocess.Popen[str]:
    """Start `mlxrun` with these arguments in a folder; what it prints is in `log`, there. `before`: code that
    runs first, such as one that shortens a limit; `plain_user`: permissions hold for it.
    `environ`: variables, None: without one."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, **environ}
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
            preexec_fn=drop_overrides if plain_user else None,
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
