"""pass@k, pass^k and the majority of several choices."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from mlxrun.jobs.scoring.verdict import Verdict, check_metric, compute_metric, list_default_metrics


@pytest.mark.parametrize("passed", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(passed: int, k: int) -> None:
    """By definition: the share of the subsets of k choices in which one, or all, pass."""
    scores = [1] * passed + [0] * (5 - passed)
    verdicts = [Verdict(score) for score in scores]
    subsets = list(combinations(scores, k))
    assert compute_metric(f"pass@{k}", verdicts, True) == pytest.approx(fmean(map(any, subsets)))
    assert compute_metric(f"pass^{k}", verdicts, True) == pytest.approx(fmean(map(all, subsets)))


def test_fractions() -> None:
    """Only a score of 1 passes; the mean counts all."""
    verdicts = [Verdict(0.5), Verdict(1), Verdict(0.9)]
    assert compute_metric("pass@1", verdicts, True) == pytest.approx(1 / 3)
    assert compute_metric("mean", verdicts, True) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ([("a", 1), ("a", 1), ("b", 0)], 1),
        ([("a", 1), ("b", 0), ("b", 0)], 0),
        ([("a", 1), ("b", 0), ("c", 0), (None, 0), (None, 0)], 1 / 3),  # a tie of three; two do not vote
        ([("a", 1), ("a", 1), ("b", 0), ("b", 0)], 0.5),
        ([({"x": 1, "y": 2}, 1), ({"y": 2, "x": 1}, 1), (3, 0)], 1),
        ([(42, 1), (42.0, 1), (41, 0)], 1),  # equal as JSON, in which 1 is 1.0 but not true
        ([({"x": [1]}, 1), ({"x": [1.0]}, 1), ({"x": [True]}, 0)], 1),
        ([(1, 1), (True, 0), (True, 0)], 0),
        ([(None, 0), (None, 0)], 0),
    ],
)
def test_majority_of_answers(answers: list[tuple[object, int]], score: float) -> None:
    verdicts = [Verdict(points, extracted) for extracted, points in answers]
    assert compute_metric("majority", verdicts, votes_by_score=False) == pytest.approx(score)


def test_majority_by_score() -> None:
    """Where a wrong answer has nothing that names it, right and wrong ones vote."""
    verdicts = [Verdict(1, "x"), Verdict(0), Verdict(0)]
    assert compute_metric("majority", verdicts, votes_by_score=True) == 0
    assert compute_metric("majority", verdicts, votes_by_score=False) == 1  # the twin


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "answers",
    [
        [("a", 1), ("a", 1), ("a", 1), ("b", 0), ("b", 0), (None, 0)],
        [("a", 1), ("b", 0), ("b", 0), ("c", 0.5), (None, 0), (None, 0)],
        [("a", 1), ("a", 1), ("b", 0), ("b", 0), ("c", 0), ("c", 0)],
        [(None, 0)] * 6,
    ],
)
def test_maj_at_k_is_the_mean_over_all_subsets(answers: list[tuple[object, float]], k: int) -> None:
    verdicts = [Verdict(points, extracted) for extracted, points in answers]
    subsets = [list(each) for each in combinations(verdicts, k)]
    for by_score in (False, True):
        wanted = fmean(compute_metric("majority", each, by_score) for each in subsets)
        assert compute_metric(f"maj@{k}", verdicts, by_score) == pytest.approx(wanted)


def test_maj_at_k_of_many_choices() -> None:
    """Of 60 choices with 25 right ones, and the others all different, more votes are right more often."""
    verdicts = [Verdict(1, "a")] * 25 + [Verdict(0, at) for at in range(35)]
    found = [compute_metric(f"maj@{k}", verdicts, votes_by_score=False) for k in (1, 3, 9, 20, 60)]
    assert found == sorted(found) and found[0] == pytest.approx(25 / 60) and found[-1] == 1
    assert found[2] > 0.9 > found[1]


def test_names() -> None:
    assert [check_metric(name) for name in ("mean", "majority", "pass@1", "pass^12", "maj@8")] == [
        *(1, 1, 1, 12, 8)
    ]
    for name in ("pass@0", "maj^2", "maj@", "pass@", "pass", "pass@1.5", 3, None):
        with pytest.raises(ValueError, match="is not one of"):
            check_metric(name)
    assert list_default_metrics(1) == ()
    assert list_default_metrics(4) == ("mean", "pass@4", "pass^4", "majority")
