"""The workloads of `mlxrun bench serve` that send a number of chats in each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlxrun.cli.bench.engine.measurement import compute_percentile
from mlxrun.cli.bench.serve.rounds import RoundResult, ServeMeasure, ServePlan, Values, WorkloadKind
from mlxrun.cli.bench.serve.streaming_client import StreamTimes, Target, send_all
from mlxrun.cli.bench.serve.workloads import make_bodies

MEASURES = {
    "output_rate": ServeMeasure("output", "tok/s", True),
    "request_rate": ServeMeasure("requests", "1/s", True),
    "ttft_p50": ServeMeasure("TTFT p50", "ms"),
    "ttft_p95": ServeMeasure("TTFT p95", "ms"),
    "ttft_p99": ServeMeasure("TTFT p99", "ms"),
    "gap_p50": ServeMeasure("inter-token p50", "ms"),
    "gap_p95": ServeMeasure("inter-token p95", "ms"),
    "gap_p99": ServeMeasure("inter-token p99", "ms"),
    "latency_p50": ServeMeasure("request latency p50", "ms"),
    "cached_share": ServeMeasure("prompt from cache", "%", True),
    "errors": ServeMeasure("errors", ""),
}
SETTINGS = frozenset({"concurrency", "rate", "requests", "prompt_words", "output_tokens"})


def make_chat_kind(name: str) -> WorkloadKind:
    """The workload with the bodies of that name."""
    return WorkloadKind(MEASURES, partial(_run_round, name), SETTINGS, _describe_round, "output_rate")


async def _run_round(name: str, target: Target, plan: ServePlan, seed: str) -> RoundResult:
    streams = await send_all(target, make_bodies(name, plan.size, plan.requests, seed), plan.load)
    return RoundResult(compute_numbers(streams), tuple(s.error for s in streams if s.error is not None))


def compute_numbers(streams: Sequence[StreamTimes]) -> Values:
    """The numbers of one round, times in seconds."""
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
