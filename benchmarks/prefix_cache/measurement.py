"""Numbers of `python -m benchmarks prefix-cache`: what a side did with a script, and what follows from it.
Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.prefix_cache.workloads import PromptCase, Script

KEYS = (
    "ttft_cold_s",
    "ttft_warm_s",
    "times",
    "prompt_tokens",
    "reused_tokens",
    "reused_share",
    "prefilled_tokens",
    "cache_bytes",
    "growth",
    "tower_calls",
)


@dataclass(frozen=True, slots=True)
class SideAnswer:
    """An answer and its costs: `cached` prompt tokens were not computed; `kind` is the kind of hit;
    `cache_bytes` are in the cache afterwards; `tower_calls` counts calls of the vision tower."""

    tokens: tuple[int, ...]
    ttft: float
    cached: int
    kind: str | None = None
    cache_bytes: int = 0
    tower_calls: int | None = None


class Side(Protocol):
    """An engine with its prompt cache and its model loaded; used on one thread."""

    def serve(self, case: PromptCase) -> SideAnswer:
        """Serve one request alone, to its end."""

    def clear_cache(self) -> None:
        """Empty the cache."""

    def close(self) -> None:
        """Release everything, including the weights."""


@dataclass(frozen=True, slots=True)
class ServedCase:
    """A case with its answer; `shared`: the tokens that a perfect cache would not compute."""

    case: PromptCase
    answer: SideAnswer
    shared: int


def run_script(side: Side, script: Script) -> list[ServedCase]:
    """Serve a script to its end."""
    records: list[ServedCase] = []
    before: list[tuple[int, ...]] = []
    case = next(script, None)
    while case is not None:
        if case.clear_before:
            side.clear_cache()
            before.clear()
        answer = side.serve(case)
        records.append(ServedCase(case, answer, count_shared(case.prompt, before)))
        before.append(case.prompt + answer.tokens)
        try:
            case = script.send(answer.tokens)
        except StopIteration:
            case = None
    return records


def count_shared(prompt: Sequence[int], before: Iterable[Sequence[int]]) -> int:
    """Tokens at the start of the prompt that an earlier prompt with its answer has too; never all of them,
    as one must be computed to answer."""
    most = 0
    for other in before:
        pairs = enumerate(zip(prompt, other, strict=False))
        most = max(most, next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(other))))
    return min(most, len(prompt) - 1)


def compute_numbers(records: Sequence[ServedCase]) -> dict[str, float | None]:
    """The numbers of one round."""
    warm = [r for r in records if r.case.role == "warm"]
    cold = [r.answer.ttft for r in records if r.case.role == "cold"]
    alone = [r.answer.cache_bytes for r in records if r.case.role == "alone"]
    towers = [r.answer.tower_calls for r in warm if r.answer.tower_calls is not None]
    ttft_cold, ttft_warm = statistics.median(cold), statistics.median(r.answer.ttft for r in warm)
    cache_bytes = warm[-1].answer.cache_bytes
    return {
        "ttft_cold_s": ttft_cold,
        "ttft_warm_s": ttft_warm,
        "times": ttft_cold / ttft_warm if ttft_warm else None,
        "prompt_tokens": statistics.median(len(r.case.prompt) for r in warm),
        "reused_tokens": statistics.median(r.answer.cached for r in warm),
        "reused_share": sum(r.answer.cached for r in warm) / sum(r.shared for r in warm),
        "prefilled_tokens": statistics.median(len(r.case.prompt) - r.answer.cached for r in warm),
        "cache_bytes": cache_bytes,
        "growth": cache_bytes / alone[-1] if alone and alone[-1] else None,
        "tower_calls": sum(towers) if towers else None,
    }


def summarize_rounds(rounds: Sequence[Sequence[ServedCase]]) -> dict[str, Any]:
    """One side's part of the report: every round, medians, and how the warm requests met the cache."""
    runs = [compute_numbers(records) for records in rounds]
    kinds = Counter(r.answer.kind for records in rounds for r in records if r.case.role == "warm")
    return {
        "runs": runs,
        "median": {key: _compute_median([run[key] for run in runs]) for key in KEYS},
        "hits": {kind: count for kind, count in kinds.items() if kind is not None},
    }


def _compute_median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def compute_same_share(side: Side, records: Sequence[ServedCase]) -> float:
    """Share of the warm answers that a side without a cache gives as well."""
    warm = [r for r in records if r.case.role == "warm"]
    return statistics.fmean(side.serve(r.case).tokens == r.answer.tokens for r in warm)
