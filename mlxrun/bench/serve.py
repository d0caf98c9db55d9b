"""`mlxrun bench serve`: the same streams against one server or several, in turns, and what the client saw.

The servers run already. A round sends every request once; one round goes before, unmeasured, so that no side
is charged for its first shapes. Medians are over rounds; percentiles are over all requests of a round.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from mlxrun import __version__
from mlxrun.bench.engine import turns
from mlxrun.bench.report import fitting, make_table
from mlxrun.bench.serve_client import Load, Seen, Target, measure, model_of
from mlxrun.bench.serve_workloads import Size, bodies
from mlxrun.errors import MlxrunError

FORMAT = 1
Say = Callable[[str], None]

# key: (title, unit, more is better)
MEASURES: dict[str, tuple[str, str, bool]] = {
    "output_rate": ("output", "tok/s", True),
    "request_rate": ("requests", "1/s", True),
    "ttft_p50": ("TTFT p50", "ms", False),
    "ttft_p95": ("TTFT p95", "ms", False),
    "ttft_p99": ("TTFT p99", "ms", False),
    "gap_p50": ("between pieces p50", "ms", False),
    "gap_p95": ("between pieces p95", "ms", False),
    "gap_p99": ("between pieces p99", "ms", False),
    "whole_p50": ("whole answer p50", "ms", False),
    "cached_share": ("prompt from cache", "%", True),
    "errors": ("errors", "", False),
}


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to send, and to whom."""

    targets: tuple[Target, ...]
    workloads: tuple[str, ...]
    size: Size
    requests: int
    load: Load
    repeat: int = 3


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
    rounds: dict[str, list[dict[str, float | None]]] = {side: [] for side in targets}
    errors: dict[str, Counter[str]] = {side: Counter() for side in targets}
    for side, target in targets.items():
        work = bodies(name, plan.size, plan.requests, "warm-up")
        _check_warm(f"{name} {side}", await measure(target, work, plan.load))
        say(f"{name} {side}: warmed up")
    for side in turns(list(targets), plan.repeat):
        number = len(rounds[side]) + 1
        work = bodies(name, plan.size, plan.requests, str(number))
        seen = await measure(targets[side], work, plan.load)
        rounds[side].append(numbers(seen))
        errors[side].update(s.error for s in seen if s.error is not None)
        rate = rounds[side][-1]["output_rate"]
        say(f"{name} {side} {number}/{plan.repeat}: {rate or 0:,.0f} tok/s")
    return {
        side: {"runs": runs, "median": medians(runs), "errors": dict(errors[side])}
        for side, runs in rounds.items()
    }


def _check_warm(what: str, seen: Sequence[Seen]) -> None:
    """Rounds of nothing but errors would only take time."""
    if all(s.error is not None for s in seen):
        raise MlxrunError(f"{what}: every request of the warm-up failed; the first: {seen[0].error}")


def numbers(seen: Sequence[Seen]) -> dict[str, float | None]:
    """The numbers of one round; seconds."""
    good = [s for s in seen if s.error is None]
    found: dict[str, float | None] = dict.fromkeys(MEASURES)
    found["errors"] = len(seen) - len(good)
    if not good:
        return found
    wall = max(s.end for s in good) - min(s.sent for s in good)
    prompt = sum(s.prompt for s in good)
    found["output_rate"] = sum(s.output for s in good) / wall
    found["request_rate"] = len(good) / wall
    found["cached_share"] = sum(s.cached for s in good) / prompt if prompt else None
    found["whole_p50"] = percentile([s.end - s.sent for s in good], 50)
    firsts = [s.pieces[0] - s.sent for s in good]
    gaps = [b - a for s in good for a, b in zip(s.pieces, s.pieces[1:], strict=False)]
    for share in (50, 95, 99):
        found[f"ttft_p{share}"] = percentile(firsts, share)
        found[f"gap_p{share}"] = percentile(gaps, share) if gaps else None
    return found


def percentile(values: Sequence[float], share: int) -> float:
    """The value below which `share` per cent lie: the nearest one, never between two."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def medians(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Of each number, over the rounds that have it."""
    known = {key: [v for run in runs if (v := run[key]) is not None] for key in MEASURES}
    return {key: statistics.median(values) if values else None for key, values in known.items()}


def print_serve_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """A table: a column for each server, and how many times better the first is than each other."""
    console = fitting(console)
    sides = list(report["targets"])
    others = [f"{sides[0]} / {side}" for side in sides[1:]]
    cells = [
        [name, title, *shown, *ratios]
        for name, part in report["workloads"].items()
        for title, shown, ratios in _rows(part, sides)
    ]
    columns = ["workload", "measure", *sides, *others]
    console.print(make_table(columns, 2, cells, console.is_terminal))
    settings = report["settings"]
    how = f"{settings['rate']:g} requests/s" if settings["rate"] else f"{settings['concurrency']} streams"
    note = (
        f"{settings['requests']} requests a round, {how}, {settings['prompt_words']} words and at most "
        f"{settings['output_tokens']} tokens of answer; median of {settings['repeat']} rounds in turns. "
        f"x / y: how many times better x is."
    )
    console.print(note, highlight=False, soft_wrap=True)
    for name, part in report["workloads"].items():
        for side, found in part.items():
            for error, count in found["errors"].items():
                console.print(f"{name} {side}: {count} x {error}", highlight=False, soft_wrap=True)


def _rows(part: Mapping[str, Any], sides: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    rows = []
    for key, (title, unit, more) in MEASURES.items():
        values = [part[side]["median"][key] for side in sides]
        if all(value is None for value in values):
            continue
        ratios = [_ratio(values[0], value, more) for value in values[1:]]
        rows.append((title, [_show(value, unit) for value in values], ratios))
    return rows


def _ratio(ours: float | None, theirs: float | None, more: bool) -> str:
    above, below = (ours, theirs) if more else (theirs, ours)
    return f"{above / below:.2f}" if above is not None and below else "-"


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "ms":
        return f"{value * 1000:,.1f} ms"
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:,.1f} {unit}" if unit == "1/s" else f"{value:,.0f} {unit}".rstrip()
