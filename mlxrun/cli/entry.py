"""The entry point of `mlxrun`, which imports nothing heavy: Ctrl-C ends it quietly from its start."""

from __future__ import annotations

import os
import signal

from mlxrun.cli import INTERRUPTED_EXIT


def main() -> int:
    """Run this process's command line and return its exit code. Until `cli.main` handles signals, Ctrl-C ends
    the process at once: nothing is open yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from mlxrun.cli.main import main as run

    return run()


def _end(number: int, frame: object) -> None:
    os.write(2, b"mlxrun: interrupted\n")
    os._exit(INTERRUPTED_EXIT)
