"""Numbers of `python -m benchmarks prefix-cache`: what a side did with a script, and what follows from it.
Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.prefix_cache.workloads import Ask, Script

KEYS = (
    "ttft_cold_s",
    "ttft_warm_s",
    "times",
    "prompt_tokens",
    "reused_tokens",
    "reused_share",
    "prefilled_tokens",
    "held_bytes",
    "growth",
    "tower_calls",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: `cached` of the prompt's tokens were not computed; `kind` says how they were found;
    `held`: bytes in the cache afterwards; `tower`: calls of the vision tower."""

    tokens: tuple[int, ...]
    ttft: float
    cached: int
    kind: str | None = None
    held: int = 0
    tower: int | None = None


class Side(Protocol):
    """A server's core with its prompt cache. Built with its model loaded; used on one thread."""

    def ask(self, ask: Ask) -> Answer:
        """Serve one request alone, to its end."""

    def forget(self) -> None:
        """Empty the cache."""

    def close(self) -> None:
        """Let go of everything, the weights too."""


@dataclass(frozen=True, slots=True)
class Record:
    """An ask with its answer; `shared`: how many tokens a perfect cache would not compute."""

    ask: Ask
    answer: Answer
    shared: int


def play(side: Side, script: Script) -> list[Record]:
    """Serve a script to its end."""
    records: list[Record] = []
    before: list[tuple[int, ...]] = []
    ask = next(script, None)
    while ask is not None:
        if ask.fresh:
            side.forget()
            before.clear()
        answer = side.ask(ask)
        records.append(Record(ask, answer, shared(ask.prompt, before)))
        before.append(ask.prompt + answer.tokens)
        try:
            ask = script.send(answer.tokens)
        except StopIteration:
            ask = None
    return records


def shared(prompt: Sequence[int], before: Iterable[Sequence[int]]) -> int:
    """Tokens at the start of the prompt that an earlier prompt with its answer has too; never all of them,
    as one must be computed to answer."""
    most = 0
    for other in before:
        pairs = enumerate(zip(prompt, other, strict=False))
        most = max(most, next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(other))))
    return min(most, len(prompt) - 1)


def numbers(records: Sequence[Record]) -> dict[str, float | None]:
    """The numbers of one round."""
    warm = [r for r in records if r.ask.role == "warm"]
    cold = [r.answer.ttft for r in records if r.ask.role == "cold"]
    alone = [r.answer.held for r in records if r.ask.role == "alone"]
    towers = [r.answer.tower for r in warm if r.answer.tower is not None]
    ttft_cold, ttft_warm = statistics.median(cold), statistics.median(r.answer.ttft for r in warm)
    held = warm[-1].answer.held
    return {
        "ttft_cold_s": ttft_cold,
        "ttft_warm_s": ttft_warm,
        "times": ttft_cold / ttft_warm if ttft_warm else None,
        "prompt_tokens": statistics.median(len(r.ask.prompt) for r in warm),
        "reused_tokens": statistics.median(r.answer.cached for r in warm),
        "reused_share": sum(r.answer.cached for r in warm) / sum(r.shared for r in warm),
        "prefilled_tokens": statistics.median(len(r.ask.prompt) - r.answer.cached for r in warm),
        "held_bytes": held,
        "growth": held / alone[-1] if alone and alone[-1] else None,
        "tower_calls": sum(towers) if towers else None,
    }


def summary(rounds: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """One side's part of the report: every round, medians, and how the warm requests met the cache."""
    runs = [numbers(records) for records in rounds]
    kinds = Counter(r.answer.kind for records in rounds for r in records if r.ask.role == "warm")
    return {
        "runs": runs,
        "median": {key: _median([run[key] for run in runs]) for key in KEYS},
        "hits": {kind: count for kind, count in kinds.items() if kind is not None},
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def same_tokens(side: Side, records: Sequence[Record]) -> float:
    """Share of the warm answers that a side without a cache gives too."""
    warm = [r for r in records if r.ask.role == "warm"]
    return statistics.fmean(side.ask(r.ask).tokens == r.answer.tokens for r in warm)
