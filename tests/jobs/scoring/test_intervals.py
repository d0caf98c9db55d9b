"""Confidence intervals: against scipy, against their definitions, and by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, stdev

import pytest
from scipy import stats

from mlxrun.jobs.scoring.intervals import ScoreMean


def count(scores: Sequence[float], clusters: Sequence[str | None] | None = None) -> ScoreMean:
    found = ScoreMean()
    for score, cluster in zip(scores, clusters or [None] * len(scores), strict=True):
        found.add(score, cluster)
    return found


@pytest.mark.parametrize(("right", "lines"), [(0, 1), (1, 1), (0, 10), (29, 40), (145, 200), (10, 10)])
def test_one_proportion_has_wilsons_interval(right: int, lines: int) -> None:
    found = count([1] * right + [0] * (lines - right)).compute_interval()
    wanted = stats.binomtest(right, lines).proportion_ci(method="wilson")
    assert found is not None and found.method == "wilson"
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_the_text_of_an_interval() -> None:
    found = count([1] * 116 + [0] * 44).compute_interval()
    assert found is not None and [round(100 * each, 1) for each in found.bounds] == [65.1, 78.8]


def test_fractions_have_students() -> None:
    scores = [0.5, 0.25, 1, 0, 0.75, 0.5, 0.9]
    found = count(scores).compute_interval()
    error = stdev(scores) / math.sqrt(len(scores))
    wanted = stats.t.interval(0.95, len(scores) - 1, fmean(scores), error)
    assert found is not None and found.method == "t"
    assert (found.low, found.high) == pytest.approx(wanted)
    assert count(scores).compute_standard_error() == pytest.approx(error)


def test_clusters_follow_the_formula() -> None:
    """Miller 2024, section 2.2: the squares of all scores in a cluster with one another."""
    scores = [1, 1, 0, 1, 0, 0, 1, 0.5]
    clusters = ["a", "a", "a", "b", "b", "c", None, None]
    found = count(scores, clusters).compute_interval()
    mean, names = fmean(scores), [name or f"alone {at}" for at, name in enumerate(clusters)]
    squares = sum(
        (scores[i] - mean) * (scores[j] - mean) for i in range(8) for j in range(8) if names[i] == names[j]
    )
    groups = len(set(names))
    error = math.sqrt(squares * groups / (groups - 1)) / 8
    wanted = stats.t.interval(0.95, groups - 1, mean, error)
    assert found is not None and found.method == "clustered"
    assert (found.low, found.high) == pytest.approx((max(0, wanted[0]), min(1, wanted[1])))
    assert count(scores, clusters).compute_standard_error() == pytest.approx(error)


def test_clusters_of_one_line_are_none() -> None:
    scores = [1.0, 0.0, 1.0]
    assert count(scores, ["a", "b", "c"]).compute_interval() == count(scores).compute_interval()


def test_too_few_scores_have_no_standard_error() -> None:
    assert [count(scores).compute_standard_error() for scores in ([], [1])] == [None, None]
    assert count([1, 0], ["a", "a"]).compute_standard_error() is None


def test_merging_is_counting_together() -> None:
    scores, clusters = [1, 0, 0.5, 1, 0, 1], ["a", "b", None, "a", None, "b"]
    first, second = count(scores[:3], clusters[:3]), count(scores[3:], clusters[3:])
    first.merge(second)
    both = count(scores, clusters)
    assert first.value == both.value and first.compute_interval() == both.compute_interval()


def test_scores_that_do_not_vary_give_no_point() -> None:
    """All right in few clusters says less than all right in as many lines."""
    for found in (
        count([1] * 12, list("aaaabbbbcccc")),
        count([0.5] * 4),
        count([0.5, 1] * 3, list("aabbcc")),
    ):
        interval = found.compute_interval()
        assert interval is not None and interval.method == "wilson" and interval.high - interval.low > 0.3
    three, twelve = (
        count([1] * 12, list("aaaabbbbcccc")).compute_interval(),
        count([1] * 12).compute_interval(),
    )
    assert three is not None and twelve is not None and three.low < twelve.low
    assert three.low == pytest.approx(stats.binomtest(3, 3).proportion_ci(method="wilson").low)


def test_too_few_scores() -> None:
    assert ScoreMean().compute_interval() is None
    assert count([0.5]).compute_interval() is None
    assert count([0.5, 1], ["a", "a"]).compute_interval() is None


def test_they_cover_the_truth() -> None:
    """With 40 clusters of 5 lines whose chances vary, the clustered interval contains the truth in 95 % of
    simulations; the twin that ignores the clusters in far fewer."""
    rng = random.Random(1)
    hits, plain = 0, 0
    for _ in range(400):
        scores, clusters = list[float](), list[str | None]()
        for cluster in range(40):
            chance = rng.random()
            for _ in range(5):
                scores.append(float(rng.random() < chance))
                clusters.append(str(cluster))
        for names in (clusters, None):
            found = count(scores, names).compute_interval()
            assert found is not None
            inside = found.low <= 0.5 <= found.high
            hits += inside and names is not None
            plain += inside and names is None
    assert 0.92 <= hits / 400 <= 0.98
    assert plain / 400 < 0.88


def test_the_pooled_interval_is_wilsons_with_the_trials_of_the_clustered_error() -> None:
    """By its definition, from the error of the questions' means."""
    scores = [[1, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1], [1, 1, 1]]
    found = ScoreMean()
    for question, own in enumerate(scores):
        for score in own:
            found.add(score, question)
    means = [fmean(own) for own in scores]
    error, mean, t = stdev(means) / math.sqrt(5), fmean(means), stats.t.ppf(0.975, 4)
    trials = mean * (1 - mean) / error**2
    assert trials < 15
    centre = (mean * trials + t * t / 2) / (trials + t * t)
    reach = t * math.sqrt(mean * (1 - mean) * trials + t * t / 4) / (trials + t * t)
    interval = found.compute_pooled_interval()
    assert interval is not None and interval.method == "pooled"
    assert (interval.low, interval.high) == pytest.approx((centre - reach, centre + reach))


def test_repeats_add_no_more_than_they_tell() -> None:
    """Questions that are always answered alike count once; answers that vary only by chance count all."""
    alike, chance = ScoreMean(), ScoreMean()
    for question in range(20):
        for repeat in range(10):
            alike.add(question % 2, question)
            chance.add((question + repeat) % 2, question)
    once = count([0, 1] * 10)
    found = [each.compute_pooled_interval() for each in (alike, chance)]
    widths = [0.0 if each is None else each.high - each.low for each in found]
    single = once.compute_interval()
    assert single is not None and widths[0] == pytest.approx(single.high - single.low, abs=0.05)
    # Each question's mean is the same: then there is no spread to measure, and questions count once.
    assert widths[1] > 0.3
    assert count([1]).compute_pooled_interval() is None
