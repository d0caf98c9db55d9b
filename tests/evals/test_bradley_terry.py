"""Bradley-Terry strengths and their intervals, against statsmodels' logistic regression."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from mlxrun.core.errors import JobError
from mlxrun.evals.bradley_terry import ELO, JudgedPair, fit_strengths, read_judged_pairs

NAMES = ["a", "b", "c", "d"]
TRUE = dict(zip(NAMES, (0.8, 0.3, -0.2, -0.9), strict=True))


def judge(questions: int, seed: int = 0) -> list[JudgedPair]:
    """Each pair of models on each question; some are ties, and a question may be one for a certain model."""
    rng, found = np.random.default_rng(seed), []
    for question in range(questions):
        liking = rng.normal(scale=0.7, size=4)
        for first in range(4):
            for second in range(first + 1, 4):
                odds = TRUE[NAMES[first]] - TRUE[NAMES[second]] + liking[first] - liking[second]
                won = rng.random() < 1 / (1 + np.exp(-odds))
                outcome = 0.5 if rng.random() < 0.1 else float(won)
                found.append(JudgedPair(NAMES[first], NAMES[second], outcome, question))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_strengths_and_clustered_errors_are_those_of_a_logistic_regression() -> None:
    pairs = judge(80)
    design = np.zeros((len(pairs), 4))
    for row, pair in enumerate(pairs):
        design[row, NAMES.index(pair.first)], design[row, NAMES.index(pair.second)] = 1, -1
    # The last strength is minus the sum of the others, so that their mean is 0.
    contrast = np.vstack([np.eye(3), -np.ones(3)])
    model = sm.GLM([pair.outcome for pair in pairs], design @ contrast, family=sm.families.Binomial())
    groups = np.array([pair.question for pair in pairs])
    peer = model.fit(cov_type="cluster", cov_kwds={"groups": groups, "use_correction": False})
    wanted = contrast @ peer.params
    errors = np.sqrt(np.diag(contrast @ peer.cov_params() @ contrast.T) * 80 / 79)
    reach = stats.t.ppf(0.975, 79)
    found = {each.name: each for each in fit_strengths(pairs)}
    for at, name in enumerate(NAMES):
        assert found[name].rating == pytest.approx(ELO * wanted[at], abs=1e-4)
        assert found[name].high - found[name].rating == pytest.approx(ELO * reach * errors[at], rel=1e-4)
    assert [each.name for each in fit_strengths(pairs)] == NAMES
    assert found["a"].wins == pytest.approx(
        np.mean(
            [
                pair.outcome if pair.first == "a" else 1 - pair.outcome
                for pair in pairs
                if "a" in (pair.first, pair.second)
            ]
        )
    )


def test_an_interval_covers_a_difference_as_often_as_promised() -> None:
    """With answers to one question taken for independent ones it would be too narrow."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        pairs = []
        for question in range(40):
            good = rng.random() < 0.5  # the same judgement three times
            pairs += [JudgedPair("a", "b", float(good), question)] * 3
        strength = fit_strengths(pairs)[0]
        covered += strength.low <= 0 <= strength.high
    assert 0.9 <= covered / 200 <= 0.99


def test_two_models_have_the_odds_of_their_wins() -> None:
    pairs = [JudgedPair("a", "b", 1.0, at) for at in range(30)] + [
        JudgedPair("b", "a", 1.0, -at) for at in range(1, 4)
    ]
    first, second = fit_strengths(pairs)
    assert first.rating - second.rating == pytest.approx(400)
    assert first.rating == pytest.approx(-second.rating)


def test_a_model_that_never_loses_has_no_finite_strength() -> None:
    pairs = [JudgedPair("a", "b", 1.0, at) for at in range(3)]
    with pytest.raises(ValueError, match="no finite strengths: between .*, one side never wins"):
        fit_strengths(pairs)
    with pytest.raises(ValueError, match="a single question"):
        fit_strengths([JudgedPair("a", "b", 0.5, 1)] * 4)


def write(folder: Path, *rows: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_file_of_pairs(tmp_path: Path) -> None:
    rows = [
        {"first": "a", "second": "b", "winner": "a", "id": "q1"},
        {"first": "b", "second": "a", "winner": "a"},
        {"first": "a", "second": "b", "winner": "tie", "id": 7},
        '{"first": "a", "second": "b", "winner": "tie", "id": "8\u2028"}',
    ]
    assert read_judged_pairs(write(tmp_path, *rows)) == [
        JudgedPair("a", "b", 1.0, ("id", "q1")),
        JudgedPair("b", "a", 0.0, ("line", 2)),
        JudgedPair("a", "b", 0.5, ("id", "7")),
        JudgedPair("a", "b", 0.5, ("id", "8\u2028")),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", r"pairs.jsonl:2: is no JSON"),
        ({"first": "a", "second": "b"}, "a pair has first, second and winner"),
        ({"first": "a", "second": "b", "winner": "a", "judge": "x"}, "a pair has first, second and winner"),
        ({"first": "a", "second": "a", "winner": "a"}, "two models"),
        ({"first": "a", "second": "b", "winner": "c"}, "winner is 'c', and must be 'a', 'b' or 'tie'"),
        ({"first": "tie", "second": "b", "winner": "b"}, "a model cannot be called 'tie'"),
        ({"first": "a", "second": "tie", "winner": "tie"}, "a model cannot be called 'tie'"),
    ],
)
def test_wrong_pairs_are_named(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(JobError, match=says):
        read_judged_pairs(write(tmp_path, "", row))
    with pytest.raises(JobError, match="has no pairs"):
        read_judged_pairs(write(tmp_path, ""))
    with pytest.raises(JobError, match="cannot be read"):
        read_judged_pairs(tmp_path / "none.jsonl")
