"""Runs the same lines under all conditions, for several models, and counts the bytes that differ."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reproduce.answers import Differences, count_differences, strip_ids
from benchmarks.reproduce.conditions import SETTINGS, ModelRuns
from benchmarks.reproduce.models import ReproduceModel, make_model, open_local_model
from benchmarks.reproduce.processes import run_batch, run_killed
from benchmarks.reproduce.twins import TWINS
from mlxrun.batch.manifest_environment import list_versions
from mlxrun.config.conversion import build_config

ALONE, TOGETHER, SHUFFLED = "alone", "64 wide", "shuffled"
WARM_MEMORY, WARM_DISK = "warm memory", "warm disk"
KILLED, BATCH = "killed", "/v1/batches"
IN_PROCESS = (ALONE, TOGETHER, WARM_MEMORY, SHUFFLED, WARM_DISK)
CONDITIONS = (*IN_PROCESS, KILLED, BATCH)
TWIN_LINES = 100
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
    from mlxrun.model.doctor import describe_device

    started, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="mlxrun-reproduce-") as temporary:
        for name in plan.families if plan.local is None else ("local",):
            folder = Path(temporary, name)
            model = make_model(name, folder / "model") if plan.local is None else open_local_model(plan.local)
            rows.append(asyncio.run(_run_model(model, folder / "runs", plan, say)))
    return {
        "lines": plan.lines,
        "is_local": plan.local is not None,
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
    found: dict[str, Differences] = {}

    def add(name: str, differences: Differences) -> None:
        found[name] = differences
        note = f" ({differences.note})" if differences.note else ""
        say(f"{model.title}: {name}: {differences.differing} lines differ, {differences.bytes} bytes{note}")

    wanted = set(plan.conditions)
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
    if KILLED in wanted:
        out = folder / "killed.out.jsonl"
        answers, kills = await asyncio.to_thread(run_killed, runs.job, config, out, plan.lines)
        add(KILLED, count_differences(runs.oracle, answers, f"{kills} kills"))
    if BATCH in wanted:
        answers = await run_batch(runs.job, config, folder)
        add(BATCH, count_differences(strip_ids(runs.oracle), strip_ids(answers)))
    size = sum(len(line) for line in runs.oracle.values())
    twins = await _run_twins(model, folder, plan, say)
    results = {name: asdict(each) for name, each in found.items()}
    return {"name": model.name, "title": model.title, "bytes": size, "conditions": results, "twins": twins}


async def _run_twins(
    model: ReproduceModel, folder: Path, plan: ReproducePlan, say: Say
) -> dict[str, dict[str, Any]]:
    """The impure twins, on fewer lines: many at once, and again with a warm cache."""
    config = build_config({**SETTINGS, "model": {"path": str(model.folder)}})
    runs = ModelRuns(model, folder / "twins", config, min(plan.lines, TWIN_LINES))
    await runs.run_oracle()
    found = {}
    for number, (name, apply) in enumerate(TWINS.items()):
        twin = ModelRuns(model, folder / f"twin-{number}", config, runs.count)
        twin.oracle = runs.oracle
        with apply():
            first, second = await twin.run_together()
        worst = max(first, second, key=lambda each: each.differing)
        found[name] = asdict(worst)
        say(f"{model.title}: twin with {name}: {worst.differing} of {worst.lines} lines differ")
    return found


def is_reproducible(report: dict[str, Any]) -> bool:
    """Whether no byte differs."""
    conditions = (each for model in report["models"] for each in model["conditions"].values())
    return not any(each["bytes"] for each in conditions)


def list_hidden_twins(report: dict[str, Any]) -> list[str]:
    """The faults that change no byte of any model."""
    return [
        name for name in TWINS if not any(model["twins"][name]["differing"] for model in report["models"])
    ]


def is_proven(report: dict[str, Any]) -> bool:
    """Whether no byte differs, and the faults were found out: all of them, or one by a model of the user's,
    which may round alike with another."""
    hidden = len(list_hidden_twins(report))
    return is_reproducible(report) and (not hidden or (report["is_local"] and hidden < len(TWINS)))
