"""Records a job that is killed and resumed, as an asciicast: `python -m benchmarks.plots.record`.

A shell runs in a pseudo-terminal, in a folder of its own with a copy of the job. This program types
`mlxrun batch jobs/eval.jsonl`, kills the process with SIGKILL when a part of the lines is done, and types the
same command again. Everything the terminal shows is written with its real times; `cast.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "results" / "resume.cast"
COLUMNS, ROWS = 96, 30
PROMPT = "$ "
COMMAND = "mlxrun batch jobs/eval.jsonl"
TYPING = 0.045  # seconds between keys
PATIENCE = 600.0  # seconds that one command may take
PROGRESS = re.compile(rb"(\d+)/(\d+)")


@dataclass(slots=True)
class Terminal:
    """A shell in a pseudo-terminal.

    `events` are those of an asciicast: seconds, kind ("o" for output, "m" for a marker), data.
    """

    pid: int
    handle: int
    start: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    seen: bytes = b""

    def read(self, seconds: float) -> None:
        """Take in what the shell writes within so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self.handle], [], [], left)
            if not ready:
                return
            data = os.read(self.handle, 65536)
            self.seen += data
            self.events.append((self._now(), "o", data.decode("utf-8", errors="replace")))

    def wait(self, done: Callable[[bytes], bool]) -> None:
        """Take in output until it satisfies `done`, which gets everything since the last key."""
        end = time.monotonic() + PATIENCE
        while not done(self.seen):
            if time.monotonic() > end:
                raise SystemExit(f"nothing came of it:\n{self.seen.decode(errors='replace')[-2000:]}")
            self.read(0.05)

    def type(self, text: str) -> None:
        """Type a line, as a person does."""
        for key in text:
            os.write(self.handle, key.encode())
            self.read(TYPING)
        self.read(0.3)
        self.seen = b""
        os.write(self.handle, b"\r")

    def mark(self, text: str) -> None:
        """A caption from here on."""
        self.events.append((self._now(), "m", text))

    def _now(self) -> float:
        return round(time.monotonic() - self.start, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, and write the cast."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots.record", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--kill-at", type=float, default=0.45, help="share of the lines after which it is killed"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mlxrun-cast-") as folder:
        shutil.copytree(
            ROOT / "jobs", Path(folder) / "jobs", ignore=shutil.ignore_patterns("*.out.jsonl*", "*.errors.*")
        )
        events = _record(Path(folder), options.kill_at)
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "title": COMMAND,
        "env": {"TERM": "xterm-256color"},
    }
    lines = [json.dumps(header), *(json.dumps(event, ensure_ascii=False) for event in events)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out.name}: {len(events)} events, {events[-1][0]:.0f} s", file=sys.stderr)
    return 0


def _record(folder: Path, kill_at: float) -> list[tuple[float, str, str]]:
    terminal = _open(folder)
    terminal.wait(lambda seen: seen.endswith(PROMPT.encode()))
    terminal.mark("1  A job starts")
    terminal.type(COMMAND)
    terminal.wait(lambda seen: _share(seen) >= kill_at)
    terminal.mark("2  The process is killed with kill -9")
    os.kill(_child(terminal.pid), signal.SIGKILL)
    terminal.wait(lambda seen: seen.endswith(PROMPT.encode()))
    terminal.read(1.0)
    terminal.mark("3  The same command resumes the job")
    terminal.type(COMMAND)
    terminal.wait(lambda seen: seen.endswith(PROMPT.encode()))
    terminal.type("echo $?")
    terminal.wait(lambda seen: seen.endswith(PROMPT.encode()))
    os.kill(terminal.pid, signal.SIGHUP)
    os.waitpid(terminal.pid, 0)
    return terminal.events


def _share(seen: bytes) -> float:
    """Share of the lines that the newest progress bar shows as done."""
    found = PROGRESS.findall(seen)
    return int(found[-1][0]) / int(found[-1][1]) if found else 0.0


def _open(folder: Path) -> Terminal:
    """bash without the user's settings, in the folder, with this environment's programs first."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PS1": PROMPT,
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "BASH_SILENCE_DEPRECATION_WARNING": "1",
    }
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
    pid, handle = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--noprofile", "--norc", "--noediting", "-i"], variables | kept)
    ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return Terminal(pid, handle)


def _child(pid: int) -> int:
    """The process that the shell runs."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


if __name__ == "__main__":
    raise SystemExit(main())
