"""Workloads of `mlxrun bench serve` that are a number of chats: all of a round are sent, as the load says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlxrun.bench.serve.rounds import Round, ServeMeasure, ServePlan, Values, WorkloadKind, percentile
from mlxrun.bench.serve.streaming_client import StreamTimes, Target, measure
from mlxrun.bench.serve.workloads import bodies

MEASURES = {
    "output_rate": ServeMeasure("output", "tok/s", True),
    "request_rate": ServeMeasure("requests", "1/s", True),
    "ttft_p50": ServeMeasure("TTFT p50", "ms"),
    "ttft_p95": ServeMeasure("TTFT p95", "ms"),
    "ttft_p99": ServeMeasure("TTFT p99", "ms"),
    "gap_p50": ServeMeasure("between pieces p50", "ms"),
    "gap_p95": ServeMeasure("between pieces p95", "ms"),
    "gap_p99": ServeMeasure("between pieces p99", "ms"),
    "whole_p50": ServeMeasure("whole answer p50", "ms"),
    "cached_share": ServeMeasure("prompt from cache", "%", True),
    "errors": ServeMeasure("errors", ""),
}
TAKES = frozenset({"concurrency", "rate", "requests", "prompt_words", "output_tokens"})


def chats(name: str) -> WorkloadKind:
    """The workload whose bodies are called `name`."""
    return WorkloadKind(MEASURES, partial(_round, name), TAKES, _note, "output_rate")


async def _round(name: str, target: Target, plan: ServePlan, seed: str) -> Round:
    seen = await measure(target, bodies(name, plan.size, plan.requests, seed), plan.load)
    return Round(numbers(seen), tuple(s.error for s in seen if s.error is not None))


def numbers(seen: Sequence[StreamTimes]) -> Values:
    """The numbers of one round; seconds."""
    good = [s for s in seen if s.error is None]
    found: Values = dict.fromkeys(MEASURES)
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


def _note(settings: Mapping[str, Any]) -> str:
    how = f"{settings['rate']:g} requests/s" if settings["rate"] else f"{settings['concurrency']} streams"
    return (
        f"{settings['requests']} requests a round, {how}, {settings['prompt_words']} words and at most "
        f"{settings['output_tokens']} tokens of answer"
    )
