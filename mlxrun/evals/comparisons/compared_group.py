"""Compares the scores of lines that both sides have: one group of lines, or all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.pairing import PairedLine
from mlxrun.evals.measured_difference import compare_measured, compute_measured_equivalence
from mlxrun.evals.power import ComparisonPower
from mlxrun.evals.statistics import (
    ALPHA,
    Equivalence,
    PairedDifference,
    compare_scores,
    compute_equivalence,
)
from mlxrun.jobs.scoring.intervals import ConfidenceInterval, ScoreMean
from mlxrun.jobs.scoring.measure import HIGHER, SHARE, MeasuredLines, ScoreMeasure, describe_measure


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """The lines of one group, or all lines. `first`, `second`: intervals of the scores, None for too few
    lines. `adjusted_p`: the p value, adjusted for the number of compared groups, or of cells for all lines
    (`adjust_p_values`). `failed`, `failed_first`: lines of the second and of the first side that failed;
    `unscored`: lines that could not be scored on a side, as a scorer, a judge or a pattern failed. Such lines
    score 0."""

    name: str
    result: PairedDifference
    first: ConfidenceInterval | None
    second: ConfidenceInterval | None
    better: int
    worse: int
    failed: int
    unscored: int
    equivalence: Equivalence | None
    adjusted_p: float
    measure: ScoreMeasure = SHARE
    power: ComparisonPower | None = None
    failed_first: int = 0

    @property
    def gain(self) -> float:
        """The difference, above 0 if the second side is better."""
        difference = self.result.difference
        return difference if self.measure.better == HIGHER else -difference

    @property
    def is_significant(self) -> bool:
        return self.adjusted_p < ALPHA

    def describe(self) -> dict[str, Any]:
        """Describe the group as JSON."""
        found = asdict(self)
        result = found.pop("result")
        del result["first"], result["second"]
        for side, score in (("first", self.result.first), ("second", self.result.second)):
            found[side] = {"score": score, "interval": found[side]}
        found["measure"] = None if self.measure.is_share else describe_measure(self.measure)
        for name in ("interval", "t_interval"):
            result[name] = [bound if math.isfinite(bound) else None for bound in result[name]]
        equivalence = self.equivalence and {**asdict(self.equivalence), "is_shown": self.equivalence.is_shown}
        return {
            **found,
            **result,
            "p": self.result.p,
            "is_significant": self.is_significant,
            "equivalence": equivalence,
        }


def compare_group(name: str, lines: Sequence[PairedLine], margin: float | None, seed: int) -> ComparedGroup:
    """Compare lines that both sides have. `margin`: of the test of equivalence, in points or in the unit of
    the scores, None for no test; `seed`: of the bootstrap. JobError if scores with a unit are too few."""
    if lines[0].measure is not None:
        return _compare_measured(name, lines, lines[0].measure, margin, seed)
    margin = margin and margin / 100
    first, second = zip(*(line.scores for line in lines), strict=True)
    clusters: list[object] | None = [line.cluster or (line.id,) for line in lines]
    if all(line.cluster is None for line in lines):
        clusters = None
    means = ScoreMean(), ScoreMean()
    for line in lines:
        for mean, score in zip(means, line.scores, strict=True):
            mean.add(score, line.cluster)
    result = compare_scores(first, second, clusters, seed=seed)
    return ComparedGroup(
        name=name,
        result=result,
        first=means[0].compute_interval(),
        second=means[1].compute_interval(),
        better=sum(b > a for a, b in zip(first, second, strict=True)),
        worse=sum(b < a for a, b in zip(first, second, strict=True)),
        failed=sum(line.failed > 0 for line in lines),
        failed_first=sum(line.failed_first > 0 for line in lines),
        unscored=sum(line.unscored > 0 for line in lines),
        equivalence=None if margin is None else compute_equivalence(first, second, margin, clusters),
        adjusted_p=result.p,
    )


def _measure_side(lines: Sequence[PairedLine], measure: ScoreMeasure, side: int) -> MeasuredLines:
    found = MeasuredLines(measure)
    for line in lines:
        found.add(line.scores[side], line.sums[side], line.cluster)
    return found


def _compare_measured(
    name: str, lines: Sequence[PairedLine], measure: ScoreMeasure, margin: float | None, seed: int
) -> ComparedGroup:
    """Compare lines whose scores have a unit."""
    first, second = (_measure_side(lines, measure, side) for side in (0, 1))
    try:
        result = compare_measured(first, second, seed=seed)
    except ValueError as error:
        raise JobError(f"{name}: {error}") from error
    gains = [line.scores[1] - line.scores[0] for line in lines]
    equivalence = None if margin is None else compute_measured_equivalence(first, second, margin, seed=seed)
    return ComparedGroup(
        name=name,
        result=result,
        first=first.compute_interval(),
        second=second.compute_interval(),
        better=sum(map(measure.is_better, gains)),
        worse=sum(measure.is_better(-gain) for gain in gains),
        failed=0,
        unscored=0,
        equivalence=equivalence,
        adjusted_p=result.p,
        measure=measure,
    )
