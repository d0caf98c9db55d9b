"""A suite in a process of its own that is killed at random moments: no line is lost, none is there twice, and
a start loads no model twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.batch_fakes import by_id
from tests.helpers.storm_counts import count, make_rng
from tests.helpers.suite_bench import run_suite_in_process
from tests.helpers.suite_files import write_suite

LINES = 8
TASKS = """
    tasks:
      plain: {data: rows.csv, prompt: "say {{ n }}", expected: n, generation: {max_tokens: 20}}
      shots:
        data: rows.csv
        prompt: "{{ n }}"
        few_shot: {answer: "{{ n }}", count: 2}
        generation: {max_tokens: 9}
      raw: {data: rows.csv, prompt: "once {{ n }}", endpoint: completion, generation: {n: 2, max_tokens: 9}}
"""
FAKES = """
    models:
      a: {set: {model.path: org/one}}
      b: {set: {model.path: org/two}}
      c: {set: {model.path: org/three}}
"""
REAL = """
    models:
      a: {set: {engine.reproducible: true}}
      b: {set: {engine.reproducible: true, model.context_length: 512}}
      c: {set: {engine.reproducible: true, model.dtype: bfloat16}}
"""
ROWS = "n\n" + "".join(f"{n}\n" for n in range(LINES))
Start = Callable[[Path, float, Path], BaseProcess]


def count_records(folder: Path) -> int:
    """Complete records of all cells."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("job.out.jsonl"))


def read_answers(folder: Path) -> dict[str, dict[str, bytes]]:
    """The records of each cell by id; each may be there once."""
    return {str(path.relative_to(folder)): by_id(path) for path in sorted(folder.rglob("job.out.jsonl"))}


def read_manifest(suite: Path) -> dict[str, Any]:
    """suite.json, which is complete at any moment."""
    found: dict[str, Any] = json.loads((suite.with_suffix(".out") / "suite.json").read_bytes())
    return found


def kill_suite(suite: Path, kills: int, start: Start, log: Path, rng: random.Random) -> None:
    """Start a suite and kill it, again and again; no start may have fewer records than the one before."""
    folder, seen = suite.with_suffix(".out"), 0
    for kill in range(kills):
        process = start(suite, 0.02, log)
        wanted = seen + rng.randrange(1, max(2, (9 * LINES - seen) // (kills - kill + 1)))
        until = time.monotonic() + 120
        while count_records(folder) < wanted and process.is_alive():
            assert time.monotonic() < until, "the suite does not go on"
            time.sleep(rng.random() * 0.01)
        count("kills of suites", int(process.is_alive()))
        process.kill()
        process.join()
        found = read_manifest(suite)
        assert len(found["cells"]) == 9 and len(found["runs"]) <= kill + 1
        now = count_records(folder)
        assert now >= seen, "records were lost"
        seen = now


def check_killed_suite(folder: Path, kills: int, models: str, start: Start, rng: random.Random) -> Path:
    """Kill a suite of 3 models x 3 tasks; in the end it has the bytes of one that was left alone. The file
    with the loads of each process, where there is one."""
    (folder / "whole").mkdir()
    whole = write_suite(folder / "whole", models + TASKS, rows_csv=ROWS)
    suite, log = write_suite(folder, models + TASKS, rows_csv=ROWS), folder / "loads.txt"
    kill_suite(suite, kills, start, log, rng)
    for path in (suite, whole):
        process = start(path, 0.0, log)
        process.join(180)
        assert process.exitcode == 0
    answers, wanted = (read_answers(path.with_suffix(".out")) for path in (suite, whole))
    assert len(answers) == 9 and {len(records) for records in wanted.values()} == {LINES}
    assert answers == wanted
    last = read_manifest(suite)
    assert last["state"] == "done" and [cell["done"] for cell in last["cells"]] == [LINES] * 9
    assert all(number == 1 for run in last["runs"] for number in run["loads"].values())
    return log


def start_fake(path: Path, pause: float, log: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_suite_in_process, args=(path, pause, log))
    process.start()
    return process


def run_command(path: Path) -> None:
    """`mlxrun eval` in this process."""
    os.execv(sys.executable, [sys.executable, "-m", "mlxrun", "eval", str(path)])


def start_command(path: Path, pause: float, log: Path) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=run_command, args=(path,))
    process.start()
    return process


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks processes that have all imports done (it finds modules by PYTHONPATH alone)."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.suite_bench", "mlxrun.api.openai.request"])
    forkserver.ensure_running()


def check_loads(log: Path) -> None:
    """Each process loaded each model once at most, and some of them were needed again."""
    loads = Counter(log.read_text().splitlines())
    assert set(loads.values()) == {1} and len(loads) >= 6


@pytest.mark.slow
def test_three_kills(tmp_path: Path) -> None:
    check_loads(check_killed_suite(tmp_path, 3, FAKES, start_fake, random.Random()))


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_twenty_kills(tmp_path: Path, seed: int, night: int) -> None:
    check_loads(check_killed_suite(tmp_path, 20, FAKES, start_fake, make_rng(seed, night)))


@pytest.mark.sweep
def test_twenty_kills_of_the_command(tmp_path: Path) -> None:
    """The built-in model in three forms, loaded in each process."""
    check_killed_suite(tmp_path, 20, REAL, start_command, random.Random())
