"""The power of comparisons, against statsmodels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from mlxrun.evals.comparisons.compared_group import compare_measured
from mlxrun.evals.power import compute_power, count_units, describe_power, find_effect
from mlxrun.evals.statistics import compare_scores
from mlxrun.jobs.scoring.measure import MeasuredLines, ScoreMeasure

PEER = TTestPower()


@pytest.mark.parametrize("units", [3, 10, 30, 400, 20_000])
def test_the_smallest_effect_is_that_of_statsmodels(units: int) -> None:
    wanted = PEER.solve_power(nobs=units, alpha=0.05, power=0.8)
    assert find_effect(units) == pytest.approx(wanted, rel=1e-4)
    assert compute_power(units, 0.3) == pytest.approx(PEER.power(0.3, units, 0.05), rel=1e-6)


@pytest.mark.parametrize("effect", [2.0, 0.5, 0.1, 0.01])
def test_so_many_units_are_needed(effect: float) -> None:
    wanted = PEER.solve_power(effect_size=effect, alpha=0.05, power=0.8)
    assert count_units(effect) == int(np.ceil(wanted))
    assert count_units(1e-9) is None


@pytest.mark.parametrize(("units", "effect"), [(2, 5.31), (2, 11.5), (3, 3.264), (30, 2.0)])
def test_the_power_of_few_units_is_that_of_a_simulation(units: int, effect: float) -> None:
    """SciPy has no value for the other tail of some of them."""
    rng, bound = np.random.default_rng(0), stats.t.ppf(0.975, units - 1)
    sampled = rng.normal(effect, 1, size=(20_000, units))
    statistics = sampled.mean(axis=1) / sampled.std(axis=1, ddof=1) * units**0.5
    assert compute_power(units, effect) == pytest.approx((abs(statistics) > bound).mean(), abs=0.015)


def test_two_units_show_large_effects_only() -> None:
    assert find_effect(2) == pytest.approx(11.54, abs=0.05)
    assert (count_units(5.5), count_units(12.0)) == (3, 2)


def test_lines_and_points_of_a_comparison() -> None:
    """For scores of two runs, and where lines share clusters, of which so many more are needed."""
    rng = np.random.default_rng(0)
    before, after = (rng.random(400) < share for share in (0.7, 0.75))
    found = compare_scores(before, after)
    power = describe_power(found, 0.02)
    deviation = np.std(after.astype(float) - before, ddof=1)
    assert power is not None and power.lines is not None
    assert power.smallest == pytest.approx(PEER.solve_power(nobs=400, alpha=0.05, power=0.8) * deviation)
    assert power.lines == int(np.ceil(PEER.solve_power(effect_size=0.02 / deviation, alpha=0.05, power=0.8)))
    clusters = [at // 4 for at in range(400)]
    pairs = np.repeat(before[::4], 4), np.repeat(after[::4], 4)
    clustered = describe_power(compare_scores(*pairs, clusters), 0.02)
    assert clustered is not None and clustered.lines is not None and clustered.lines > 3 * power.lines


def test_numbers_that_differ_alike_show_no_power() -> None:
    found = compare_scores([0.0, 1.0, 1.0], [1.0, 0.0, 1.0])
    assert describe_power(found, 0.02) is not None
    assert describe_power(replace(found, error=0.0), 0.02) is None
    sides = MeasuredLines(ScoreMeasure("s")), MeasuredLines(ScoreMeasure("s"))
    for score in (1000.3, 1200.7, 900.1):
        for side, more in zip(sides, (0.0, 0.1), strict=True):
            side.add(score + more, {})
    assert describe_power(compare_measured(*sides), 0.02) is None  # but for rounding


def test_a_simulation_finds_the_difference_as_often_as_promised() -> None:
    rng, units = np.random.default_rng(1), 60
    effect, found = find_effect(units), 0
    for _ in range(500):
        differences = rng.normal(effect, 1, size=units)
        statistic = differences.mean() / differences.std(ddof=1) * units**0.5
        found += abs(statistic) > 2.0009954  # the quantile of t with 59 degrees of freedom
    assert 0.75 <= found / 500 <= 0.85
