"""`python -m benchmarks coverage`: how often 95 % intervals of pooled seeds have the true score in them.

Questions are sampled: each has its own chance of a right answer, from a beta distribution. Each seed answers
each question once. The true score is the mean of that distribution, so an interval has to cover what other
questions of the same kind would give. The intervals are those of mlxrun/jobs/scoring/intervals.py. Beside the
pooled one there are the clustered one, and Wilson's, which takes every answer for a question of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxrun.cli.bench.report import make_console, make_table, print_notes
from mlxrun.jobs.scoring.intervals import ConfidenceInterval, ScoreMean

if TYPE_CHECKING:
    from rich.console import Console

QUESTIONS, SEEDS = (10, 30, 100, 400), (2, 5, 10)
# The mean chance of a right answer, and how alike questions are: with 1, most are always or never right.
KINDS = ((0.5, 1.0), (0.9, 1.0), (0.9, 10.0), (0.97, 2.0))
SIDES: Mapping[str, Callable[[ScoreMean], ConfidenceInterval | None]] = {
    "pooled": ScoreMean.compute_pooled_interval,
    "clustered": ScoreMean.compute_interval,
    "independent": lambda scores: _flatten(scores).compute_interval(),
}


def run_coverage(suites: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulate `suites` suites of each shape. The report has the coverage and the mean width of each side."""
    rng, rows = np.random.default_rng(seed), []
    for questions, seeds, (mean, likeness) in product(QUESTIONS, SEEDS, KINDS):
        found = measure_shape(rng, suites, questions, seeds, mean, likeness)
        rows.append({"questions": questions, "seeds": seeds, "mean": mean, "likeness": likeness, **found})
        say(f"{questions} questions, {seeds} seeds, mean {mean}: {found['pooled']['coverage']:.1%}")
    command = f"python -m benchmarks coverage --suites {suites} --seed {seed}"
    return {"command": command, "settings": {"suites": suites, "seed": seed}, "rows": rows}


def measure_shape(
    rng: np.random.Generator, suites: int, questions: int, seeds: int, mean: float, likeness: float
) -> dict[str, dict[str, float]]:
    """Measure the intervals of suites of one shape."""
    chances = rng.beta(mean * likeness, (1 - mean) * likeness, size=(suites, questions))
    covered, widths = dict.fromkeys(SIDES, 0), dict.fromkeys(SIDES, 0.0)
    for right in rng.binomial(seeds, chances):
        scores = _count(right.tolist(), seeds)
        for name, compute in SIDES.items():
            interval = compute(scores)
            assert interval is not None, "there are several questions"
            covered[name] += interval.low <= mean <= interval.high
            widths[name] += interval.high - interval.low
    return {name: {"coverage": covered[name] / suites, "width": widths[name] / suites} for name in SIDES}


def _count(right: Sequence[int], seeds: int) -> ScoreMean:
    """The scores of questions with so many right answers each."""
    found, total = ScoreMean(seeds * len(right), sum(right), sum(right)), dict[Any, tuple[int, float]]()
    for question, count in enumerate(right):
        total[question] = seeds, count
    found.clusters.update(total)
    return found


def _flatten(scores: ScoreMean) -> ScoreMean:
    count, total = scores.count, scores.total
    return ScoreMean(count, total, total, 0, (count, total, total))


def print_coverage(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a row for each shape."""
    console = make_console(console)
    columns = ["questions", "seeds", "mean", "likeness", *SIDES, *(f"width, {name}" for name in SIDES)]
    cells = [
        [
            *(f"{row[name]:g}" for name in columns[:4]),
            *(f"{row[name]['coverage']:.1%}" for name in SIDES),
            *(f"{row[name]['width']:.3f}" for name in SIDES),
        ]
        for row in report["rows"]
    ]
    console.print(make_table(columns, 2, cells, console.is_terminal))
    settings = report["settings"]
    print_notes([f"{settings['suites']} simulated suites a row, seed {settings['seed']}"], console)
