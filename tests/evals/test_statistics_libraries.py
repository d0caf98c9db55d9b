"""Each figure of a report against SciPy or statsmodels: intervals, differences, adjusted p values, bootstrap,
pass@k and quantiles. Power, Holm, Bradley-Terry and trends are in the tests of their modules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW, ttost_paired

from mlxrun.evals.statistics import adjust_p_values, compare_scores, compute_equivalence
from mlxrun.evals.suites.seed_pool import SeedPool
from mlxrun.jobs.scoring.intervals import ScoreMean
from mlxrun.jobs.scoring.measure import MeasuredLines, ScoreMeasure
from mlxrun.jobs.scoring.verdict import Verdict, compute_metric

RNG = np.random.default_rng(28)
# 60 clusters of 1 to 8 lines, whose chances differ.
CLUSTERS = np.repeat(np.arange(60), RNG.integers(1, 9, size=60))
CHANCES = RNG.beta(2, 2, size=60)[CLUSTERS]
FIRST, SECOND = (RNG.random((2, len(CLUSTERS))) < CHANCES).astype(float)


def fit_mean(values: Any, clusters: Any) -> Any:
    """The mean as a regression on a constant, with errors clustered by statsmodels."""
    model = sm.OLS(values, np.ones(len(values)))
    return model.fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)


def add_scores(clusters: Any = None) -> ScoreMean:
    found = ScoreMean()
    for at, score in enumerate(FIRST):
        found.add(score, None if clusters is None else int(clusters[at]))
    return found


def test_a_share() -> None:
    wanted = proportion_confint(FIRST.sum(), len(FIRST), method="wilson")
    found = add_scores().compute_interval()
    assert found is not None and found.bounds == pytest.approx(wanted)


def test_clustered_lines() -> None:
    wanted, found = fit_mean(FIRST, CLUSTERS), add_scores(CLUSTERS)
    interval = found.compute_interval()
    assert found.compute_standard_error() == pytest.approx(wanted.bse[0])
    assert interval is not None and interval.method == "clustered"
    assert interval.bounds == pytest.approx(wanted.conf_int()[0])


def test_seeds_of_one_question() -> None:
    """Wilson's interval of as many trials as give the clustered error, at the level of Student's t."""
    wanted, mean = fit_mean(FIRST, CLUSTERS), FIRST.mean()
    trials = mean * (1 - mean) / wanted.bse[0] ** 2
    alpha = 2 * stats.norm.sf(stats.t.ppf(0.975, 59))
    bounds = proportion_confint(mean * trials, trials, alpha, method="wilson")
    found = add_scores(CLUSTERS).compute_pooled_interval()
    assert found is not None and found.bounds == pytest.approx(bounds)


def test_the_variance_between_seeds() -> None:
    shares = [0.5, 0.625, 0.4, 0.7]
    pool = SeedPool(means=shares)
    pool.group.add({"score": 1, "match": "exact", "cluster": "q"}, failed=False, is_cut_answer=False)
    assert pool.describe()["seed_deviation"] == pytest.approx(DescrStatsW(shares, ddof=1).std)


def test_a_difference_of_clusters() -> None:
    wanted = fit_mean(SECOND - FIRST, CLUSTERS)
    found = compare_scores(FIRST, SECOND, list(CLUSTERS), resamples=2000)
    assert found.error == pytest.approx(wanted.bse[0])
    assert found.t_p == pytest.approx(wanted.pvalues[0])
    assert found.t_interval == pytest.approx(wanted.conf_int()[0])


def test_a_difference_by_bootstrap() -> None:
    """Scipy's percentile interval, at the level that is expanded for the number of lines."""
    found = compare_scores(FIRST, SECOND)
    count = len(FIRST)
    tail = stats.norm.cdf(math.sqrt(count / (count - 1)) * stats.t.ppf(0.025, count - 1))
    wanted = stats.bootstrap(
        (SECOND - FIRST,),
        np.mean,
        confidence_level=1 - 2 * tail,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.interval == pytest.approx(wanted, abs=0.006)


def test_equivalence() -> None:
    first, second = RNG.random((2, 300))
    wanted = ttost_paired(second, first, -0.06, 0.06)
    found = compute_equivalence(first, second, 0.06)
    assert found.p == pytest.approx(wanted[0])
    assert found.interval == pytest.approx(DescrStatsW(second - first).tconfint_mean(0.1))


@pytest.mark.parametrize("values", [[0.01, 0.04, 0.03, 0.005, 0.6], [0.5, 0.9], [0.04, 0.04], [1.0]])
def test_p_values_of_many_groups(values: list[float]) -> None:
    assert adjust_p_values(values) == pytest.approx(multipletests(values, method="fdr_bh")[1])


@pytest.mark.parametrize("passed", [0, 1, 4, 9, 10])
@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_pass_at_k(passed: int, k: int) -> None:
    """The chance that k choices without replacement have one that passes, or only such."""
    verdicts = [Verdict(float(at < passed)) for at in range(10)]
    sample = stats.hypergeom(10, passed, k)
    assert compute_metric(f"pass@{k}", verdicts, True) == pytest.approx(sample.sf(0))
    assert compute_metric(f"pass^{k}", verdicts, True) == pytest.approx(sample.pmf(k))
    wins = sample.sf(k // 2) + (sample.pmf(k / 2) / 2 if k % 2 == 0 else 0)  # a tie is half a win
    assert compute_metric(f"maj@{k}", verdicts, True) == pytest.approx(wins)


@pytest.mark.parametrize("level", [50, 90])
def test_quantiles(level: int) -> None:
    values = np.round(RNG.gamma(2, size=200), 6)
    lines = MeasuredLines(ScoreMeasure("s", "lower", "median" if level == 50 else f"p{level}"))
    for value in values:
        lines.add(float(value), {})
    test = stats.quantile_test(values, q=lines.value, p=level / 100)
    interval, wanted = lines.compute_interval(), test.confidence_interval(0.95)
    assert interval is not None and interval.bounds == pytest.approx(tuple(wanted))
