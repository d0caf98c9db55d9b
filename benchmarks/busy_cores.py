"""`python -m benchmarks busy-cores`: what an engine on a CPU loses to other programs, by its BLAS threads.

An engine computes the same batch with all threads of OpenBLAS and, in turns, with as many as other processes
leave cores free, as every engine does by default. Beside it run programs that only count.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mlxrun.cli.bench.models import open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.engine import Engine
from mlxrun.model.machine.blas import describe_blas, hold_blas_threads
from mlxrun.model.machine.free_cores import INTERVAL

SIDES = ("all threads", "as it is")
COUNT = "import itertools\nfor _ in itertools.count(): pass"
ROWS, PROMPT, OUTPUT = 8, 64, 96  # tokens


def run_busy_cores_bench(
    config: Config, model: str, others: Sequence[int], turns: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds of a small batch on both sides beside so many other programs: medians over turns."""
    rng, rows = random.Random(0), []
    with open_model(model) as opened:
        config = replace(config, model=replace(config.model, path=str(opened.folder)))
        engine = _build(config)
        for count in others:
            found: dict[str, list[float]] = {side: [] for side in SIDES}
            with run_programs(count):
                for turn in range(turns + 1):
                    prompts = [tuple(rng.choices(range(opened.vocab), k=PROMPT)) for _ in range(ROWS)]
                    for side in SIDES:
                        seconds = _measure(engine, prompts, side)
                        if turn:  # the first turn warms up
                            found[side].append(seconds)
                    say(f"{count} other programs: turn {turn} of {turns}")
            medians = {side: statistics.median(values) for side, values in found.items()}
            rows.append({"others": count, "seconds": medians, "ratio": medians[SIDES[0]] / medians[SIDES[1]]})
    return {"model": opened.name, "threads": describe_blas().get("blas_threads"), "rows": rows}


def _build(config: Config) -> Engine:
    from mlxrun.engine.build import build_engine

    return build_engine(replace(config, cache=replace(config.cache, backend="none")))


@contextmanager
def run_programs(count: int) -> Iterator[None]:
    """Within the block, so many other processes compute. They have had a moment to begin."""
    programs = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(count)]
    try:
        time.sleep(2 * INTERVAL)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _measure(engine: Engine, prompts: Sequence[tuple[int, ...]], side: str) -> float:
    """Seconds until all prompts have their answers."""
    if side == SIDES[1]:
        return _run(engine, prompts)
    with hold_blas_threads(describe_blas().get("blas_threads")):
        return _run(engine, prompts)


def _run(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> float:
    if engine.before_step is not None:
        engine.before_step()  # what others used until now is known before the clock runs
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=OUTPUT)))
    while engine.busy:
        engine.step()
    return time.perf_counter() - started


def print_busy_cores_report(report: dict[str, Any]) -> None:
    """A row for each number of other programs."""
    console, columns = make_console(None), ("other programs", *(f"{side}, ms" for side in SIDES), "times")
    cells = [
        (str(row["others"]), *(f"{1e3 * row['seconds'][s]:.0f}" for s in SIDES), f"{row['ratio']:.2f}")
        for row in report["rows"]
    ]
    console.print(make_table(columns, 1, cells, console.is_terminal))
