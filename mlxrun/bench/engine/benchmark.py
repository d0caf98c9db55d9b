"""`mlxrun bench engine`: our engine and mlx-lm's BatchGenerator with the same model, in one process, in
turns.

The order alternates (A B, B A, ...), so that a machine that slows down affects both sides. Each turn loads
one side alone, warms it up, measures one workload and closes it, so that no side uses memory during the
other's turn.
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
    compute_agreement,
    compute_medians,
    compute_metrics,
    compute_ratios,
    run_workload,
)
from mlxrun.bench.engine.workloads import CACHED_WORKLOADS, Workload, make_workload
from mlxrun.bench.models import BenchModel, open_model
from mlxrun.config.settings import Config
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK

FORMAT = 1
OURS, PEER = "mlxrun", "mlx-lm"

Opener = Callable[[], Contender]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to measure."""

    model: str
    workloads: tuple[str, ...]
    config: Config
    scale: float = 1.0
    repeat: int = 3
    peer: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchMeter:
    """Clock and memory counters: `reset_peak(drop_pool)` starts a new peak and returns the bytes in use."""

    clock: Callable[[], float]
    reset_peak: Callable[[bool], int]
    read_peak: Callable[[], int]


@dataclass(slots=True)
class SideRuns:
    """One side's runs of one workload."""

    runs: list[dict[str, float | None]] = field(default_factory=list)
    last: Trace | None = None


def run_engine_bench(plan: EnginePlan, say: Say) -> dict[str, Any]:
    """Measure everything; the report, as `--json` writes it. After Ctrl-C it has what was measured, and
    `incomplete`; KeyboardInterrupt if that is nothing."""
    from mlxrun.model.doctor import describe_device
    from mlxrun.model.machine import memory_meter as counters
    from mlxrun.model.machine.device import resolve_config
    from mlxrun.model.machine.versions import list_library_versions

    cached = replace(plan, config=resolve_config(plan.config))
    plan = _drop_prefix_cache(cached)  # the peer has none here, so every prompt is computed
    meter = BenchMeter(time.perf_counter, counters.start_measuring, counters.read_peak)
    workloads: dict[str, Any] = {}
    interrupted = False
    with open_model(plan.model, plan.seed) as model:
        for name in plan.workloads:
            openers = _make_openers(cached if name in CACHED_WORKLOADS else plan, model)
            warm_up, workload = (
                make_workload(name, plan.scale, model.vocab, seed) for seed in (plan.seed + 1, plan.seed)
            )
            sides: dict[str, SideRuns] = {}
            chunk: dict[str, Any] = {}
            try:
                measure_workload(workload, openers, plan.repeat, meter, say, warm_up, sides)
                chunk = _measure_chunk(plan, model, workload, sides)
            except KeyboardInterrupt:
                interrupted = True
            if measured := {side: runs for side, runs in sides.items() if runs.runs}:
                workloads[name] = summarize_workload(workload, measured) | chunk
            if interrupted:
                break
    if not workloads:
        raise KeyboardInterrupt
    return {
        "format": FORMAT,
        "versions": {"mlxrun": __version__} | list_library_versions(),
        "device": describe_device(),
        "model": {"name": model.name, "dtype": model.dtype, "vocab": model.vocab},
        "settings": _collect_settings(plan),
        "workloads": workloads,
    } | ({"incomplete": True} if interrupted else {})


def _drop_prefix_cache(plan: EnginePlan) -> EnginePlan:
    return replace(plan, config=replace(plan.config, cache=replace(plan.config.cache, backend="none")))


def _make_openers(plan: EnginePlan, model: BenchModel) -> dict[str, Opener]:
    """Functions that load each side. Ours computes in the dtype of the file, as mlx-lm does."""
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


def _collect_settings(plan: EnginePlan) -> dict[str, Any]:
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


def _measure_chunk(
    plan: EnginePlan, model: BenchModel, workload: Workload, sides: Mapping[str, SideRuns]
) -> dict[str, Any]:
    """For `staggered`: the seconds of one prefill chunk alone, and inter-token p99 as a multiple of them."""
    if workload.long_id is None:
        return {}
    from mlxrun.bench.engine.mlx_lm_contender import measure_chunk

    prompt, chunk = (
        workload.find_request(workload.long_id).prompt,
        plan.config.scheduler.chunk or DEFAULT_CHUNK,
    )
    seconds = measure_chunk(Path(model.folder), prompt, chunk)
    gaps = {name: compute_medians(side.runs)["long_gap_p99_s"] for name, side in sides.items()}
    over = {name: None if gap is None else gap / seconds for name, gap in gaps.items()}
    return {"chunk": {"tokens": min(chunk, len(prompt)), "seconds": seconds, "p99_in_chunks": over}}


# -- turns ------------------------------------------------------------------------------------------


def alternate(names: Sequence[str], repeat: int) -> Iterator[str]:
    """A B, B A, A B, ...: `repeat` rounds."""
    for i in range(repeat):
        yield from names if i % 2 == 0 else reversed(names)


def measure_workload(
    workload: Workload,
    openers: Mapping[str, Opener],
    repeat: int,
    meter: BenchMeter,
    say: Say,
    warm_up: Workload | None = None,
    sides: dict[str, SideRuns] | None = None,
) -> dict[str, SideRuns]:
    """Run the workload `repeat` times on each side, in alternating order, each time after `warm_up`: requests
    of the same shapes; None: the same ones. `sides` is filled as they run, for whoever is interrupted."""
    sides = {} if sides is None else sides
    sides |= {name: SideRuns() for name in openers}
    hint = ""
    for name in alternate(list(openers), repeat):
        side, began = sides[name], time.monotonic()
        turn = f"{workload.name} {name} {len(side.runs) + 1}/{repeat}"
        say(f"{turn}: loading{hint if name == PEER else ''}")
        trace, memory = _measure_once(openers[name], workload, warm_up or workload, meter, say, turn)
        side.runs.append(compute_metrics(trace, workload) | memory)
        side.last = trace
        say(f"{turn}: {trace.end - trace.start:.2f} s")
        if name == OURS:
            lasted = time.monotonic() - began
            hint = f" ({OURS} took {lasted:.0f} s for this, warm-up included; --no-peer leaves {PEER} out)"
    return sides


def _measure_once(
    opener: Opener, workload: Workload, warm_up: Workload, meter: BenchMeter, say: Say, turn: str
) -> tuple[Trace, dict[str, float | None]]:
    """Load, warm up, measure, close."""
    before = meter.reset_peak(True)
    contender = opener()
    weights = meter.reset_peak(True) - before
    try:
        say(f"{turn}: running, first a warm-up of the same size")
        run_workload(contender, warm_up, meter.clock)  # all of it, so that each shape is compiled
        alive = meter.reset_peak(False)  # a server keeps its pool of free buffers
        trace = run_workload(contender, workload, meter.clock)
        peak = meter.read_peak()
    finally:
        contender.close()
    return trace, {"peak_bytes": weights + peak - alive, "peak_rows_bytes": peak - alive}


def summarize_workload(workload: Workload, sides: Mapping[str, SideRuns]) -> dict[str, Any]:
    """One workload's part of the report."""
    report: dict[str, Any] = {
        "rows": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "sides": {name: {"runs": s.runs, "median": compute_medians(s.runs)} for name, s in sides.items()},
    }
    if OURS in sides and PEER in sides:
        ours, peer = sides[OURS], sides[PEER]
        report["ratio"] = compute_ratios(compute_medians(ours.runs), compute_medians(peer.runs))
        assert ours.last is not None and peer.last is not None
        report["same_tokens"] = compute_agreement(ours.last, peer.last)
    return report
