"""`mlxrun bench serve`: the same streams against one or several running servers, in turns, as a client sees
them.

The workload (`KINDS`) defines a round and its numbers. The first round is not measured, so that no server is
charged for compiling its first shapes. Medians are over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxrun import __version__
from mlxrun.cli.bench.engine.benchmark import alternate
from mlxrun.cli.bench.engine.measurement import Measure, compute_percentile, compute_ratios
from mlxrun.cli.bench.report import build_measure_rows, format_value, make_console, make_table, print_notes
from mlxrun.cli.bench.serve.interactive import INTERACTIVE
from mlxrun.cli.bench.serve.long_prompt import LONG
from mlxrun.cli.bench.serve.streaming_client import StreamTimes, Target, find_model, send_all
from mlxrun.cli.bench.serve.workloads import (
    WORKLOADS,
    RoundResult,
    ServePlan,
    Values,
    WorkloadKind,
    make_bodies,
)
from mlxrun.core.errors import MlxrunError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 2
Say = Callable[[str], None]


MEASURES = {
    "output_rate": Measure("output", "tok/s", True),
    "request_rate": Measure("requests", "1/s", True),
    "ttft_p50": Measure("TTFT p50", "ms"),
    "ttft_p95": Measure("TTFT p95", "ms"),
    "ttft_p99": Measure("TTFT p99", "ms"),
    "gap_p50": Measure("inter-token p50", "ms"),
    "gap_p95": Measure("inter-token p95", "ms"),
    "gap_p99": Measure("inter-token p99", "ms"),
    "latency_p50": Measure("request latency p50", "ms"),
    "cached_share": Measure("prompt from cache", "%", True),
    "errors": Measure("errors", ""),
}
SETTINGS = frozenset({"concurrency", "rate", "requests", "prompt_words", "output_tokens"})


async def _run_round(name: str, target: Target, plan: ServePlan, seed: str) -> RoundResult:
    streams = await send_all(target, make_bodies(name, plan.size, plan.requests, seed), plan.load)
    return RoundResult(compute_numbers(streams), tuple(s.error for s in streams if s.error is not None))


def compute_numbers(streams: Sequence[StreamTimes]) -> Values:
    """Compute the numbers of one round. Times are in seconds."""
    good = [s for s in streams if s.error is None]
    found: Values = dict.fromkeys(MEASURES)
    found["errors"] = len(streams) - len(good)
    if not good:
        return found
    wall = max(s.end for s in good) - min(s.sent for s in good)
    prompt = sum(s.prompt for s in good)
    found["output_rate"] = sum(s.output for s in good) / wall
    found["request_rate"] = len(good) / wall
    found["cached_share"] = sum(s.cached for s in good) / prompt if prompt else None
    found["latency_p50"] = compute_percentile([s.end - s.sent for s in good], 50)
    firsts = [s.deltas[0] - s.sent for s in good]
    gaps = [b - a for s in good for a, b in zip(s.deltas, s.deltas[1:], strict=False)]
    for share in (50, 95, 99):
        found[f"ttft_p{share}"] = compute_percentile(firsts, share)
        found[f"gap_p{share}"] = compute_percentile(gaps, share)
    return found


def _describe_round(settings: Mapping[str, Any]) -> str:
    how = f"{settings['rate']:g} requests/s" if settings["rate"] else f"{settings['concurrency']} streams"
    return (
        f"{settings['requests']} requests a round, {how}, {settings['prompt_words']} words and at most "
        f"{settings['output_tokens']} tokens of answer"
    )


KINDS: dict[str, WorkloadKind] = {
    **{
        name: WorkloadKind(MEASURES, partial(_run_round, name), SETTINGS, _describe_round, "output_rate")
        for name in WORKLOADS
    },
    "long": LONG,
    "interactive": INTERACTIVE,
}


def run_serve_bench(plan: ServePlan, say: Say) -> dict[str, Any]:
    """Measure everything, and return the report as `--json` writes it. MlxrunError if a server or its warm-up
    fails."""
    return asyncio.run(_run(plan, say))


async def _run(plan: ServePlan, say: Say) -> dict[str, Any]:
    targets = {t.name: await _resolve_model(t) for t in plan.targets}
    measured = {name: await _measure_workload(plan, name, targets, say) for name in plan.workloads}
    settings = {
        "requests": plan.requests,
        "repeat": plan.repeat,
        "prompt_words": plan.size.prompt,
        "output_tokens": plan.size.output,
        "long_words": plan.size.long,
        "pages": plan.size.pages,
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


async def _resolve_model(target: Target) -> Target:
    if target.model is not None:
        return target
    try:
        return replace(target, model=await find_model(target))
    except OSError as error:
        raise MlxrunError(f"{target.url} does not answer: {str(error) or type(error).__name__}") from error
    except Exception as error:  # the server is not compatible
        reason = f"{type(error).__name__}: {error}"
        raise MlxrunError(f"{target.url}: its models cannot be listed: {reason}; give --model") from error


async def _measure_workload(
    plan: ServePlan, name: str, targets: Mapping[str, Target], say: Say
) -> dict[str, Any]:
    kind = KINDS[name]
    top = kind.measures[kind.headline]
    rounds: dict[str, list[Values]] = {side: [] for side in targets}
    errors: dict[str, Counter[str]] = {side: Counter() for side in targets}
    first = replace(plan, requests=plan.warm_up or plan.requests)
    for side, target in targets.items():
        warm_up = await kind.run_round(target, first, f"{plan.load.seed} warm-up")
        if warm_up.errors and warm_up.numbers[kind.headline] is None:  # the rounds would have none either
            failed = f"the warm-up failed, so nothing was measured: {warm_up.errors[0]}"
            raise MlxrunError(f"{name} {side}: {failed}")
        say(f"{name} {side}: warmed up")
    for side in alternate(list(targets), plan.repeat):
        number = len(rounds[side]) + 1
        found = await kind.run_round(targets[side], plan, f"{plan.load.seed} {number}")
        rounds[side].append(found.numbers)
        errors[side].update(found.errors)
        shown = format_value(found.numbers[kind.headline], top.unit)
        say(f"{name} {side} {number}/{plan.repeat}: {top.title} {shown}")
    return {
        side: {"runs": runs, "median": compute_medians(runs), "errors": dict(errors[side])}
        for side, runs in rounds.items()
    }


def compute_medians(runs: Sequence[Values]) -> Values:
    """Compute the median of each number over the rounds that have it."""
    known = {key: [v for run in runs if (v := run[key]) is not None] for key in runs[0]}
    return {key: statistics.median(values) if values else None for key, values in known.items()}


def print_serve_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table with a column for each server, and how many times better the first is than each other."""
    console = make_console(console)
    sides = list(report["targets"])
    others = [f"{sides[0]} / {side}" for side in sides[1:]]
    cells = [
        (name, *row)
        for name, part in report["workloads"].items()
        for row in _build_rows(KINDS[name].measures, [part[side]["median"] for side in sides])
    ]
    columns = ["workload", "measure", *sides, *others]
    console.print(make_table(columns, 2, cells, console.is_terminal))
    settings = report["settings"]
    notes = dict.fromkeys(KINDS[name].describe(settings) for name in report["workloads"])
    repeat = settings["repeat"]
    rounds = "1 round" if repeat == 1 else f"the median of {repeat} rounds"
    order = ", with the servers measured alternately" if others else ""
    lines = [f"{note}. Values are those of {rounds}{order}." for note in notes]
    if others:
        lines.append(f"{sides[0]} / NAME: how many times better {sides[0]} is than the server NAME.")
    for name, part in report["workloads"].items():
        for side, found in part.items():
            lines += [f"{name} {side}: {count} x {error}" for error, count in found["errors"].items()]
    print_notes(lines, console)


def _build_rows(measures: Mapping[str, Measure], medians: Sequence[Values]) -> list[tuple[str, ...]]:
    ratios = [compute_ratios(medians[0], other, measures) for other in medians[1:]]
    return build_measure_rows(measures, medians, ratios)
