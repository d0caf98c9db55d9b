"""The power of a comparison: what difference so many lines can show, and how many lines show a difference.

A paired t test finds a difference by 5 % (two-sided). Its power is the probability that it does so, by the
noncentral t distribution (Cohen 1988, "Statistical Power Analysis for the Behavioral Sciences"). How much
differences vary is what the two runs show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxrun.evals.statistics import PairedDifference
from mlxrun.jobs.scoring.intervals import ALPHA

POWER = 0.8
_MOST_UNITS = 10**12


@dataclass(frozen=True, slots=True)
class ComparisonPower:
    """`smallest`: the smallest difference that the compared lines show with a power of 80 %; `difference`:
    one that is asked for; `lines`: how many lines show it, None for more than can be."""

    smallest: float
    difference: float
    lines: int | None


def compute_power(units: int, effect: float) -> float:
    """Compute the power for so many units. `effect`: the difference by its standard deviation over units."""
    from scipy import stats

    freedom, shift = units - 1, math.sqrt(units) * effect
    bound = float(stats.t.ppf(1 - ALPHA / 2, freedom))
    above, below = float(stats.nct.sf(bound, freedom, shift)), float(stats.nct.cdf(-bound, freedom, shift))
    # SciPy has no values far out: of the tail on the other side, which is 0, and of this one, which is 1.
    return (1.0 if math.isnan(above) else above) + (0.0 if math.isnan(below) else below)


def find_effect(units: int) -> float:
    """Find the smallest effect that so many units show."""
    low, high = 0.0, 1 / math.sqrt(units)
    while compute_power(units, high) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if compute_power(units, middle) >= POWER else (middle, high)
    return high


def count_units(effect: float) -> int | None:
    """Count the units that show an effect; None for more than 10^12."""
    low, high = 1, 2
    while compute_power(high, effect) < POWER:
        low, high = high, 2 * high
        if high > _MOST_UNITS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_power(middle, effect) >= POWER else (middle, high)
    return high


def describe_power(result: PairedDifference, difference: float) -> ComparisonPower | None:
    """Describe the power of a comparison for a difference. None where the comparison has no standard error:
    for quantiles, for a single line or cluster, and for numbers that differ alike on every line."""
    if not result.error or result.units < 2:
        return None
    deviation = result.error * math.sqrt(result.units)
    units = count_units(difference / deviation)
    lines = None if units is None else math.ceil(units * result.lines / result.units)
    return ComparisonPower(find_effect(result.units) * deviation, difference, lines)
