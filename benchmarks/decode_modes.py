"""`python -m benchmarks decode-modes`: steps of the usual mode and of `engine.reproducible`, in turns.

Beside them stands `engine.reproducible` without the load check, whose rows have a forward each on a CPU. All
engines are in one process, so they have one thread of BLAS. Rows have prompts of random tokens. Processor
time is compared, which other programs change less than the time that passes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlxrun.cli.bench.models import open_model
from mlxrun.cli.bench.report import make_console, make_table
from mlxrun.config.settings import Config
from mlxrun.core.request import Request, SamplingParams
from mlxrun.engine.engine import Engine

MODES = {"usual": (False, True), "reproducible": (True, True), "unchecked": (True, False)}


def run_modes_bench(
    config: Config,
    model: str,
    rows: Sequence[int],
    context: int,
    steps: int,
    turns: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Milliseconds of processor time of a decode step by number of rows, medians over turns, and the medians
    of the turns' ratios to the usual mode. `context`: tokens of each prompt."""
    found = []
    from mlxrun.model.machine.device import describe_device

    with open_model(model) as opened:
        config = replace(config, model=replace(config.model, path=str(opened.folder)))
        engines = {mode: _build(config, *switches) for mode, switches in MODES.items()}
        for count in rows:
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for turn in range(turns + 1):
                for mode in MODES if turn % 2 else reversed(MODES):
                    seconds = _time_steps(engines[mode], count, context, steps, opened.vocab)
                    times[mode] += [1e3 * seconds] if turn else []  # the first turn warms up
            ratios = {
                mode: statistics.median(b / a for a, b in zip(times["usual"], times[mode], strict=True))
                for mode in MODES
            }
            say(f"{count} rows: {', '.join(f'{mode} {ratio:.2f}' for mode, ratio in ratios.items())}")
            found.append(
                {"rows": count, "ms": {m: statistics.median(t) for m, t in times.items()}, "ratio": ratios}
            )
        reports = {mode: engine.load_check for mode, engine in engines.items()}
        device = describe_device(config.engine)
        widths = {m: [*r.methods.narrow_widths, r.methods.fixed_width] for m, r in reports.items() if r}
    return {"model": opened.name, "context": context, "device": device, "widths": widths, "rows": found}


def _build(config: Config, reproducible: bool, load_check: bool) -> Engine:
    from mlxrun.engine.build import build_engine

    engine = replace(config.engine, reproducible=reproducible, load_check=load_check, blas_threads=1)
    cache = replace(config.cache, backend="none")
    return build_engine(replace(config, engine=engine, cache=cache))


def _time_steps(engine: Engine, count: int, context: int, steps: int, vocab: int) -> float:
    """Seconds of processor time of a step in which all rows decode."""
    rng, params = random.Random(count), SamplingParams(max_tokens=2 * steps + count)
    for row in range(count):
        engine.add(Request(str(row), tuple(rng.choices(range(vocab), k=context)), params))
    while not all(state.output for state in engine.scheduler.requests):
        engine.step()
    started = time.process_time()
    for _ in range(steps):
        engine.step()
    seconds = time.process_time() - started
    for row in range(count):
        engine.abort(str(row))
    while engine.busy:
        engine.step()
    return seconds / steps


def print_modes_report(report: dict[str, Any]) -> None:
    """A row for each number of rows."""
    console, columns = (
        make_console(None),
        ("rows", *(f"{mode}, ms" for mode in MODES), "reproducible / usual"),
    )
    cells = [
        (
            str(row["rows"]),
            *(f"{row['ms'][mode]:.2f}" for mode in MODES),
            f"{row['ratio']['reproducible']:.2f}",
        )
        for row in report["rows"]
    ]
    console.print(make_table(columns, 0, cells, console.is_terminal))
