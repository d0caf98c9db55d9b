"""95 % confidence intervals of a mean score.

- Every score is 0 or 1, and lines are independent: Wilson's interval (Wilson 1927, "Probable Inference, the
  Law of Succession, and Statistical Inference").
- Scores are fractions, and lines are independent: Student's t.
- Lines share clusters, such as questions about one text: Student's t with clustered standard errors (Miller
  2024, "Adding Error Bars to Evals", section 2.2). Its square is multiplied by G/(G-1), with G-1 degrees of
  freedom (Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference", section VI). G is
  the number of clusters; a line without one is a cluster of its own.

- Several answers to each question are pooled: Wilson's interval with Student's t in place of the normal
  quantile. The number of trials is the one that would give the clustered standard error. Near 0 and 1, and
  for few questions, it covers more than the clustered interval (`python -m benchmarks coverage`).

Where scores or clusters do not vary, these intervals would be a point. Wilson's is used then, as if each
line, or each cluster, had been one trial. A score between 0 and 1 varies less than a trial, so this is on the
safe side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import NormalDist

CONFIDENCE = 0.95
ALPHA = 0.05  # a p value below it is significant
_NO_SPREAD = 1e-12  # a variance that is none but for rounding


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The bounds, and their method: `wilson`, `t`, `clustered` or `pooled`, from 0 to 1; `jackknife` or
    `order statistics`, in the unit of a measure."""

    low: float
    high: float
    method: str

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(slots=True)
class ScoreMean:
    """The mean of scores from 0 to 1, added one after the other, and its interval. `clusters`: count and sum
    of the scores of each named cluster; `alone`: count, sum and sum of squares of the others."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    fractions: int = 0
    alone: tuple[int, float, float] = (0, 0.0, 0.0)
    clusters: dict[Hashable, tuple[int, float]] = field(default_factory=lambda: defaultdict(lambda: (0, 0.0)))

    def add(self, score: float, cluster: Hashable = None) -> None:
        """Count one score. `cluster`: the cluster of its line, None for a line that depends on no other."""
        self.count += 1
        self.total += score
        self.squares += score * score
        self.fractions += score not in (0, 1)
        if cluster is None:
            count, total, squares = self.alone
            self.alone = count + 1, total + score, squares + score * score
        else:
            count, total = self.clusters[cluster]
            self.clusters[cluster] = count + 1, total + score

    def merge(self, other: ScoreMean) -> None:
        """Count all scores of another mean. Clusters of one name are one."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.fractions += other.fractions
        a, b = self.alone, other.alone
        self.alone = a[0] + b[0], a[1] + b[1], a[2] + b[2]
        for name, (count, total) in other.clusters.items():
            known = self.clusters[name]
            self.clusters[name] = known[0] + count, known[1] + total

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    def compute_standard_error(self) -> float | None:
        """Compute the standard error of the mean, clustered if lines share clusters. None if there are fewer
        than two independent units."""
        units = self._count_units()
        if units < 2:
            return None
        mean = self.value
        if not self._is_clustered:
            spread = max(0.0, self.squares - self.count * mean**2) / (self.count - 1)
            return math.sqrt(spread / self.count)
        count, total, squares = self.alone
        residuals = max(0.0, squares - 2 * mean * total + count * mean**2)
        residuals += math.fsum((total - count * mean) ** 2 for count, total in self.clusters.values())
        return math.sqrt(residuals * units / (units - 1)) / self.count

    def compute_interval(self) -> ConfidenceInterval | None:
        """Compute the interval; None if there are too few scores."""
        if not self.count:
            return None
        if not self._is_clustered and not self.fractions:
            return _compute_wilson(self.total, self.count)
        error, units = self.compute_standard_error(), self._count_units()
        if error is None:
            return None
        if error * error * self.count <= _NO_SPREAD:
            return _compute_wilson(self.value * units, units)
        margin, method = find_quantile(units - 1) * error, "clustered" if self._is_clustered else "t"
        return ConfidenceInterval(max(0.0, self.value - margin), min(1.0, self.value + margin), method)

    def compute_pooled_interval(self) -> ConfidenceInterval | None:
        """Compute the interval of several answers to each question, which are its cluster. None if there are
        fewer than two questions."""
        error, units = self.compute_standard_error(), self._count_units()
        if error is None:
            return None
        trials: float = units
        if error * error * self.count > _NO_SPREAD:
            trials = min(self.count, self.value * (1 - self.value) / error**2)
        quantile = find_quantile(units - 1)
        return _compute_wilson(self.value * trials, trials, quantile, "pooled")

    @property
    def _is_clustered(self) -> bool:
        return any(count > 1 for count, _ in self.clusters.values())

    def _count_units(self) -> int:
        """What is independent: clusters and lines that are in none."""
        return self.alone[0] + len(self.clusters)


def find_quantile(freedom: int) -> float:
    """Find the quantile of Student's t for intervals with so many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _compute_wilson(
    successes: float, count: float, quantile: float | None = None, method: str = "wilson"
) -> ConfidenceInterval:
    """`successes` and `count` may be fractions; `quantile`: None for that of the normal distribution."""
    z2 = (quantile or NormalDist().inv_cdf((1 + CONFIDENCE) / 2)) ** 2
    share, size = successes / count, count + z2
    centre = (successes + z2 / 2) / size
    margin = math.sqrt(z2 * (share * (1 - share) * count + z2 / 4)) / size
    return ConfidenceInterval(max(0.0, centre - margin), min(1.0, centre + margin), method)
