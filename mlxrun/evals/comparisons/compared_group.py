"""Compares the scores of lines that both sides have: one group of lines, or all of them.

Scores with a unit (mlxrun/jobs/scoring/measure.py) are compared by the jackknife, which gives each line, or
each cluster, a number in each run. Their differences are compared by Student's t. For a mean this is the
paired t test. Quantiles are compared by a paired bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.pairing import PairedLine
from mlxrun.evals.power import ComparisonPower
from mlxrun.evals.statistics import (
    Bounds,
    Equivalence,
    PairedDifference,
    Units,
    compare_scores,
    compute_equivalence,
    compute_least_p,
)
from mlxrun.jobs.scoring.intervals import ALPHA, CONFIDENCE, ConfidenceInterval, ScoreMean
from mlxrun.jobs.scoring.measure import (
    HIGHER,
    SHARE,
    MeasuredLines,
    ScoreMeasure,
    describe_measure,
    estimate_rounding,
)

Array = np.ndarray[Any, np.dtype[Any]]
_RESAMPLES = 2000
_Side = ScoreMean | MeasuredLines  # the scores of one side


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
            result[name] = _describe_bounds(result[name])
        equivalence = self.equivalence and {
            **asdict(self.equivalence),
            "interval": _describe_bounds(self.equivalence.interval),
            "is_shown": self.equivalence.is_shown,
        }
        return {
            **found,
            **result,
            "p": self.result.p,
            "is_significant": self.is_significant,
            "equivalence": equivalence,
        }


def _describe_bounds(interval: Bounds) -> list[float | None]:
    """The bounds as JSON, which has no infinity: None for no bound."""
    return [bound if math.isfinite(bound) else None for bound in interval]


def compare_group(name: str, lines: Sequence[PairedLine], margin: float | None, seed: int) -> ComparedGroup:
    """Compare lines that both sides have. `margin`: of the test of equivalence, in points or in the unit of
    the scores, None for no test; `seed`: of the bootstrap. JobError if scores with a unit are too few."""
    measure, gains = lines[0].measure or SHARE, [line.scores[1] - line.scores[0] for line in lines]
    try:
        compare = _compare_shares if measure.is_share else _compare_measures
        result, first, second, equivalence = compare(lines, margin, seed)
    except ValueError as error:
        raise JobError(f"{name}: {error}") from error
    return ComparedGroup(
        name=name,
        result=result,
        first=_compute_interval(first, _count_epochs(lines)),
        second=_compute_interval(second, _count_epochs(lines)),
        better=sum(map(measure.is_better, gains)),
        worse=sum(measure.is_better(-gain) for gain in gains),
        failed=sum(line.failed > 0 for line in lines),
        failed_first=sum(line.failed_first > 0 for line in lines),
        unscored=sum(line.unscored > 0 for line in lines) if measure.is_share else 0,
        equivalence=equivalence,
        adjusted_p=result.p,
        measure=measure,
    )


def _count_epochs(lines: Sequence[PairedLine]) -> int:
    return max(line.epochs for line in lines)


def _compute_interval(side: _Side, epochs: int) -> ConfidenceInterval | None:
    """The interval of a side: that of SeedPool for scores from 0 to 1 of several runs."""
    if epochs > 1 and isinstance(side, ScoreMean):
        return side.compute_pooled_interval()
    return side.compute_interval()


def _compare_shares(
    lines: Sequence[PairedLine], margin: float | None, seed: int
) -> tuple[PairedDifference, _Side, _Side, Equivalence | None]:
    """The difference of scores from 0 to 1, the mean of each side, and the test of equivalence."""
    first, second = zip(*(line.scores for line in lines), strict=True)
    clusters: list[object] | None = [line.cluster or (line.id,) for line in lines]
    if all(line.cluster is None for line in lines):
        clusters = None
    means, epochs = (ScoreMean(), ScoreMean()), _count_epochs(lines)
    for line in lines:
        cluster = (line.cluster or (line.id,)) if epochs > 1 else line.cluster
        for mean, score in zip(means, line.scores, strict=True):
            for _ in range(epochs):
                mean.add(score, cluster)
    equivalence = None if margin is None else compute_equivalence(first, second, margin / 100, clusters)
    return compare_scores(first, second, clusters, seed=seed), *means, equivalence


def _compare_measures(
    lines: Sequence[PairedLine], margin: float | None, seed: int
) -> tuple[PairedDifference, _Side, _Side, Equivalence | None]:
    """The same of scores with a unit, of which no line has failed."""
    assert (measure := lines[0].measure) is not None
    sides = MeasuredLines(measure), MeasuredLines(measure)
    for line in lines:
        for side, score, sums in zip(sides, line.scores, line.sums, strict=True):
            side.add(score, sums, line.cluster)
    result = compare_measured(*sides, seed=seed)
    equivalence = None if margin is None else compute_measured_equivalence(*sides, margin, seed=seed)
    return result, *sides, equivalence


def compare_measured(first: MeasuredLines, second: MeasuredLines, *, seed: int = 0) -> PairedDifference:
    """Compare the figures of the same lines in the same order, with the same clusters. ValueError if a figure
    is undefined."""
    found = _measure_difference(first, second, seed)
    interval = found.compute_bounds(CONFIDENCE)
    return PairedDifference(
        lines=first.count,
        units=found.count,
        first=found.first,
        second=found.second,
        difference=found.difference,
        interval=interval,
        t_interval=interval,
        t_p=found.compute_p(),
        mcnemar=None,
        error=None if found.units is None else found.units.error,
    )


@dataclass(frozen=True, slots=True)
class _MeasuredDifference:
    """Two figures, and how their difference varies: by differences of pseudo-values of each unit, or by
    resampled differences. Both are None for a single unit, which shows nothing of it. `count`: of units;
    `is_constant`: whether all have the same difference; `rounding`: what is less is no difference."""

    first: float
    second: float
    count: int
    units: Units | None
    resampled: Array | None
    is_constant: bool
    rounding: float

    @property
    def difference(self) -> float:
        return self.second - self.first

    def compute_bounds(self, level: float) -> Bounds:
        if self.units is not None:
            reach = float(stdtrit(self.units.count - 1, (1 + level) / 2)) * self.units.error
            return self.difference - reach, self.difference + reach
        if self.resampled is None:
            return -math.inf, math.inf
        low, high = np.quantile(self.resampled, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def compute_p(self) -> float:
        """The two-sided p value. That of a bootstrap is how often the difference varies by as much as it is
        (Riezler and Maxwell, On Some Pitfalls in Automatic Evaluation and Significance Testing, 2005). Of few
        units it would be too low, as they may all have the same difference."""
        if self.units is not None:
            return (
                self.units.constant_p if self.is_constant else 2 * self._compute_tail(-abs(self.difference))
            )
        if self.resampled is None:
            return 1.0
        beyond = abs(self.resampled - self.difference) >= abs(self.difference) - self.rounding
        return max(compute_least_p(self.count), float((1 + beyond.sum()) / (1 + len(self.resampled))))

    def compute_equivalence(self, margin: float) -> float:
        """The p value of the test that the difference is less than `margin`. Units that all have the same
        difference prove no more than that few others differ: it is at least the probability to see none of
        5 %."""
        floor = (1 - ALPHA) ** self.count if self.is_constant else 0.0
        if self.units is not None:
            return max(floor, self._compute_tail(abs(self.difference) - margin))
        if self.resampled is None:
            return 1.0
        beyond = max((self.resampled >= margin).sum(), (self.resampled <= -margin).sum())
        one_sided = compute_least_p(self.count) / 2
        return max(floor, one_sided, float((1 + beyond) / (1 + len(self.resampled))))

    def _compute_tail(self, distance: float) -> float:
        """The probability of a distance as low, by Student's t."""
        assert self.units is not None
        if self.units.error == 0:
            return float(distance >= 0)
        return float(stdtr(self.units.count - 1, distance / self.units.error))


def _measure_difference(first: MeasuredLines, second: MeasuredLines, seed: int) -> _MeasuredDifference:
    values, level = (first.value, second.value), first.measure.quantile
    if values[0] is None or values[1] is None:
        raise ValueError(f"{first.measure.aggregate} is undefined")
    before, after = first.compute_pseudo_values(), second.compute_pseudo_values()
    count, has_pseudo_values, resampled = len(set(first.list_units())), True, None
    if before is None or after is None:
        has_pseudo_values, before, after = False, np.array(first.scores), np.array(second.scores)
        if level is not None and count > 1:
            resampled = _resample_quantiles(first, second, level, seed)
    units = Units(after - before, np.ones(len(before)), estimate_rounding(before, after))
    return _MeasuredDifference(
        first=values[0],
        second=values[1],
        count=count,
        units=units if has_pseudo_values else None,
        resampled=resampled,
        is_constant=units.is_constant,
        rounding=units.rounding,
    )


def _resample_quantiles(first: MeasuredLines, second: MeasuredLines, level: float, seed: int) -> Array:
    """The differences of the quantiles of resampled units."""
    numbers, rng = np.array(first.list_units()), np.random.default_rng(seed)
    count = int(numbers.max()) + 1
    lines = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    scores, found = np.array([first.scores, second.scores]), []
    for _ in range(_RESAMPLES):
        chosen = rng.integers(count, size=count)
        rows = chosen if count == len(numbers) else np.concatenate([lines[unit] for unit in chosen])
        before, after = np.quantile(scores[:, rows], level, axis=1)
        found.append(after - before)
    return np.array(found)


def compute_measured_equivalence(
    first: MeasuredLines, second: MeasuredLines, margin: float, *, seed: int = 0
) -> Equivalence:
    """Test whether the figures of two runs differ by less than `margin`, in their unit."""
    found = _measure_difference(first, second, seed)
    return Equivalence(margin, found.compute_equivalence(margin), found.compute_bounds(1 - 2 * ALPHA))
