"""All runs are made, one that takes too long is interrupted, and all files of the tables are made by one."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_runs import RUNS, GPURun, run_all
from benchmarks.tables import ENGINE, LAYERS

WRITE = "import sys, json, pathlib; path = pathlib.Path(sys.argv[sys.argv.index('--json') + 1]); "
FAST = ("-c", WRITE + "path.write_text(json.dumps(sys.argv[1:3]))")
SLOW = (
    "-c",
    # A shell that ran this in the background has let it ignore interrupts.
    "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    + WRITE
    + "\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    path.write_text('[]')",
)
FAILING = ("-c", "raise SystemExit(3)")


def test_a_slow_run_keeps_what_it_measured_and_the_next_ones_follow(tmp_path: Path) -> None:
    runs = [
        GPURun("slow", SLOW, "", 4),
        GPURun("failing", FAILING, "", 30),
        GPURun("fast", FAST, "--model tiny", 30),
    ]
    said: list[str] = []
    assert run_all(runs, tmp_path / "results", said.append) == ["slow", "failing"]
    assert (tmp_path / "results" / "slow.json").read_text() == "[]"
    assert json.loads((tmp_path / "results" / "fast.json").read_text()) == ["--model", "tiny"]
    assert [line.split(",")[0] for line in said] == [
        "slow: exit code 124",
        "failing: exit code 3",
        "fast: exit code 0",
    ]


def test_the_runs_make_every_file_of_the_tables_that_a_gpu_measured() -> None:
    files = {name for names in ENGINE.values() for name in names if "h200" in name} | set(LAYERS)
    assert {name.removesuffix("-staggered") for name in files} <= {run.name for run in RUNS}
