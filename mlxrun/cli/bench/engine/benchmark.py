"""`mlxrun bench engine`: our engine and mlx-lm's BatchGenerator with the same model, in turns in one process.

The order alternates (A B, B A, ...), so that a machine that slows down affects both sides. Each run loads one
side alone, warms it up, measures one workload and closes it. So no side uses memory during the other's run. A
side that fails in a workload has no more runs of it; its earlier measurements count.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun import __version__
from mlxrun.cli.bench.engine.interactive import (
    InteractiveContender,
    compute_interactive_metrics,
    run_interactive,
)
from mlxrun.cli.bench.engine.measurement import (
    Contender,
    Trace,
    compute_agreement,
    compute_medians,
    compute_metrics,
    compute_ratios,
    run_workload,
)
from mlxrun.cli.bench.engine.workloads import CACHED_WORKLOADS, MOMENTS, RequestWorkload, make_workload
from mlxrun.cli.bench.models import BenchModel, open_model
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError, MlxrunError
from mlxrun.core.step_plan import DEFAULT_CHUNK

FORMAT = 1


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to measure. `scale`: factor of prompt and answer lengths; `repeat`: runs of each side; `peer`:
    whether mlx-lm runs too."""

    model: str
    workloads: tuple[str, ...]
    config: Config
    scale: float = 1.0
    repeat: int = 3
    peer: bool = True
    seed: int = 0


def run_engine_bench(plan: EnginePlan, say: Say) -> dict[str, Any]:
    """Measure everything, and return the report as `--json` writes it. After Ctrl-C the report has the
    measurements so far, and `incomplete`. KeyboardInterrupt if there are none."""
    from mlxrun.model.machine.device import describe_device, resolve_config
    from mlxrun.model.machine.device_choice import use_device
    from mlxrun.model.machine.versions import list_library_versions

    use_device(plan.config.engine)
    cached = replace(plan, config=resolve_config(plan.config))
    cache = replace(cached.config.cache, backend="none")  # the peer has none: all prompts are computed
    plan = replace(cached, config=replace(cached.config, cache=cache))
    meter = make_meter()
    workloads: dict[str, Any] = {}
    interrupted = False
    with open_model(plan.model, plan.seed) as model:
        for name in plan.workloads:
            openers = make_openers(cached if name in CACHED_WORKLOADS else plan, model)
            warm_up, workload = (
                make_workload(name, plan.scale, model.vocab, seed) for seed in (plan.seed + 1, plan.seed)
            )
            sides: dict[str, SideRuns] = {}
            chunk: dict[str, Any] = {}
            try:
                measure_workload(workload, openers, plan.repeat, meter, say, warm_up, sides)
                chunk = _measure_chunk(plan, model, workload, sides, say)
            except KeyboardInterrupt:
                interrupted = True
            if measured := {side: runs for side, runs in sides.items() if runs.runs or runs.error}:
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


def make_openers(plan: EnginePlan, model: BenchModel) -> dict[str, Opener]:
    """Functions that load each side. Ours computes in the dtype of the file, as mlx-lm does."""
    from mlxrun.cli.bench.engine.mlxrun_contender import MlxrunContender

    settings = replace(plan.config.model, path=str(model.folder))
    if settings.dtype == "auto" and model.dtype is not None:
        settings = replace(settings, dtype=model.dtype)  # type: ignore[arg-type]
    config = replace(plan.config, model=settings)
    openers: dict[str, Opener] = {OURS: lambda: MlxrunContender.open(config)}
    if plan.peer:
        from mlxrun.cli.bench.engine.mlx_lm_contender import MlxLmContender

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
        from mlxrun.cli.bench.engine.mlx_lm_contender import SETTINGS

        settings[PEER] = dict(SETTINGS)
    return settings


def _measure_chunk(
    plan: EnginePlan, model: BenchModel, workload: RequestWorkload, sides: Mapping[str, SideRuns], say: Say
) -> dict[str, Any]:
    """For `staggered`: the seconds of one prefill chunk alone, and inter-token p99 as a multiple of them; {}
    if the chunk cannot be computed."""
    if workload.long_id is None:
        return {}
    from mlxrun.cli.bench.engine.mlx_lm_contender import measure_chunk

    prompt = workload.find_request(workload.long_id).prompt
    chunk = plan.config.scheduler.chunk or DEFAULT_CHUNK
    try:
        seconds = measure_chunk(Path(model.folder), prompt, chunk)
    except Exception as error:  # whatever mlx-lm raises, the runs count
        say(f"{workload.name}: the time of a chunk alone was not measured: {describe_error(error)}")
        return {}
    gaps = {name: compute_medians(side.runs).get("long_gap_p99_s") for name, side in sides.items()}
    over = {name: None if gap is None else gap / seconds for name, gap in gaps.items()}
    return {"chunk": {"tokens": min(chunk, len(prompt)), "seconds": seconds, "p99_in_chunks": over}}


def summarize_workload(workload: RequestWorkload, sides: Mapping[str, SideRuns]) -> dict[str, Any]:
    """Build one workload's part of the report."""
    report: dict[str, Any] = {
        "rows": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "sides": {
            name: {"runs": s.runs, "median": compute_medians(s.runs)}
            | ({} if s.error is None else {"error": s.error})
            for name, s in sides.items()
        },
    }
    if OURS in sides and PEER in sides:
        ours, peer = sides[OURS], sides[PEER]
        report["ratio"] = compute_ratios(compute_medians(ours.runs), compute_medians(peer.runs))
        if ours.last is not None and peer.last is not None:
            report["same_tokens"] = compute_agreement(ours.last, peer.last)
    return report


OURS, PEER = "mlxrun", "mlx-lm"

Opener = Callable[[], Contender]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchMeter:
    """Clock (seconds) and memory counters (bytes). `reset_peak(drop_pool)` starts a new peak and returns the
    bytes in use; `read_memory` returns them without a new peak."""

    clock: Callable[[], float]
    reset_peak: Callable[[bool], int]
    read_peak: Callable[[], int]
    read_memory: Callable[[], int]


@dataclass(slots=True)
class SideRuns:
    """One side's runs of one workload. `error`: what ended them early, None if all were made."""

    runs: list[dict[str, float | None]] = field(default_factory=list)
    last: Trace | None = None
    error: str | None = None


def make_meter() -> BenchMeter:
    """Make the meter of this process: seconds of `time.perf_counter`, and MLX's counters."""
    from mlxrun.model.machine import device as counters

    return BenchMeter(time.perf_counter, counters.start_measuring, counters.read_peak, counters.read_active)


def alternate(names: Sequence[str], repeat: int) -> Iterator[str]:
    """Yield the names of `repeat` rounds: A B, B A, A B, ..."""
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
    """Run the workload `repeat` times on each side, in alternating order, each time after `warm_up`.
    `warm_up`: requests of the same shapes, None for the same requests; `sides`: filled during the runs, for a
    caller that is interrupted. A side that fails gets an `error` and no more runs, which would most likely
    fail too; its memory is released. ConfigError if settings are wrong."""
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
    """Describe the error in one line, with its type if it is not one of mlxrun's."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MlxrunError) else f"{type(error).__name__}: {text}"
