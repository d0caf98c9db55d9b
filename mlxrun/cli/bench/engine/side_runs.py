"""The runs of the sides of `mlxrun bench engine`, in turns.

The order alternates (A B, B A, ...), so that a machine that slows down affects both sides. Each run loads
one side alone, warms it up, measures one workload and closes it, so that no side uses memory during the
other's run. A side that fails in a workload has no more runs of it; what it measured before counts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlxrun.cli.bench.engine.interactive import (
    InteractiveContender,
    compute_interactive_metrics,
    run_interactive,
)
from mlxrun.cli.bench.engine.measurement import Contender, Trace, compute_metrics, run_workload
from mlxrun.cli.bench.engine.workloads import MOMENTS, RequestWorkload
from mlxrun.core.errors import ConfigError, MlxrunError

OURS, PEER = "mlxrun", "mlx-lm"

Opener = Callable[[], Contender]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchMeter:
    """Clock and memory counters: `reset_peak(drop_pool)` starts a new peak and returns the bytes in use, as
    `read_memory` does at once."""

    clock: Callable[[], float]
    reset_peak: Callable[[bool], int]
    read_peak: Callable[[], int]
    read_memory: Callable[[], int]


@dataclass(slots=True)
class SideRuns:
    """One side's runs of one workload; `error` ended them, None: they were as many as planned."""

    runs: list[dict[str, float | None]] = field(default_factory=list)
    last: Trace | None = None
    error: str | None = None


def make_meter() -> BenchMeter:
    """The meter of this process: seconds of `time.perf_counter`, and MLX's counters."""
    from mlxrun.model.machine import device as counters

    return BenchMeter(time.perf_counter, counters.start_measuring, counters.read_peak, counters.read_active)


def alternate(names: Sequence[str], repeat: int) -> Iterator[str]:
    """A B, B A, A B, ...: `repeat` rounds."""
    for i in range(repeat):
        yield from names if i % 2 == 0 else reversed(names)


def measure_workload(
    workload: RequestWorkload,
    openers: Mapping[str, Opener],
    repeat: int,
    meter: BenchMeter,
    say: Say,
    warm_up: RequestWorkload | None = None,
    sides: dict[str, SideRuns] | None = None,
) -> dict[str, SideRuns]:
    """Run the workload `repeat` times on each side, in alternating order, each time after `warm_up`: requests
    of the same shapes; None: the same ones. `sides` is filled as they run, for whoever is interrupted.

    A side that fails gets an `error` and no more runs, which would take their time and most likely fail too;
    its memory is released. ConfigError if settings are wrong.
    """
    sides = {} if sides is None else sides
    sides |= {name: SideRuns() for name in openers}
    hint = ""
    for name in alternate(list(openers), repeat):
        side, began = sides[name], time.monotonic()
        if side.error is not None:
            continue
        turn = f"{workload.name} {name} {len(side.runs) + 1}/{repeat}"
        say(f"{turn}: loading{hint if name == PEER else ''}")
        moment = MOMENTS[len(side.runs) % len(MOMENTS)]
        works = (replace(workload, moment=moment), replace(warm_up or workload, moment=moment))
        try:
            side.last, numbers = _measure_once(openers[name], *works, meter, say, turn)
        except ConfigError:
            raise
        except Exception as error:  # whatever an engine raises, the other side and the runs so far count
            side.error = _report_failure(name, turn, error, say)
        else:
            side.runs.append(numbers)
            lasted = time.monotonic() - began
            say(f"{turn}: {side.last.end - side.last.start:.2f} s")
            if name == OURS:
                took = f"{OURS} took {lasted:.0f} s for this, warm-up included"
                hint = f" ({took}; --no-peer leaves {PEER} out)"
        if side.error is not None:  # not sooner, as the error refers to what the engine held
            meter.reset_peak(True)
    return sides


def _measure_once(
    opener: Opener,
    workload: RequestWorkload,
    warm_up: RequestWorkload,
    meter: BenchMeter,
    say: Say,
    turn: str,
) -> tuple[Trace, dict[str, float | None]]:
    """Load, warm up, measure, close."""
    before = meter.reset_peak(True)
    contender = opener()
    try:
        weights = meter.reset_peak(True) - before
        say(f"{turn}: running, first a warm-up of the same size")
        _run(contender, warm_up, meter)  # all of it, so that each shape is compiled
        alive = meter.reset_peak(False)  # a server keeps its pool of free buffers
        trace, freed = _run(contender, workload, meter)
        peak = meter.read_peak()
    finally:
        contender.close()
    numbers = (
        compute_metrics(trace, workload)
        if freed is None
        else compute_interactive_metrics(trace, workload, freed)
    )
    return trace, numbers | {"peak_bytes": weights + peak - alive, "peak_rows_bytes": peak - alive}


def _run(contender: Contender, workload: RequestWorkload, meter: BenchMeter) -> tuple[Trace, float | None]:
    """Run once. In `interactive`, the second value is how long a cancelled row's memory was in use."""
    if workload.name != "interactive":
        return run_workload(contender, workload, meter.clock), None
    assert isinstance(contender, InteractiveContender)
    return run_interactive(contender, workload, meter.clock, meter.read_memory)


def _report_failure(name: str, turn: str, error: Exception, say: Say) -> str:
    """Say that a turn failed, with the traceback if it is a bug in mlxrun; returns the error in one line."""
    text = describe_error(error)
    say(f"{turn}: FAILED: {text}")
    if name != PEER and not isinstance(error, MlxrunError):
        say("".join(traceback.format_exception(error)))
    return text


def describe_error(error: Exception) -> str:
    """The error in one line, with its type if it is none of mlxrun's."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MlxrunError) else f"{type(error).__name__}: {text}"
