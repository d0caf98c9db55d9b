"""Measures: scores that are any numbers, with their unit, their direction, and what is made of many of them.

A score without a measure is a share from 0 to 1, whose mean is shown in percent. Else `aggregate` says what
the figure of a group of lines is:

    mean, sum, exp_mean       of the scores of the lines; exp_mean is e to the power of their mean
    median, p90, p99.9        a quantile of the scores
    bleu, chrf, chrf++, ter   sacrebleu's corpus metric, of the counts of all lines (translation.py)
    2 * tp / (2 * tp + fp)    any formula, of sums over lines

All but quantiles are functions of sums over lines. Their intervals are Student's t with the standard error of
the jackknife, which leaves out one line, or one cluster, at a time. (Efron and Tibshirani 1993, "An
Introduction to the Bootstrap", chapter 11.) For a mean this is the usual interval. Those of quantiles are the
order statistics between which the quantile is, by the binomial distribution. With clusters, it is by the
clustered standard error of the share of lines below it (Woodruff 1952).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrun.jobs.scoring.formula import evaluate_formula, list_names
from mlxrun.jobs.scoring.intervals import CONFIDENCE, ConfidenceInterval, ScoreMean, find_quantile
from mlxrun.jobs.scoring.translation import TRANSLATION, compute_translation

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

LOWER, HIGHER = "lower", "higher"
OF_SCORES = ("mean", "sum", "exp_mean")
_QUANTILE = re.compile(r"median|p(\d{1,2}(?:\.\d{1,3})?)")
_LONGEST_UNIT = 20
_ROUNDINGS = 64  # of a pseudo-value; few of them are larger than one


@dataclass(frozen=True, slots=True)
class ScoreMeasure:
    """What a score is. `unit`: behind its number; `better`: `higher` or `lower`; `aggregate`: as above."""

    unit: str = ""
    better: str = HIGHER
    aggregate: str = "mean"

    def check(self, sums: Mapping[str, float]) -> None:
        """Raise ValueError if it is none that a scorer may give. `sums`: what the scorer adds up."""
        unit = self.unit
        if len(unit) > _LONGEST_UNIT or not unit.isprintable() or unit == SHARE.unit:
            wanted = f"at most {_LONGEST_UNIT} letters or signs, and not `{SHARE.unit}`, were"
            raise ValueError(f"{unit!r:.100} as `unit`, where {wanted} expected")
        if self.better not in (LOWER, HIGHER):
            raise ValueError(f"{self.better!r:.100} as `better`, where `lower` or `higher` was expected")
        if self.aggregate in TRANSLATION:
            raise ValueError(f"{self.aggregate!r:.100} as `aggregate`, which a scorer cannot use")
        if self.is_of_scores and sums:
            raise ValueError(f"`sums`, of which the aggregate {self.aggregate} uses none")
        if not self.is_of_scores:
            missing = [name for name in list_names(self.aggregate) if name not in sums]
            if missing:
                raise ValueError(f"no `sums` of {', '.join(missing)}, which its `aggregate` has")

    @property
    def is_share(self) -> bool:
        return self == SHARE

    @property
    def quantile(self) -> float | None:
        """The level of the quantile, from 0 to 1; None for other aggregates."""
        found = _QUANTILE.fullmatch(self.aggregate)
        return None if found is None else float(found[1] or 50) / 100

    @property
    def is_of_scores(self) -> bool:
        """Whether the scores of the lines are aggregated, not their sums."""
        return self.aggregate in OF_SCORES or self.quantile is not None

    def is_better(self, difference: float) -> bool:
        """Whether a score that is greater by `difference` is better."""
        return difference < 0 if self.better == LOWER else difference > 0

    def compute(self, sums: Mapping[str, Array], lines: int) -> Array:
        """Compute figures from one array for each sum; NaN where a figure is undefined. `sums` of aggregates
        of scores are `score` and `lines`, of `lines` lines in all."""
        import numpy as np

        if self.aggregate in TRANSLATION:
            return compute_translation(self.aggregate, sums)
        with np.errstate(all="ignore"):
            if self.aggregate not in OF_SCORES:
                return evaluate_formula(self.aggregate, sums)
            mean = sums["score"] / sums["lines"]
            return (
                np.exp(mean)
                if self.aggregate == "exp_mean"
                else mean * (lines if self.aggregate == "sum" else 1)
            )

    def format(self, value: float | None, interval: Sequence[float] | None = None) -> str:
        """Format a figure with its interval: `72.5 % [65.1, 78.9]`, `6.817 bits/byte [6.6, 7.034]`."""
        if value is None:
            return "undefined"
        unit = " %" if self.is_share else f" {self.unit}" if self.unit else ""
        text = f"{self.format_number(value, value)}{unit}"
        return text if interval is None else f"{text} {self.format_bounds(interval, value)}"

    def format_bounds(self, interval: Sequence[float], like: float, sign: str = "") -> str:
        """Format an interval without its unit. `like`: a number with as many digits; `sign`: `+` to have it
        on every number."""
        low, high = (self.format_number(bound, like, sign) for bound in interval)
        return f"[{low}, {high}]"

    def format_number(self, number: float, like: float, sign: str = "") -> str:
        """Format a number without its unit, with as many digits as `like` has: shares in percent."""
        if self.is_share:
            return f"{100 * number:{sign}.1f}"
        return f"{number:{sign},.{_count_decimals(like)}f}"

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return "points" if self.is_share else self.unit


SHARE = ScoreMeasure("share")


def _count_decimals(number: float) -> int:
    """So many that four digits are seen; three behind the point at most, unless all of them were 0."""
    size = abs(number)
    if size == 0 or not math.isfinite(size):
        return 3
    power = math.floor(math.log10(size))
    return 2 - power if power < -2 else min(3, max(0, 3 - power))


def read_measure(result: Mapping[str, Any]) -> ScoreMeasure | None:
    """Read the measure of the `eval` of a record; None for a share."""
    found = result.get("measure")
    return ScoreMeasure(**found) if isinstance(found, dict) else None


@dataclass(slots=True)
class MeasuredLines:
    """Lines with one measure. `clusters`: those of the lines, None for a line that depends on no other."""

    measure: ScoreMeasure
    scores: list[float] = field(default_factory=list)
    sums: list[Mapping[str, float]] = field(default_factory=list)
    clusters: list[Hashable] = field(default_factory=list)

    def add(self, score: float, sums: Mapping[str, float], cluster: Hashable = None) -> None:
        """Add a line."""
        self.scores.append(score)
        self.sums.append(sums)
        self.clusters.append(cluster)

    def merge(self, other: MeasuredLines) -> None:
        """Add all lines of others with the same measure. Clusters of one name are one."""
        self.scores += other.scores
        self.sums += other.sums
        self.clusters += other.clusters

    @property
    def count(self) -> int:
        return len(self.scores)

    @property
    def value(self) -> float | None:
        """The figure of all lines; None where it is undefined, such as 0 / 0."""
        import numpy as np

        if not self.scores:
            return None
        level = self.measure.quantile
        if level is not None:
            return float(np.quantile(self.scores, level))
        totals = {name: each.sum(keepdims=True) for name, each in self._sum_units().items()}
        found = float(self.measure.compute(totals, self.count)[0])
        return found if math.isfinite(found) else None

    def add_up(self) -> dict[str, float]:
        """Add up what the lines have in `sums`."""
        names = dict.fromkeys(name for sums in self.sums for name in sums)
        return {name: math.fsum(sums.get(name, 0.0) for sums in self.sums) for name in names}

    def list_units(self) -> list[int]:
        """List the number of the unit of each line: of its cluster, or its own."""
        numbers: dict[Hashable, int] = {}
        keys = ((None, at) if each is None else (each,) for at, each in enumerate(self.clusters))
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def _sum_units(self) -> dict[str, Array]:
        """The sums of each unit, by name."""
        import numpy as np

        units = np.array(self.list_units(), dtype=np.intp)
        if self.measure.is_of_scores:
            return {"score": np.bincount(units, self.scores), "lines": np.bincount(units).astype(float)}
        names = dict.fromkeys(name for sums in self.sums for name in sums)
        return {name: np.bincount(units, [sums.get(name, 0.0) for sums in self.sums]) for name in names}

    def compute_pseudo_values(self) -> Array | None:
        """Compute one number for each unit, whose mean varies as the figure does. None for quantiles, for
        fewer than two units, and where a figure without a unit is undefined."""
        import numpy as np

        units = self._sum_units() if self.scores and self.measure.quantile is None else {}
        count = len(next(iter(units.values()), ()))
        value = self.value
        if count < 2 or value is None:
            return None
        left = self.measure.compute({name: each.sum() - each for name, each in units.items()}, self.count)
        found = count * value - (count - 1) * left
        return found if bool(np.isfinite(found).all()) else None

    def compute_standard_error(self) -> float | None:
        """Compute the standard error of the figure; None where it has none, 0 where units are all equal."""
        import numpy as np

        values = self.compute_pseudo_values()
        if values is None:
            return None
        is_constant = np.ptp(values) <= estimate_rounding(values)
        return 0.0 if is_constant else float(values.std(ddof=1) / len(values) ** 0.5)

    def compute_interval(self) -> ConfidenceInterval | None:
        """Compute the 95 % interval of the figure; None where it has none, or does not vary."""
        value, error = self.value, self.compute_standard_error()
        if self.measure.quantile is not None:
            return self._compute_quantile_interval(self.measure.quantile)
        if value is None or not error:
            return None  # lines that are all equal show nothing of how others vary
        reach = find_quantile(len(set(self.list_units())) - 1) * error
        return ConfidenceInterval(value - reach, value + reach, "jackknife")

    def _compute_quantile_interval(self, level: float) -> ConfidenceInterval | None:
        from scipy import stats

        value, count, values = self.value, self.count, sorted(self.scores)
        below = ScoreMean()
        for score, cluster in zip(self.scores, self.clusters, strict=True):
            below.add(float(value is not None and score <= value), cluster)
        units, error = len(set(self.list_units())), below.compute_standard_error()
        if units == count:
            tail = (1 - CONFIDENCE) / 2
            low, high = (int(stats.binom.ppf(each, count, level)) for each in (tail, 1 - tail))
            high += 1
        elif error is not None:
            reach = find_quantile(units - 1) * error
            low, high = math.ceil(count * (level - reach)), math.floor(count * (level + reach)) + 1
        else:
            return None
        if low < 1 or high > count or values[0] == values[-1]:
            return None  # few lines have no value of which it is known to be beyond; equal ones show nothing
        return ConfidenceInterval(values[low - 1], values[high - 1], "order statistics")


def estimate_rounding(*samples: Array) -> float:
    """Estimate how far equal pseudo-values are apart by rounding. It grows with their size, and with their
    number, by which they are multiplied. `samples`: scores or pseudo-values of the same units."""
    import numpy as np

    largest = max(float(np.abs(each).max()) for each in samples)
    return _ROUNDINGS * len(samples[0]) * largest * float(np.finfo(float).eps)


def describe_measure(measure: ScoreMeasure) -> dict[str, str]:
    """Describe a measure as records and scores.json have it."""
    return asdict(measure)
