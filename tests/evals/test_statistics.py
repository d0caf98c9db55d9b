"""The statistics of paired scores: published figures, false alarms, coverage, and cases without variance."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar

from mlxrun.evals.statistics import adjust_p_values, compare_scores, compute_equivalence, compute_mcnemar

# Scores of two models on GPQA diamond, 198 questions x 5 epochs, a digit for each epoch. They are published
# with evalconfidence 0.1.1 (https://pypi.org/project/evalconfidence/, Apache 2.0), as are the figures.
PUBLISHED = Path(__file__).parent / "data" / "gpqa_diamond_scores.csv"


def read_published() -> tuple[list[float], list[float], list[str]]:
    """The scores of both models and the question, for each epoch of each question."""
    first, second, clusters = [], [], []
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            for one, other in zip(row["gpt-5.4-mini"], row["gpt-5-nano"], strict=True):
                first.append(float(one))
                second.append(float(other))
                clusters.append(row["item"])
    return first, second, clusters


def test_published_figures_of_198_questions_and_5_epochs() -> None:
    """+5.9 points, 95 % interval 0.4 to 11.3, p = .036."""
    first, second, clusters = read_published()
    found = compare_scores(first, second, clusters)
    assert (found.lines, found.units, found.mcnemar) == (990, 198, None)
    assert round(100 * found.difference, 1) == 5.9
    assert [round(100 * bound, 1) for bound in found.interval] == [0.4, 11.3]
    assert [round(100 * bound, 1) for bound in found.t_interval] == [0.4, 11.3]
    assert round(found.p, 3) == 0.036


def test_the_mean_of_each_question_gives_the_same_as_clusters() -> None:
    first, second, clusters = read_published()
    by_question = np.array([first, second]).reshape(2, 198, 5).mean(axis=2)
    means = compare_scores(list(by_question[0]), list(by_question[1]))
    found = compare_scores(first, second, clusters)
    assert means.t_p == pytest.approx(found.t_p) and means.t_interval == pytest.approx(found.t_interval)
    wanted = stats.ttest_rel(by_question[1], by_question[0])
    assert means.t_p == pytest.approx(wanted.pvalue)
    assert means.t_interval == pytest.approx(wanted.confidence_interval())


def test_without_clusters_epochs_would_be_taken_for_questions() -> None:
    """The mutation twin: the published interval is not that of 990 independent lines."""
    first, second, _ = read_published()
    found = compare_scores(first, second)
    assert found.units == 990 and found.interval[0] > 0.02


def count_false_alarms(questions: int, trials: int, epochs: int = 1) -> tuple[int, int]:
    """How many of `trials` comparisons of two runs of one model have a p value below 0.05, and how many have
    an interval without 0."""
    rng = np.random.default_rng(5)
    significant = excluded = 0
    for _ in range(trials):
        chances = rng.beta(2, 2, size=questions)
        first, second = rng.binomial(epochs, chances, size=(2, questions)) / epochs
        found = compare_scores(first, second, resamples=1000)
        significant += found.p < 0.05
        excluded += not found.interval[0] <= 0 <= found.interval[1]
    return significant, excluded


@pytest.mark.parametrize(("questions", "epochs"), [(200, 1), (100, 5)])
def test_false_alarms_of_1000_comparisons_are_5_percent(questions: int, epochs: int) -> None:
    significant, excluded = count_false_alarms(questions, 1000, epochs)
    assert 35 <= significant <= 65 and 35 <= excluded <= 65


@pytest.mark.sweep
@pytest.mark.parametrize("questions", [100, 200, 400, 1000, 2000])
@pytest.mark.parametrize("epochs", [1, 5])
def test_false_alarms_for_any_number_of_questions(questions: int, epochs: int) -> None:
    significant, excluded = count_false_alarms(questions, 4000, epochs)
    assert 140 <= significant <= 260 and 140 <= excluded <= 260


def test_mcnemar_is_the_binomial_test_of_the_flips() -> None:
    first = [1] * 50 + [0] * 10 + [1] * 3 + [0] * 37
    second = [1] * 50 + [1] * 10 + [0] * 3 + [0] * 37
    found = compare_scores(first, second).mcnemar
    assert found is not None and (found.better, found.worse) == (10, 3)
    assert found.exact == pytest.approx(stats.binomtest(3, 13).pvalue)
    assert found.mid == pytest.approx(found.exact - stats.binom.pmf(3, 13, 0.5))
    assert compare_scores(first, second).p == found.mid


def compute_false_alarms(lines: int, differ: float) -> tuple[float, float]:
    """How often mid-p and the exact p are below 5 % for equal runs, in percent, by enumeration."""
    found = np.zeros(2)
    for flips in range(lines + 1):
        share = stats.binom.pmf(flips, lines, differ)
        for better in range(flips + 1 if share > 1e-9 else 0):
            scores = np.zeros(flips), np.zeros(flips)
            scores[1][:better], scores[0][better:] = 1, 1
            test = compute_mcnemar(*scores)
            found += share * stats.binom.pmf(better, flips, 0.5) * (np.array([test.mid, test.exact]) < 0.05)
    return float(100 * found[0]), float(100 * found[1])


@pytest.mark.parametrize(
    ("lines", "differ", "mid", "exact"),
    [
        (30, 0.05, 0.1, 0.0),
        (30, 0.2, 3.1, 1.3),
        (100, 0.05, 2.5, 0.9),
        (100, 0.2, 4.6, 2.9),
        (400, 0.05, 4.6, 2.9),
    ],
)
def test_false_alarms_are_those_of_the_documentation(
    lines: int, differ: float, mid: float, exact: float
) -> None:
    """In docs/evals.md; with statsmodels, whose exact test is the same."""
    assert compute_false_alarms(lines, differ) == pytest.approx((mid, exact), abs=0.06)
    test = compute_mcnemar(np.array([1.0] * 9 + [0.0] * 3), np.array([0.0] * 9 + [1.0] * 3))
    assert test.exact == pytest.approx(mcnemar([[0, 9], [3, 0]], exact=True).pvalue)


def test_fractions_and_clusters_have_no_mcnemar_test() -> None:
    assert compare_scores([0, 0.5, 1], [1, 1, 1]).mcnemar is None
    assert compare_scores([0, 0, 1], [1, 1, 1], ["a", "a", "b"]).mcnemar is None
    assert compare_scores([0, 0, 1], [1, 1, 1], ["a", "b", "c"]).mcnemar is not None


def test_the_bootstrap_is_seeded() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 50))
    found = compare_scores(first, second, seed=1)
    assert found == compare_scores(first, second, seed=1)
    assert found.interval != compare_scores(first, second, seed=2).interval
    assert found.interval == pytest.approx(found.t_interval, abs=0.01)


def test_a_bootstrap_over_clusters_of_different_sizes() -> None:
    """Its interval is that of resampling whole clusters, one after the other."""
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(60), rng.integers(1, 9, size=60))
    first = rng.integers(0, 2, size=len(clusters)).astype(float)
    second = np.where(rng.random(60)[clusters] < 0.3, 1 - first, first)
    found = compare_scores(first, second, list(clusters), resamples=20_000)
    members = [np.flatnonzero(clusters == each) for each in range(60)]
    means = []
    for _ in range(4000):
        chosen = np.concatenate([members[at] for at in rng.integers(60, size=60)])
        means.append((second[chosen] - first[chosen]).mean())
    assert found.interval == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.015)


@pytest.mark.parametrize(("lines", "bound"), [(10, 0.27), (100, 0.028), (1000, 0.0028)])
def test_equal_runs_show_what_their_number_of_lines_allows(lines: int, bound: float) -> None:
    """No difference in ten lines is no proof that there is none."""
    found = compare_scores([1.0] * lines, [1.0] * lines)
    assert found.interval == pytest.approx((-bound, bound), rel=0.02)
    assert (found.p, found.difference) == (1.0, 0.0)


def test_few_flips_do_not_narrow_the_interval() -> None:
    none = compare_scores([1.0] * 50, [1.0] * 50).interval
    one = compare_scores([1.0] * 50, [0.0] + [1.0] * 49).interval
    assert one[1] - one[0] > none[1] - none[0] and one[1] > 0


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_handful_of_lines_proves_nothing(lines: int) -> None:
    found = compare_scores([0.0] * lines, [1.0] * lines)
    assert found.difference == 1 and found.p > 0.05 and found.t_p > 0.05
    assert not compute_equivalence([1.0] * lines, [1.0] * lines, 0.05).is_shown


def test_no_lines_are_an_error() -> None:
    with pytest.raises(ValueError, match="no lines"):
        compare_scores([], [])


@pytest.mark.parametrize(
    ("lines", "margin", "is_shown"),
    [(100, 0.02, False), (149, 0.02, True), (40, 0.05, False), (60, 0.05, True)],
)
def test_equal_runs_are_equivalent_once_there_are_enough_lines(
    lines: int, margin: float, is_shown: bool
) -> None:
    """(1 - margin)^lines, the chance to see no difference, has to be below 0.05."""
    assert compute_equivalence([1.0] * lines, [1.0] * lines, margin).is_shown is is_shown


def test_equivalence_is_two_one_sided_tests() -> None:
    rng = np.random.default_rng(0)
    first = rng.random(400)
    second = first + rng.normal(0.01, 0.1, size=400)
    found = compute_equivalence(first, second, 0.03)
    below = stats.ttest_1samp(second - first, -0.03, alternative="greater").pvalue
    above = stats.ttest_1samp(second - first, 0.03, alternative="less").pvalue
    assert found.p == pytest.approx(max(below, above)) and found.is_shown
    assert -0.03 < found.interval[0] < found.interval[1] < 0.03
    assert not compute_equivalence(first, second, 0.005).is_shown


def count_equivalent(drop: float, lines: int, trials: int) -> int:
    """How often runs that differ by `drop` are called equivalent within 5 points."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(trials):
        first = (rng.random(lines) < 0.9).astype(float)
        second = np.where(rng.random(lines) < drop / 0.9, 0.0, first)
        found += compute_equivalence(first, second, 0.05).is_shown
    return found


def test_runs_at_the_margin_are_called_equivalent_in_about_5_percent() -> None:
    assert count_equivalent(0.05, 600, 1000) <= 75  # losses only, so that the differences are skewed
    assert count_equivalent(0.01, 600, 200) >= 190


def test_p_values_are_adjusted_for_their_number() -> None:
    def rank(values: Sequence[float]) -> list[float]:
        return [round(p, 6) for p in adjust_p_values(values)]

    assert rank([0.04]) == [0.04] and rank([]) == []
    assert rank([0.01, 0.04, 0.5]) == [0.03, 0.06, 0.5]
