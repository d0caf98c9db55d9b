"""Runs the same lines under all conditions, for several models, and counts the bytes that differ."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reproduce.answers import Differences, count_differences, strip_ids
from benchmarks.reproduce.conditions import SETTINGS, ModelRuns
from benchmarks.reproduce.models import FAMILIES, ReproduceModel, make_model, open_local_model
from benchmarks.reproduce.processes import ON_RAY, THREADS, run_batch, run_handed_over, run_job, run_killed
from benchmarks.reproduce.twins import PREEMPTED_TWINS, list_twins
from mlxrun.config.setting_fields import build_config
from mlxrun.config.settings import Config
from mlxrun.jobs.records.manifest_checks import list_versions
from mlxrun.jobs.run.progress import pluralize

ALONE, TOGETHER, SHUFFLED = "alone", "64 wide", "shuffled"
WARM_MEMORY, WARM_DISK = "warm memory", "warm disk"
PREEMPTED, KILLED, BATCH = "preempted", "killed", "/v1/batches"
THREADED = {f"{count} thread{'s' if count > 1 else ''} in the environment": count for count in THREADS}
RAY, HANDED_OVER = "two Ray workers", "begun, on Ray, finished"
IN_PROCESS = (ALONE, TOGETHER, WARM_MEMORY, SHUFFLED, WARM_DISK, PREEMPTED)
CONDITIONS = (*IN_PROCESS, *THREADED, KILLED, BATCH, RAY, HANDED_OVER)
TWIN_LINES = 100
# Where rows are preempted, a quarter of the lines has answers that are so much longer.
LONG_SHARE, LEAST_LINES, LONG_TOKENS = 4, 16, 40
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReproducePlan:
    """What to run. `local`: a folder of a model, instead of `families`."""

    families: Sequence[str]
    lines: int
    local: Path | None = None
    conditions: Sequence[str] = CONDITIONS


def run_reproduce_bench(plan: ReproducePlan, say: Say) -> dict[str, Any]:
    """Run the plan; the report is JSON-ready."""
    import mlxrun.model  # noqa: F401  the BLAS library goes before mlx
    from mlxrun.model.machine.device import describe_device

    started, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="mlxrun-reproduce-") as temporary:
        for name in plan.families if plan.local is None else ("local",):
            folder = Path(temporary, name)
            model = make_model(name, folder / "model") if plan.local is None else open_local_model(plan.local)
            rows.append(asyncio.run(_run_model(model, folder / "runs", plan, say)))
    return {
        "lines": plan.lines,
        "is_partial": plan.local is not None or len(rows) < len(FAMILIES),
        "models": rows,
        "seconds": round(time.monotonic() - started),
        "versions": list_versions(),
        "device": describe_device(),
    }


async def _run_model(model: ReproduceModel, folder: Path, plan: ReproducePlan, say: Say) -> dict[str, Any]:
    """All conditions and the twins of one model."""
    settings = {**SETTINGS, "model": {"path": str(model.folder)}}
    config = folder.with_suffix(".yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    runs = ModelRuns(model, folder, build_config(settings), plan.lines)
    say(f"{model.title}: the oracle computes {plan.lines} lines")
    await runs.run_oracle()
    wanted, long = set(plan.conditions), _make_long_runs(model, folder / "long", runs.config, plan.lines)
    if PREEMPTED in wanted:
        await long.run_oracle()
    found: dict[str, Differences] = {}

    def add(name: str, differences: Differences) -> None:
        found[name] = differences
        note = f" ({differences.note})" if differences.note else ""
        say(f"{model.title}: {name}: {differences.differing} lines differ, {differences.bytes} bytes{note}")

    if ALONE in wanted:
        add(ALONE, await runs.run_alone())
    if wanted & {TOGETHER, WARM_MEMORY}:
        first, second = await runs.run_together()
        add(TOGETHER, first)
        add(WARM_MEMORY, second)
    if wanted & {SHUFFLED, WARM_DISK}:
        first, second = await runs.run_shuffled()
        add(SHUFFLED, first)
        add(WARM_DISK, second)
    if PREEMPTED in wanted:
        add(PREEMPTED, await long.run_preempted())
    for name in (name for name in CONDITIONS if name in wanted and name not in IN_PROCESS):
        add(name, await _run_processes(name, runs, config))
    size = sum(len(line) for line in runs.oracle.values())
    twins = await _run_twins(model, folder, plan, say)
    if PREEMPTED in wanted:
        twins |= await _run_preempted_twins(model, folder, long, say)
    results = {name: asdict(each) for name, each in found.items()}
    return {"name": model.name, "title": model.title, "bytes": size, "conditions": results, "twins": twins}


async def _run_processes(name: str, runs: ModelRuns, config: Path) -> Differences:
    """A condition that needs processes."""
    job, folder, count = runs.job, runs.folder, runs.count
    if name == BATCH:
        answers, kills = await run_batch(job, config, folder)
        return count_differences(strip_ids(runs.oracle), strip_ids(answers), _note_kills(kills))
    out = folder / f"{CONDITIONS.index(name)}.out.jsonl"
    if name in (KILLED, HANDED_OVER):
        run = run_killed if name == KILLED else run_handed_over
        answers, kills = await asyncio.to_thread(run, job, config, out, count)
        return count_differences(runs.oracle, answers, _note_kills(kills))
    more = ON_RAY if name == RAY else ()
    answers = await asyncio.to_thread(run_job, job, config, out, THREADED.get(name), more)
    return count_differences(runs.oracle, answers)


def _note_kills(count: int) -> str:
    return pluralize(count, "kill")


def _make_long_runs(model: ReproduceModel, folder: Path, config: Config, lines: int) -> ModelRuns:
    """The runs of fewer lines with longer answers, for which memory can get short."""
    return ModelRuns(model, folder, config, max(lines // LONG_SHARE, LEAST_LINES), LONG_TOKENS)


async def _run_twins(
    model: ReproduceModel, folder: Path, plan: ReproducePlan, say: Say
) -> dict[str, dict[str, Any]]:
    """The impure twins, on fewer lines: many at once, and again with a warm cache."""
    config = build_config({**SETTINGS, "model": {"path": str(model.folder)}})
    runs = ModelRuns(model, folder / "twins", config, min(plan.lines, TWIN_LINES))
    await runs.run_oracle()
    found = {}
    for number, (name, apply) in enumerate(list_twins().items()):
        twin = ModelRuns(model, folder / f"twin-{number}", config, runs.count)
        twin.oracle = runs.oracle
        with apply():
            first, second = await twin.run_together()
        found[name] = _describe_twin(model, name, max(first, second, key=lambda each: each.differing), say)
    return found


async def _run_preempted_twins(
    model: ReproduceModel, folder: Path, long: ModelRuns, say: Say
) -> dict[str, dict[str, Any]]:
    """The twins that show where rows are preempted, on the first lines of `long`."""
    found = {}
    for number, (name, apply) in enumerate(PREEMPTED_TWINS.items()):
        twin = replace(long, folder=folder / f"long-twin-{number}", count=min(long.count, TWIN_LINES))
        ids = [json.loads(line)["custom_id"] for line in twin.lines]
        twin.oracle = {key: long.oracle[key] for key in ids}
        with apply():
            found[name] = _describe_twin(model, name, await twin.run_preempted(), say)
    return found


def _describe_twin(model: ReproduceModel, name: str, worst: Differences, say: Say) -> dict[str, Any]:
    say(f"{model.title}: twin with {name}: {worst.differing} of {worst.lines} lines differ")
    return asdict(worst)


def is_reproducible(report: dict[str, Any]) -> bool:
    """Whether no byte differs."""
    conditions = (each for model in report["models"] for each in model["conditions"].values())
    return not any(each["bytes"] for each in conditions)


def list_hidden_twins(report: dict[str, Any]) -> list[str]:
    """The faults that change no byte of any model."""
    return [
        name
        for name in report["models"][0]["twins"]
        if not any(model["twins"][name]["differing"] for model in report["models"])
    ]


def is_proven(report: dict[str, Any]) -> bool:
    """Whether no byte differs, and the faults were found out: all of them, or one by a part of the models,
    which may round alike with another."""
    hidden = len(list_hidden_twins(report))
    return is_reproducible(report) and (
        not hidden or (report["is_partial"] and hidden < len(report["models"][0]["twins"]))
    )
