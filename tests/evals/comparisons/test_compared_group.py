"""Differences of figures with a unit, against SciPy and sacrebleu."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import sacrebleu
from scipy import stats

from mlxrun.evals.comparisons.compared_group import (
    compare_group,
    compare_measured,
    compute_measured_equivalence,
)
from mlxrun.evals.comparisons.pairing import PairedLine
from mlxrun.jobs.scoring.measure import MeasuredLines, ScoreMeasure
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE
from mlxrun.jobs.scoring.translation import score_translation

RNG = np.random.default_rng(3)
BEFORE = RNG.lognormal(size=80)
AFTER = BEFORE * RNG.uniform(0.8, 1.1, size=80)


def make(aggregate: str, scores: Sequence[float], clusters: Sequence[object] | None = None) -> MeasuredLines:
    found = MeasuredLines(ScoreMeasure("s", "lower", aggregate))
    for at, score in enumerate(scores):
        found.add(float(score), {}, None if clusters is None else clusters[at])  # type: ignore[arg-type]
    return found


def test_means_are_compared_by_a_paired_t_test() -> None:
    found = compare_measured(make("mean", BEFORE), make("mean", AFTER))
    wanted = stats.ttest_rel(AFTER, BEFORE)
    assert found.difference == pytest.approx(np.mean(AFTER - BEFORE)) and found.mcnemar is None
    assert found.p == pytest.approx(wanted.pvalue)
    assert found.interval == pytest.approx(wanted.confidence_interval(0.95)) == found.t_interval
    assert found.error == pytest.approx(stats.sem(AFTER - BEFORE))


def test_clusters_are_compared_together() -> None:
    clusters = [at // 4 for at in range(80)]
    found = compare_measured(make("mean", BEFORE, clusters), make("mean", AFTER, clusters))
    wanted = stats.ttest_1samp((AFTER - BEFORE).reshape(20, 4).mean(axis=1), 0)
    assert found.units == 20 and found.p == pytest.approx(wanted.pvalue)
    assert found.interval == pytest.approx(wanted.confidence_interval(0.95))


def test_bits_per_byte_are_compared_as_a_ratio() -> None:
    """The mean difference of texts of several lengths would be another one."""
    rng = np.random.default_rng(12)
    sizes = rng.integers(10, 500, size=60)
    sides = [sizes * rng.uniform(low, low + 0.2, size=60) for low in (1.0, 1.02)]
    lines = []
    for bits in sides:
        lines.append(MeasuredLines(BITS_PER_BYTE))
        for each, size in zip(bits, sizes, strict=True):
            lines[-1].add(each / size, {"bits": each, "bytes": float(size)})
    found = compare_measured(*lines)
    assert found.difference == pytest.approx((sides[1].sum() - sides[0].sum()) / sizes.sum())
    residuals = (sides[1] - sides[0]) - found.difference * sizes  # linearised, as for survey ratios
    wanted = math.sqrt((residuals @ residuals) * 60 / 59) / sizes.sum()
    assert found.error == pytest.approx(wanted, rel=0.03)


def test_bleu_varies_as_in_a_paired_bootstrap_of_sacrebleu() -> None:
    rng = np.random.default_rng(13)
    words = list("abcdefghijklmno")
    references = [" ".join(rng.choice(words, size=12)) for _ in range(60)]
    sides = []
    for noise in (3, 5):
        answers = []
        for text in references:
            parts = text.split()
            for at in rng.integers(12, size=noise):
                parts[at] = str(rng.choice(words))
            answers.append(" ".join(parts))
        sides.append(answers)
    lines = []
    for answers in sides:
        lines.append(MeasuredLines(ScoreMeasure("BLEU", "higher", "bleu")))
        for answer, text in zip(answers, references, strict=True):
            lines[-1].add(*score_translation("bleu", answer, [text], {}))
    found = compare_measured(*lines)
    scores = [sacrebleu.corpus_bleu(answers, [references]).score for answers in sides]
    assert (found.first, found.second) == pytest.approx(scores)
    resampled = []
    for _ in range(300):
        chosen = rng.integers(60, size=60)
        both = [
            sacrebleu.corpus_bleu([answers[at] for at in chosen], [[references[at] for at in chosen]]).score
            for answers in sides
        ]
        resampled.append(both[1] - both[0])
    assert found.error == pytest.approx(np.std(resampled), rel=0.25)


def test_quantiles_are_compared_by_a_bootstrap() -> None:
    found = compare_measured(make("median", BEFORE), make("median", AFTER), seed=1)
    assert found.difference == pytest.approx(np.median(AFTER) - np.median(BEFORE)) and found.error is None
    data = (AFTER, BEFORE)
    wanted = stats.bootstrap(
        data, lambda a, b, axis: np.median(a, axis=axis) - np.median(b, axis=axis), paired=True,
        n_resamples=4000, method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    width = wanted.high - wanted.low
    assert found.interval == pytest.approx((wanted.low, wanted.high), abs=0.15 * width)
    same = compare_measured(make("p90", BEFORE), make("p90", BEFORE))
    assert (same.difference, same.p, same.interval) == (0, 1, (0, 0))


def test_equal_medians_are_called_different_as_rarely_as_promised() -> None:
    rng, alarms = np.random.default_rng(5), 0
    for seed in range(30):
        before = rng.normal(size=40)
        found = compare_measured(
            make("median", before), make("median", before + rng.normal(size=40)), seed=seed
        )
        alarms += found.p < 0.05
    assert alarms <= 4  # 1.5 are expected; more than 4 come by chance once in 65 times


def test_one_text_shows_no_difference() -> None:
    """It has a difference, but nothing of how it varies."""
    found = compare_measured(make("mean", [2.0]), make("mean", [1.0]))
    assert (found.difference, found.p, found.interval) == (-1, 1, (-math.inf, math.inf))
    margin = compute_measured_equivalence(make("mean", [2.0]), make("mean", [1.0]), 9.0)
    assert not margin.is_shown


def test_an_interval_without_bounds_is_described_as_json() -> None:
    """JSON has no infinity."""
    line = PairedLine("a", "all", None, 2.0, 1.0, epochs=1, measure=ScoreMeasure("s", "lower"))
    found = compare_group("total", [line], 9.0, 0).describe()
    json.dumps(found, allow_nan=False)
    assert found["interval"] == found["t_interval"] == found["equivalence"]["interval"] == [None, None]


def test_equivalence_is_in_the_unit_of_the_scores() -> None:
    rng = np.random.default_rng(17)
    after = BEFORE + rng.normal(scale=0.1, size=80)
    wide = compute_measured_equivalence(make("mean", BEFORE), make("mean", after), 0.1)
    narrow = compute_measured_equivalence(make("mean", BEFORE), make("mean", after), 0.001)
    assert wide.is_shown and not narrow.is_shown
    differences = after - BEFORE
    error, freedom = stats.sem(differences), 79
    assert wide.p == pytest.approx(stats.t.cdf((abs(differences.mean()) - 0.1) / error, freedom))
    assert compute_measured_equivalence(make("median", BEFORE), make("median", after), 0.5).is_shown


@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_equal_lines_show_what_their_number_allows(aggregate: str) -> None:
    """From 59 lines on, fewer than 5 % of all lines differ."""
    for lines, is_shown in ((58, False), (59, True)):
        equal = make(aggregate, [float(at) for at in range(lines)])
        assert compute_measured_equivalence(equal, equal, 1.0).is_shown is is_shown


@pytest.mark.parametrize("scale", [1e-13, 1, 1e13])
@pytest.mark.parametrize("aggregate", ["mean", "sum", "median"])
def test_the_same_difference_on_few_lines_is_no_proof(aggregate: str, scale: float) -> None:
    """Rounding makes no variance of it: both have the same sign in a quarter of cases."""
    before = np.array([12345.678, 23456.789, 34567.891])
    found = compare_measured(make(aggregate, before * scale), make(aggregate, (before + 0.1) * scale))
    assert found.p == 0.25
    rounded = compare_measured(make(aggregate, [0.3, 0.3]), make(aggregate, [0.1 + 0.2, 0.1 + 0.2]))
    assert rounded.p == 1


def test_tiny_numbers_are_compared_as_large_ones() -> None:
    found = compare_measured(make("mean", BEFORE * 1e-13), make("mean", AFTER * 1e-13))
    assert found.p == pytest.approx(compare_measured(make("mean", BEFORE), make("mean", AFTER)).p)


@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_the_same_difference_is_equivalent_once_there_are_enough_lines(aggregate: str) -> None:
    """It proves as little as equal lines; one beyond the margin is never equivalent."""
    for lines, is_shown in ((2, False), (58, False), (59, True)):
        before, after = (make(aggregate, [at + more for at in range(lines)]) for more in (0.1, 1.1))
        assert compute_measured_equivalence(before, after, 2.0).is_shown is is_shown
        assert not compute_measured_equivalence(before, after, 0.5).is_shown


def test_few_quantiles_are_not_equivalent() -> None:
    before, after = make("median", [1.0, 5.0, 9.0]), make("median", [1.1, 5.2, 9.3])
    assert compute_measured_equivalence(before, after, 2.0).p == 0.125


def test_an_undefined_figure_is_named() -> None:
    lines = MeasuredLines(ScoreMeasure("", "higher", "a / b"))
    lines.add(0.0, {"a": 1.0, "b": 0.0})
    with pytest.raises(ValueError, match="a / b is undefined"):
        compare_measured(lines, lines)
