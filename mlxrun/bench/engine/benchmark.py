"""`mlxrun bench engine`: our engine and mlx-lm's BatchGenerator over the same files, in one process, in turn.

The order alternates (A B, B A, ...), so that a machine that warms up or slows down hurts both. Each turn
loads one side alone, warms it up, measures one workload and closes it: neither pays for the other's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun import __version__
from mlxrun.bench.engine.measurement import (
    Contender,
    Trace,
    agreement,
    drive,
    medians,
    metrics,
    ratios,
)
from mlxrun.bench.engine.workloads import Workload, make_workload
from mlxrun.bench.models import BenchModel, bench_model
from mlxrun.config.settings import Config
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK

FORMAT = 1
OURS, PEER = "mlxrun", "mlx-lm"

Opener = Callable[[], Contender]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure."""

    model: str
    workloads: tuple[str, ...]
    config: Config
    scale: float = 1.0
    repeat: int = 3
    peer: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MemoryMeter:
    """Clock and memory counters, as functions: `settle(drop_pool)` starts a new peak and says what lives."""

    clock: Callable[[], float]
    settle: Callable[[bool], int]
    peak: Callable[[], int]


@dataclass(slots=True)
class SideRuns:
    """One side's runs of one workload."""

    runs: list[dict[str, float | None]] = field(default_factory=list)
    last: Trace | None = None


def run_bench(plan: BenchPlan, say: Say) -> dict[str, Any]:
    """Measure everything; the report, as `--json` writes it."""
    from mlxrun.model.doctor import describe_device
    from mlxrun.model.machine import memory_meter as counters
    from mlxrun.model.machine.device import resolve_config
    from mlxrun.model.machine.versions import list_library_versions

    config = resolve_config(plan.config)  # every prompt is computed: the peer has no prefix cache here
    plan = replace(plan, config=replace(config, cache=replace(config.cache, backend="none")))
    meter = MemoryMeter(time.perf_counter, counters.start_measuring, counters.read_peak)
    with bench_model(plan.model, plan.seed) as model:
        openers = _openers(plan, model)
        workloads = {}
        for name in plan.workloads:
            workload = make_workload(name, plan.scale, model.vocab, plan.seed)
            sides = measure_workload(workload, openers, plan.repeat, meter, say)
            workloads[name] = summary(workload, sides) | _chunk(plan, model, workload, sides)
    return {
        "format": FORMAT,
        "versions": {"mlxrun": __version__} | list_library_versions(),
        "device": describe_device(),
        "model": {"name": model.name, "dtype": model.dtype, "vocab": model.vocab},
        "settings": _settings(plan),
        "workloads": workloads,
    }


def _openers(plan: BenchPlan, model: BenchModel) -> dict[str, Opener]:
    """How to load each side. Ours computes in the file's type, as mlx-lm does."""
    from mlxrun.bench.engine.mlxrun_contender import MlxrunContender

    settings = replace(plan.config.model, path=str(model.folder))
    if settings.dtype == "auto" and model.dtype is not None:
        settings = replace(settings, dtype=model.dtype)  # type: ignore[arg-type]
    config = replace(plan.config, model=settings)
    openers: dict[str, Opener] = {OURS: lambda: MlxrunContender.open(config)}
    if plan.peer:
        from mlxrun.bench.engine.mlx_lm_contender import MlxLmContender

        openers[PEER] = lambda: MlxLmContender.open(model.folder)
    return openers


def _settings(plan: BenchPlan) -> dict[str, Any]:
    settings = {
        "scale": plan.scale,
        "repeat": plan.repeat,
        "seed": plan.seed,
        "engine": asdict(plan.config.engine),
        "scheduler": asdict(plan.config.scheduler),
    }
    if plan.peer:
        from mlxrun.bench.engine.mlx_lm_contender import SETTINGS

        settings[PEER] = dict(SETTINGS)
    return settings


def _chunk(
    plan: BenchPlan, model: BenchModel, workload: Workload, sides: Mapping[str, SideRuns]
) -> dict[str, Any]:
    """The yardstick of `staggered`: one prefill chunk alone, and our rows' p99 beside the prefill over it."""
    if workload.long_id is None:
        return {}
    from mlxrun.bench.engine.mlx_lm_contender import chunk_seconds

    prompt, chunk = workload.job(workload.long_id).prompt, plan.config.scheduler.chunk or DEFAULT_CHUNK
    seconds = chunk_seconds(Path(model.folder), prompt, chunk)
    gaps = {name: medians(side.runs)["long_gap_p99_s"] for name, side in sides.items()}
    over = {name: None if gap is None else gap / seconds for name, gap in gaps.items()}
    return {"chunk": {"tokens": min(chunk, len(prompt)), "seconds": seconds, "p99_in_chunks": over}}


# -- turns ------------------------------------------------------------------------------------------


def turns(names: Sequence[str], repeat: int) -> Iterator[str]:
    """A B, B A, A B, ...: `repeat` rounds."""
    for i in range(repeat):
        yield from names if i % 2 == 0 else reversed(names)


def measure_workload(
    workload: Workload, openers: Mapping[str, Opener], repeat: int, meter: MemoryMeter, say: Say
) -> dict[str, SideRuns]:
    """Run the workload `repeat` times on each side, in alternating order."""
    sides = {name: SideRuns() for name in openers}
    for name in turns(list(openers), repeat):
        side = sides[name]
        trace, memory = _turn(openers[name], workload, meter)
        side.runs.append(metrics(trace, workload) | memory)
        side.last = trace
        say(f"{workload.name} {name} {len(side.runs)}/{repeat}: {trace.end - trace.start:.2f} s")
    return sides


def _turn(opener: Opener, workload: Workload, meter: MemoryMeter) -> tuple[Trace, dict[str, float | None]]:
    """Load, warm up, measure, close."""
    before = meter.settle(True)
    contender = opener()
    weights = meter.settle(True) - before
    try:
        drive(contender, workload, meter.clock)  # all of it: what is planned or compiled by shape is known
        alive = meter.settle(False)  # a server's pool of free buffers is warm
        trace = drive(contender, workload, meter.clock)
        peak = meter.peak()
    finally:
        contender.close()
    return trace, {"peak_bytes": weights + peak - alive, "peak_rows_bytes": peak - alive}


def summary(workload: Workload, sides: Mapping[str, SideRuns]) -> dict[str, Any]:
    """One workload's part of the report."""
    report: dict[str, Any] = {
        "rows": len(workload.jobs),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "sides": {name: {"runs": s.runs, "median": medians(s.runs)} for name, s in sides.items()},
    }
    if OURS in sides and PEER in sides:
        ours, peer = sides[OURS], sides[PEER]
        report["ratio"] = ratios(medians(ours.runs), medians(peer.runs))
        assert ours.last is not None and peer.last is not None
        report["same_tokens"] = agreement(ours.last, peer.last)
    return report
