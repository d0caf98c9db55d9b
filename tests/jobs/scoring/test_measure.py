"""Figures of measures and their intervals, against NumPy, SciPy and statsmodels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from mlxrun.jobs.scoring.measure import SHARE, MeasuredLines, ScoreMeasure

TIMES = [0.3, 1.7, 0.9, 2.4, 0.6, 12.0, 1.1, 0.8, 3.3, 0.5]


def make(
    aggregate: str, scores: Sequence[float], clusters: Sequence[str | None] | None = None
) -> MeasuredLines:
    found = MeasuredLines(ScoreMeasure("s", "lower", aggregate))
    for at, score in enumerate(scores):
        found.add(score, {}, None if clusters is None else clusters[at])
    return found


def test_a_mean_has_the_interval_of_students_t() -> None:
    lines = make("mean", TIMES)
    assert lines.value == pytest.approx(np.mean(TIMES))
    assert lines.compute_standard_error() == pytest.approx(stats.sem(TIMES))
    found = lines.compute_interval()
    assert found is not None and found.bounds == pytest.approx(DescrStatsW(TIMES).tconfint_mean())


def test_a_sum_is_so_many_means() -> None:
    lines, mean = make("sum", TIMES), make("mean", TIMES).compute_interval()
    assert lines.value == pytest.approx(sum(TIMES)) and mean is not None
    found = lines.compute_interval()
    assert found is not None and found.bounds == pytest.approx([10 * each for each in mean.bounds])


def test_exp_mean_of_logarithms_is_the_geometric_mean() -> None:
    lines = make("exp_mean", [math.log(each) for each in TIMES])
    assert lines.value == pytest.approx(stats.gmean(TIMES))
    error = lines.compute_standard_error()
    by_hand = stats.gmean(TIMES) * stats.sem(np.log(TIMES))  # the delta method
    assert error == pytest.approx(by_hand, rel=0.05)


@pytest.mark.parametrize(("aggregate", "level"), [("median", 0.5), ("p90", 0.9), ("p2.5", 0.025)])
def test_quantiles_are_those_of_numpy(aggregate: str, level: float) -> None:
    scores = list(np.random.default_rng(0).lognormal(size=400))
    lines = make(aggregate, scores)
    assert lines.value == pytest.approx(np.quantile(scores, level))
    found = lines.compute_interval()
    assert found is not None and lines.value is not None and found.low < lines.value < found.high
    # Between two order statistics there is the quantile if so many lines are below it.
    below = [sum(each < bound for each in scores) for bound in found.bounds]
    covered = stats.binom.cdf(below[1], 400, level) - stats.binom.cdf(below[0], 400, level)
    assert 0.93 < covered < 0.985


def test_an_interval_of_a_median_covers_it() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        found = make("median", rng.exponential(size=30).tolist()).compute_interval()
        assert found is not None
        hits += found.low <= math.log(2) <= found.high
    assert 0.93 <= hits / 400 <= 0.99


def test_few_lines_have_no_bound_of_a_high_quantile() -> None:
    assert make("p99", TIMES).compute_interval() is None
    assert make("p99", TIMES).value == pytest.approx(np.quantile(TIMES, 0.99))


def test_clusters_are_what_is_sampled() -> None:
    """The twin: lines of five texts as so many texts would have a narrower interval."""
    scores = [float(at // 4 + 0.1 * (at % 4)) for at in range(40)]
    clusters = [f"text-{at // 4}" for at in range(40)]
    for aggregate in ("mean", "median"):
        alone, together = make(aggregate, scores), make(aggregate, scores, clusters)
        assert alone.value == together.value
        narrow, wide = alone.compute_interval(), together.compute_interval()
        assert narrow is not None and wide is not None
        assert wide.high - wide.low > 1.2 * (narrow.high - narrow.low)
    means = [float(np.mean(scores[at : at + 4])) for at in range(0, 40, 4)]
    wide = make("mean", scores, clusters).compute_interval()
    assert wide is not None and wide.bounds == pytest.approx(DescrStatsW(means).tconfint_mean())


def test_merged_lines_are_those_of_both() -> None:
    first, second = make("mean", TIMES[:4], list("aabb")), make("mean", TIMES[4:], list("bbcccc"))
    whole = make("mean", TIMES, list("aabbbbcccc"))
    first.merge(second)
    assert first.compute_interval() == whole.compute_interval() and first.value == whole.value


def test_a_formula_is_of_the_sums_of_all_lines() -> None:
    """Micro-F1, whose interval is that of scikit-learn's bootstrap within its noise."""
    rng = np.random.default_rng(2)
    rows = rng.poisson((3, 1, 2), size=(200, 3))
    lines = MeasuredLines(ScoreMeasure("F1", "higher", "2 * tp / (2 * tp + fp + fn)"))
    for row in rows:
        lines.add(0.0, dict(zip(("tp", "fp", "fn"), map(float, row), strict=True)))

    def compute(sums: np.ndarray) -> float:
        return float(2 * sums[0] / (2 * sums[0] + sums[1] + sums[2]))

    assert lines.value == pytest.approx(compute(rows.sum(axis=0)))
    resampled = [compute(rows[rng.integers(200, size=200)].sum(axis=0)) for _ in range(2000)]
    assert lines.compute_standard_error() == pytest.approx(np.std(resampled), rel=0.1)


def test_lines_that_are_all_equal_have_no_interval() -> None:
    """One without a width would claim too much."""
    assert make("mean", [2.0] * 20).compute_interval() is None
    assert make("mean", [1000.3] * 3).compute_interval() is None  # whose mean is rounded
    assert make("mean", [1000.3] * 3).compute_standard_error() == 0
    assert make("median", [5.0] * 20).compute_interval() is None
    assert make("median", [5.0] * 19 + [6.0]).compute_interval() is not None
    assert make("mean", [2.0] * 19 + [2.1]).compute_interval() is not None


def test_what_is_undefined_is_none() -> None:
    lines = MeasuredLines(ScoreMeasure("", "higher", "a / b"))
    assert lines.value is None and lines.compute_interval() is None
    lines.add(0.0, {"a": 1.0, "b": 0.0})
    assert lines.value is None and lines.measure.format(lines.value) == "undefined"
    lines.add(0.0, {"a": 1.0, "b": 2.0})
    assert lines.value == 1 and lines.compute_interval() is None  # without the second line it is undefined


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (6.8171, (6.61, 7.0), "6.817 s [6.610, 7.000]"),
        (27.309, None, "27.31 s"),
        (412.04, None, "412.0 s"),
        (-98765.4, (-99000.0, -98000.0), "-98,765 s [-99,000, -98,000]"),
        (0.0004567, None, "0.000457 s"),
        (0.0, None, "0.000 s"),
    ],
)
def test_numbers_have_four_digits(value: float, interval: tuple[float, float] | None, text: str) -> None:
    assert ScoreMeasure("s").format(value, interval) == text


def test_shares_are_in_percent_and_differences_in_points() -> None:
    assert SHARE.format(0.725, (0.651, 0.789)) == "72.5 % [65.1, 78.9]"
    assert SHARE.format_number(-0.051, 0.5, "+") == "-5.1" and SHARE.points == "points"
    assert ScoreMeasure().format(3.0) == "3.000"


@pytest.mark.parametrize(
    ("measure", "sums", "says"),
    [
        (ScoreMeasure("x" * 21), {}, "as `unit`, where at most 20 letters or signs"),
        (ScoreMeasure("a\nb"), {}, "as `unit`"),
        (ScoreMeasure("share"), {}, "and not `share`"),
        (ScoreMeasure("s", "less"), {}, "'less' as `better`, where `lower` or `higher` was expected"),
        (ScoreMeasure("s", "lower", "bleu"), {}, "'bleu' as `aggregate`, which a scorer cannot use"),
        (ScoreMeasure("s", "lower", "average"), {}, "no `sums` of average, which its `aggregate` has"),
        (ScoreMeasure("s", "lower", "a b"), {}, "'a b' as `aggregate`, which is no formula"),
        (ScoreMeasure("s", "lower", "a / b"), {"a": 1}, "no `sums` of b"),
        (ScoreMeasure("s", "lower", "median"), {"a": 1}, "`sums`, of which the aggregate median uses none"),
    ],
)
def test_mistakes_of_scorers_are_named(measure: ScoreMeasure, sums: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        measure.check(sums)
