"""The difference of two runs of the same lines whose scores have a unit (mlxrun/jobs/scoring/measure.py).

The jackknife gives each line, or each cluster, a number in each run. Their differences are compared by
Student's t. For a mean this is the paired t test. Quantiles are compared by a paired bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.evals.statistics import ALPHA, LEVEL, Bounds, Equivalence, PairedDifference, Units, group_units
from mlxrun.jobs.scoring.measure import MeasuredLines

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_RESAMPLES = 2000


def compare_measured(first: MeasuredLines, second: MeasuredLines, *, seed: int = 0) -> PairedDifference:
    """Compare the figures of the same lines in the same order, with the same clusters. ValueError if a figure
    is undefined."""
    found = _measure_difference(first, second, seed)
    interval = found.compute_bounds(LEVEL)
    return PairedDifference(
        lines=first.count,
        units=len(set(first.list_units())),
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
    resampled differences. Both are None for a single unit, which shows nothing of it."""

    first: float
    second: float
    units: Units | None
    resampled: Array | None

    @property
    def difference(self) -> float:
        return self.second - self.first

    def compute_bounds(self, level: float) -> Bounds:
        import numpy as np
        from scipy.special import stdtrit

        if self.units is not None:
            reach = float(stdtrit(self.units.count - 1, (1 + level) / 2)) * self.units.error
            return self.difference - reach, self.difference + reach
        if self.resampled is None:
            return -math.inf, math.inf
        low, high = np.quantile(self.resampled, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def compute_p(self) -> float:
        """The two-sided p value. That of a bootstrap is how often the difference varies by as much as it is
        (Riezler and Maxwell, On Some Pitfalls in Automatic Evaluation and Significance Testing, 2005)."""
        if self.units is not None:
            if self.units.is_constant:
                return min(1.0, 2 * 0.5**self.units.count) if self.difference else 1.0
            return 2 * self._compute_tail(-abs(self.difference))
        if self.resampled is None:
            return 1.0
        beyond = abs(self.resampled - self.difference) >= abs(self.difference)
        return float((1 + beyond.sum()) / (1 + len(self.resampled)))

    def compute_equivalence(self, margin: float) -> float:
        """The p value of the test that the difference is less than `margin`."""
        if self.units is not None:
            return self._compute_tail(abs(self.difference) - margin)
        if self.resampled is None:
            return 1.0
        beyond = max((self.resampled >= margin).sum(), (self.resampled <= -margin).sum())
        return float((1 + beyond) / (1 + len(self.resampled)))

    def _compute_tail(self, distance: float) -> float:
        """The probability of a distance as low, by Student's t."""
        from scipy.special import stdtr

        assert self.units is not None
        if self.units.error == 0:
            return float(distance >= 0)
        return float(stdtr(self.units.count - 1, distance / self.units.error))


def _measure_difference(first: MeasuredLines, second: MeasuredLines, seed: int) -> _MeasuredDifference:
    values = first.value, second.value
    if values[0] is None or values[1] is None:
        raise ValueError(f"{first.measure.aggregate} is undefined")
    before, after = first.compute_pseudo_values(), second.compute_pseudo_values()
    units, resampled = None, None
    if before is not None and after is not None:
        units = group_units(after - before, None)
    elif first.measure.quantile is not None and len(set(first.list_units())) > 1:
        resampled = _resample_quantiles(first, second, first.measure.quantile, seed)
    return _MeasuredDifference(values[0], values[1], units, resampled)


def _resample_quantiles(first: MeasuredLines, second: MeasuredLines, level: float, seed: int) -> Array:
    """The differences of the quantiles of resampled units."""
    import numpy as np

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
    """Test whether the figures of two runs differ by less than `margin`, in their unit. Lines that are all
    equal prove no more than that few others differ: p is at least the probability to see none of 5 %."""
    found = _measure_difference(first, second, seed)
    units = len(set(first.list_units()))
    floor = (1 - ALPHA) ** units if first.scores == second.scores else 0.0
    p = max(floor, found.compute_equivalence(margin))
    return Equivalence(margin, p, found.compute_bounds(1 - 2 * ALPHA))
