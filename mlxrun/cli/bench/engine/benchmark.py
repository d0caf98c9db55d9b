"""`mlxrun bench engine`: our engine and mlx-lm's BatchGenerator with the same model, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxrun import __version__
from mlxrun.cli.bench.engine.measurement import compute_agreement, compute_medians, compute_ratios
from mlxrun.cli.bench.engine.side_runs import (
    OURS,
    PEER,
    Opener,
    Say,
    SideRuns,
    describe_error,
    make_meter,
    measure_workload,
)
from mlxrun.cli.bench.engine.workloads import CACHED_WORKLOADS, RequestWorkload, make_workload
from mlxrun.cli.bench.models import BenchModel, open_model
from mlxrun.config.settings import Config
from mlxrun.core.step_plan import DEFAULT_CHUNK

FORMAT = 1


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


def run_engine_bench(plan: EnginePlan, say: Say) -> dict[str, Any]:
    """Measure everything; the report, as `--json` writes it. After Ctrl-C it has what was measured, and
    `incomplete`; KeyboardInterrupt if that is nothing."""
    from mlxrun.model.machine.device import describe_device, resolve_config
    from mlxrun.model.machine.versions import list_library_versions

    cached = replace(plan, config=resolve_config(plan.config))
    plan = _drop_prefix_cache(cached)  # the peer has none here, so every prompt is computed
    meter = make_meter()
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


def _drop_prefix_cache(plan: EnginePlan) -> EnginePlan:
    return replace(plan, config=replace(plan.config, cache=replace(plan.config.cache, backend="none")))


def _make_openers(plan: EnginePlan, model: BenchModel) -> dict[str, Opener]:
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

    prompt, chunk = (
        workload.find_request(workload.long_id).prompt,
        plan.config.scheduler.chunk or DEFAULT_CHUNK,
    )
    try:
        seconds = measure_chunk(Path(model.folder), prompt, chunk)
    except Exception as error:  # whatever mlx-lm raises, the runs count
        say(f"{workload.name}: the time of a chunk alone was not measured: {describe_error(error)}")
        return {}
    gaps = {name: compute_medians(side.runs).get("long_gap_p99_s") for name, side in sides.items()}
    over = {name: None if gap is None else gap / seconds for name, gap in gaps.items()}
    return {"chunk": {"tokens": min(chunk, len(prompt)), "seconds": seconds, "p99_in_chunks": over}}


def summarize_workload(workload: RequestWorkload, sides: Mapping[str, SideRuns]) -> dict[str, Any]:
    """One workload's part of the report."""
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
