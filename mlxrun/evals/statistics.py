"""The statistics of two runs of the same lines: the difference of their scores, its interval and its tests.

The sampled units are lines, or clusters of lines (the epochs of one question, the questions about one text).
Two runs differ if the difference would show on other lines of the same kind. See Miller, "Adding Error Bars
to Evals" (2024), sections 2 and 4. Scores are from 0 to 1; compared_group.py has those with a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, stdtr, stdtrit

from mlxrun.jobs.scoring.intervals import ALPHA, CONFIDENCE

Array = np.ndarray[Any, np.dtype[Any]]
RESAMPLES = 100_000
_MOST_SAMPLED = 100_000_000  # numbers in one bootstrap; with more different values there are fewer resamples
_FEWEST_RESAMPLES = 2000
_FEW = 10  # units that differ from the others, below which a bootstrap has too little to resample
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class McNemar:
    """McNemar's test of the lines that only one of two runs got right. `exact` is the exact two-sided p
    value, with fewer than 5 % false alarms. `mid` (mid-p) counts the observed outcome by half, and comes
    close to 5 % (Fagerland, Lydersen and Laake, "The McNemar test for binary matched-pairs data", 2013)."""

    better: int
    worse: int
    exact: float
    mid: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The second run's score minus the first's. `units`: the number of lines, or of clusters of lines.
    `interval`: by bootstrap; `t_interval`: by a paired t test, whose p value is `t_p`; `mcnemar`: for scores
    of 0 and 1 without clusters; `p`: McNemar's `mid` then, else `t_p`. With a measure both intervals are of
    the t test, of the jackknife's values; for quantiles they and `t_p` are of a bootstrap. `error`: the
    standard error of the difference; None for quantiles, and for a single unit."""

    lines: int
    units: int
    first: float
    second: float
    difference: float
    interval: Bounds
    t_interval: Bounds
    t_p: float
    mcnemar: McNemar | None
    error: float | None

    @property
    def p(self) -> float:
        return self.t_p if self.mcnemar is None else self.mcnemar.mid


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided t tests (TOST) of whether a difference is within a margin. `p`: the greater p value of
    the two; `interval`: with a level of 90 %, within the margin if the test succeeds."""

    margin: float
    p: float
    interval: Bounds

    @property
    def is_shown(self) -> bool:
        return self.p < ALPHA


@dataclass(frozen=True, slots=True)
class Units:
    """Sums of differences and numbers of lines of each unit, and how the mean difference varies. `rounding`:
    differences that are no further apart are equal."""

    sums: Array
    sizes: Array
    rounding: float = 1e-12  # of scores from 0 to 1

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.sizes.sum())

    @property
    def count(self) -> int:
        return len(self.sums)

    @property
    def error(self) -> float:
        """The standard error of the mean, by the residuals of the units: for clusters of one size that of the
        mean over clusters."""
        if self.is_constant:
            return 0.0
        residuals = self.sums - self.mean * self.sizes
        count = self.count
        return float((residuals @ residuals * count / (count - 1)) ** 0.5 / self.sizes.sum())

    @property
    def is_constant(self) -> bool:
        """Whether all units have the same difference."""
        means = self.sums / self.sizes
        return bool(means.max() - means.min() <= self.rounding)

    @property
    def constant_p(self) -> float:
        """The two-sided p value if all units have the same difference, as there is no variance to measure."""
        return compute_least_p(self.count) if abs(self.mean) > self.rounding else 1.0

    def add_opposites(self) -> Units:
        """Add a unit with the greatest gain and one with the greatest loss, if few units differ. They would
        not show how much differences vary. For scores of 0 and 1, see Bonett and Price, Adjusted Wald
        Confidence Interval for a Difference of Binomial Proportions Based on Paired Data (2012)."""
        times = np.unique(np.round(self.sums / self.sizes, 12), return_counts=True)[1]
        if self.count - times.max() >= _FEW:
            return self
        size = self.sizes.mean()
        return Units(np.append(self.sums, [size, -size]), np.append(self.sizes, [size, size]))

    def compute_bounds(self, level: float) -> Bounds:
        """Compute the interval of the mean by Student's t."""
        reach = float(stdtrit(self.count - 1, (1 + level) / 2)) * self.error
        return max(-1.0, self.mean - reach), min(1.0, self.mean + reach)


def compare_scores(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Compare the scores of the same lines in the same order. `clusters`: the cluster of each line;
    `resamples`: the most resamples of the bootstrap. ValueError if there are no lines."""
    before, after = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if not len(before):
        raise ValueError("no lines to compare")
    units = group_units(after - before, clusters)
    is_plain = units.count == len(before) and bool(np.isin([before, after], (0.0, 1.0)).all())
    t_interval, t_p = _compute_t_test(units)
    return PairedDifference(
        lines=len(before),
        units=units.count,
        first=float(before.mean()),
        second=float(after.mean()),
        difference=units.mean,
        interval=_resample_interval(units, seed, resamples),
        t_interval=t_interval,
        t_p=t_p,
        mcnemar=compute_mcnemar(before, after) if is_plain else None,
        error=units.add_opposites().error,
    )


def compute_equivalence(
    first: ArrayLike,
    second: ArrayLike,
    margin: float,
    clusters: Sequence[object] | None = None,
) -> Equivalence:
    """Test whether the scores of two runs differ by less than `margin`. Lines that are all equal prove no
    more than their number allows. So the p value is at least (1 - margin)^units. This is the probability of
    seeing no difference if a share of lines as large as the margin differs."""
    units = group_units(np.asarray(second, dtype=float) - np.asarray(first, dtype=float), clusters)
    floor = float((1 - min(margin, 1.0)) ** units.count)
    units = units.add_opposites()
    p = float(stdtr(units.count - 1, (abs(units.mean) - margin) / units.error))
    return Equivalence(margin, max(p, floor), units.compute_bounds(1 - 2 * ALPHA))


def compute_least_p(units: int) -> float:
    """Compute the least two-sided p value that so many units can show: that of the same sign in every one."""
    return min(1.0, 2 * 0.5**units)


def adjust_p_values(values: Sequence[float]) -> list[float]:
    """Adjust the p values of several comparisons by the false discovery rate (Benjamini and Hochberg, 1995).
    Of differences called significant, 5 % are then expected to be none."""
    from scipy import stats

    return [float(p) for p in stats.false_discovery_control(values)] if values else []


def adjust_by_holm(values: Sequence[float]) -> list[float]:
    """Adjust the p values of several comparisons by the method of Holm (1979, "A Simple Sequentially
    Rejective Multiple Test Procedure"). If none of them differs, 5 % at most are the chance of any alarm."""
    found, least = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[at]))
        found[at] = least
    return found


def group_units(differences: Array, clusters: Sequence[object] | None) -> Units:
    if clusters is None:
        return Units(differences, np.ones(len(differences)))
    numbers: dict[object, int] = {}
    at = np.fromiter((numbers.setdefault(each, len(numbers)) for each in clusters), dtype=np.intp)
    return Units(np.bincount(at, differences), np.bincount(at).astype(float))


def _compute_t_test(units: Units) -> tuple[Bounds, float]:
    """The interval and the two-sided p value of a paired t test, over clusters where there are some."""
    if units.is_constant:
        return units.add_opposites().compute_bounds(CONFIDENCE), units.constant_p
    p = 2 * stdtr(units.count - 1, -abs(units.mean) / units.error)
    return units.compute_bounds(CONFIDENCE), float(p)


def _resample_interval(units: Units, seed: int, resamples: int) -> Bounds:
    """The percentile interval of a paired bootstrap over units; by Student's t where few of them differ.

    The level is expanded for small numbers, where a bootstrap is too narrow, as in Hesterberg, What Teachers
    Should Know About the Bootstrap (2015), section 5.3.
    """
    enough = units.add_opposites()
    if enough is not units:
        return enough.compute_bounds(CONFIDENCE)
    count, tail = units.count, (1 - CONFIDENCE) / 2
    means = _resample_means(units, np.random.default_rng(seed), resamples)
    tail = float(ndtr((count / (count - 1)) ** 0.5 * stdtrit(count - 1, tail)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _resample_means(units: Units, rng: np.random.Generator, resamples: int) -> Array:
    """The mean difference of each resample. Units with equal differences are interchangeable, so that how
    often each of them is in a resample is multinomial; if most differ, units are chosen one by one."""
    count = units.count
    rows = np.stack([units.sums, units.sizes], axis=1)
    values, times = np.unique(rows, axis=0, return_counts=True)
    is_few = len(values) * 16 < count
    width = len(values) if is_few else count
    resamples = min(resamples, max(_FEWEST_RESAMPLES, _MOST_SAMPLED // width))
    step, means = max(1, 10_000_000 // width), []
    for start in range(0, resamples, step):
        here = min(step, resamples - start)
        if is_few:
            sums, sizes = (rng.multinomial(count, times / count, size=here) @ values).T
        else:
            chosen = rng.integers(count, size=(here, count), dtype=np.int32)
            sums, sizes = (each[chosen].sum(axis=1) for each in (units.sums, units.sizes))
        means.append(sums / sizes)
    return np.concatenate(means)


def compute_mcnemar(before: Array, after: Array) -> McNemar:
    """Compute McNemar's test of the lines that only one of two runs got right."""
    from scipy import stats

    better, worse = int((after > before).sum()), int((after < before).sum())
    if better == worse:
        return McNemar(better, worse, 1.0, 1.0)
    exact = float(stats.binomtest(better, better + worse).pvalue)
    return McNemar(better, worse, exact, exact - float(stats.binom.pmf(better, better + worse, 0.5)))
