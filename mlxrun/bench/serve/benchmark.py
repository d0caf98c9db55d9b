"""`mlxrun bench serve`: the same streams against one server or several, in turns, and what the client saw.

The servers run already. What a round is, and its numbers, is the workload's (`serve_kinds`); one round goes
before, unmeasured, so that no side is charged for its first shapes. Medians are over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from mlxrun import __version__
from mlxrun.bench.engine.benchmark import turns
from mlxrun.bench.report import fitting, make_table
from mlxrun.bench.serve.rounds import Round, ServeMeasure, ServePlan, Values
from mlxrun.bench.serve.streaming_client import Target, model_of
from mlxrun.bench.serve.workload_kinds import KINDS
from mlxrun.errors import MlxrunError

FORMAT = 1
Say = Callable[[str], None]


def run_serve_bench(plan: ServePlan, say: Say) -> dict[str, Any]:
    """Measure everything; the report, as `--json` writes it."""
    return asyncio.run(_run(plan, say))


async def _run(plan: ServePlan, say: Say) -> dict[str, Any]:
    targets = {t.name: await _named(t) for t in plan.targets}
    measured = {name: await _workload(plan, name, targets, say) for name in plan.workloads}
    settings = {
        "requests": plan.requests,
        "repeat": plan.repeat,
        "prompt_words": plan.size.prompt,
        "output_tokens": plan.size.output,
        "long_words": plan.size.long,
        **asdict(plan.load),
    }
    shown = {name: {"url": t.url, "model": t.model} for name, t in targets.items()}
    return {
        "format": FORMAT,
        "versions": {"mlxrun": __version__},
        "targets": shown,
        "settings": settings,
        "workloads": measured,
    }


async def _named(target: Target) -> Target:
    if target.model is not None:
        return target
    try:
        return replace(target, model=await model_of(target))
    except Exception as error:  # a server that is not there, or does not answer as one
        reason = f"{type(error).__name__}: {error}"
        raise MlxrunError(f"{target.url}: cannot be asked for its models: {reason}; give --model") from error


async def _workload(plan: ServePlan, name: str, targets: Mapping[str, Target], say: Say) -> dict[str, Any]:
    kind = KINDS[name]
    top = kind.measures[kind.headline]
    rounds: dict[str, list[Values]] = {side: [] for side in targets}
    errors: dict[str, Counter[str]] = {side: Counter() for side in targets}
    for side, target in targets.items():
        _check_warm(f"{name} {side}", await kind.run(target, plan, f"{plan.load.seed} warm-up"))
        say(f"{name} {side}: warmed up")
    for side in turns(list(targets), plan.repeat):
        number = len(rounds[side]) + 1
        found = await kind.run(targets[side], plan, f"{plan.load.seed} {number}")
        rounds[side].append(found.numbers)
        errors[side].update(found.errors)
        shown = _show(found.numbers[kind.headline], top.unit)
        say(f"{name} {side} {number}/{plan.repeat}: {top.title} {shown}")
    return {
        side: {"runs": runs, "median": medians(runs), "errors": dict(errors[side])}
        for side, runs in rounds.items()
    }


def _check_warm(what: str, found: Round) -> None:
    """Rounds of nothing but errors would only take time."""
    if found.errors and all(value is None for key, value in found.numbers.items() if key != "errors"):
        raise MlxrunError(f"{what}: every request of the warm-up failed; the first: {found.errors[0]}")


def medians(runs: Sequence[Values]) -> Values:
    """Of each number, over the rounds that have it."""
    known = {key: [v for run in runs if (v := run[key]) is not None] for key in runs[0]}
    return {key: statistics.median(values) if values else None for key, values in known.items()}


def print_serve_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """A table: a column for each server, and how many times better the first is than each other."""
    console = fitting(console)
    sides = list(report["targets"])
    others = [f"{sides[0]} / {side}" for side in sides[1:]]
    cells = [
        [name, title, *shown, *ratios]
        for name, part in report["workloads"].items()
        for title, shown, ratios in _rows(KINDS[name].measures, part, sides)
    ]
    columns = ["workload", "measure", *sides, *others]
    console.print(make_table(columns, 2, cells, console.is_terminal))
    settings = report["settings"]
    for note in dict.fromkeys(KINDS[name].note(settings) for name in report["workloads"]):
        console.print(
            f"{note}; median of {settings['repeat']} rounds in turns.", highlight=False, soft_wrap=True
        )
    if others:
        console.print("x / y: how many times better x is.", highlight=False, soft_wrap=True)
    for name, part in report["workloads"].items():
        for side, found in part.items():
            for error, count in found["errors"].items():
                console.print(f"{name} {side}: {count} x {error}", highlight=False, soft_wrap=True)


def _rows(
    measures: Mapping[str, ServeMeasure], part: Mapping[str, Any], sides: Sequence[str]
) -> list[tuple[str, list[str], list[str]]]:
    rows = []
    for key, measure in measures.items():
        values = [part[side]["median"][key] for side in sides]
        if all(value is None for value in values):
            continue
        ratios = [_ratio(values[0], value, measure.more) for value in values[1:]]
        rows.append((measure.title, [_show(value, measure.unit) for value in values], ratios))
    return rows


def _ratio(ours: float | None, theirs: float | None, more: bool | None) -> str:
    if more is None:
        return "-"
    above, below = (ours, theirs) if more else (theirs, ours)
    return f"{above / below:.2f}" if above is not None and below else "-"


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "ms":
        return f"{value * 1000:,.1f} ms"
    if unit == "%":
        return f"{value:.0%}"
    if unit == "x":
        return f"{value:.2f} x"
    return f"{value:,.1f} {unit}" if unit == "1/s" else f"{value:,.0f} {unit}".rstrip()
