"""`python -m benchmarks gpu`: all figures of README and docs/ that come from a GPU, one run after the other.

Each run is a command of its own, so that none has the memory or the compiled kernels of another. It writes
its JSON into the folder of results, from which `python -m benchmarks.tables` makes the tables.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxrun.cli.bench.serve.machine_report import MAIN

MLXRUN = ("-c", MAIN, "bench", "engine")
BENCHMARKS = ("-m", "benchmarks")
GRACE = 20.0  # seconds in which a run that is interrupted writes what it has measured


@dataclass(frozen=True, slots=True)
class GPURun:
    """A command. `name`: of its JSON; `seconds`: after which it is interrupted, about twice what it took on
    an H200."""

    name: str
    program: tuple[str, ...]
    options: str
    seconds: int


RUNS = (
    GPURun(
        "engine-h200",
        MLXRUN,
        "--model qwen3-0.6b --workload uniform --workload few --workload single --workload ragged "
        "--workload mixed --workload staggered --repeat 2",
        600,
    ),
    GPURun(
        "engine-h200-reproducible",
        MLXRUN,
        "--model qwen3-0.6b --workload uniform --workload few --workload single --workload ragged --no-peer "
        "--repeat 2 --set engine.reproducible=true",
        120,
    ),
    GPURun(
        "engine-h200-interactive",
        MLXRUN,
        "--model qwen3-0.6b --workload interactive --no-peer --repeat 3",
        120,
    ),
    GPURun(
        "engine-h200-8b-4bit",
        MLXRUN,
        "--model qwen3-8b-4bit --workload uniform --workload few --workload single --repeat 1",
        300,
    ),
    GPURun(
        "engine-h200-30b-a3b-4bit",
        MLXRUN,
        "--model qwen3-30b-a3b-4bit --workload uniform --workload few --workload single --repeat 1",
        600,
    ),
    GPURun("decode-layers-0.6b", BENCHMARKS, "decode-layers --model qwen3-0.6b", 120),
    GPURun("decode-layers-8b", BENCHMARKS, "decode-layers --model qwen3-8b", 180),
)


def run_all(runs: Sequence[GPURun], folder: Path, say: Callable[[str], None]) -> list[str]:
    """Run them, each for at most its seconds. Returns the names of those that failed or were cut."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for run in runs:
        begin = time.monotonic()
        code = _run(run, folder)
        say(f"{run.name}: exit code {code}, {time.monotonic() - begin:.0f} s")
        if code != 0:
            failed.append(run.name)
    return failed


def _run(run: GPURun, folder: Path) -> int:
    """The exit code of a run, which is interrupted when its time is over. It ends with this process."""
    command = [sys.executable, *run.program, *run.options.split(), "--json", str(folder / f"{run.name}.json")]
    process = subprocess.Popen(command)
    try:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(run.seconds)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return 124
    finally:
        process.kill()
        process.wait()
