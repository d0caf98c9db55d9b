"""Bradley-Terry strengths of models from pairs of their answers, of which one was judged to be the better.

The odds that a model wins against another are e to the power of the difference of their strengths. (Bradley
and Terry 1952, "Rank Analysis of Incomplete Block Designs".) A tie is half a win of each. Intervals are by
the sandwich estimator, clustered by question, as the answers to one question are compared several times.
Strengths are shown as Elo ratings: 400 points are odds of 10 to 1, and the mean is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

from mlxrun.core.errors import JobError
from mlxrun.jobs.scoring.intervals import find_quantile

Array = np.ndarray[Any, np.dtype[Any]]
ELO = 400 / math.log(10)  # points of a strength of 1
_TIE = "tie"  # in place of a winner
_KEYS = ("first", "second", "winner", "id")


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """Answers of two models to one question. `outcome`: 1 if the first is better, 0 if the second is, 0.5 for
    a tie."""

    first: str
    second: str
    outcome: float
    question: Hashable


@dataclass(frozen=True, slots=True)
class Strength:
    """The Elo rating of a model with its 95 % interval, and the share of its pairs that it won."""

    name: str
    rating: float
    low: float
    high: float
    wins: float
    pairs: int


def read_judged_pairs(path: Path) -> list[JudgedPair]:
    """Read a JSONL file of pairs: `first`, `second` and `winner` (one of their names, or `tie`), and the `id`
    of the question. JobError with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    found = [_parse_pair(path, number, text) for number, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise JobError(f"{path}: has no pairs")
    return found


def _parse_pair(path: Path, number: int, text: str) -> JudgedPair:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path}:{number}: is no JSON: {error}") from error
    if (
        not isinstance(row, dict)
        or row.keys() - set(_KEYS)
        or not {"first", "second", "winner"} <= row.keys()
    ):
        raise JobError(f"{path}:{number}: a pair has first, second and winner, and may have an id")
    first, second, winner = row["first"], row["second"], row["winner"]
    if not all(isinstance(each, str) and each for each in (first, second, winner)) or first == second:
        raise JobError(f"{path}:{number}: first, second and winner must be texts, and two models")
    if _TIE in (first, second):
        raise JobError(f"{path}:{number}: a model cannot be called {_TIE!r}, which as a winner is none")
    if winner not in (first, second, _TIE):
        wanted = f"{first!r}, {second!r} or {_TIE!r}"
        raise JobError(f"{path}:{number}: winner is {winner!r}, and must be {wanted}")
    question = ("line", number) if row.get("id") is None else ("id", str(row["id"]))
    return JudgedPair(first, second, 0.5 if winner == _TIE else float(winner == first), question)


def fit_strengths(pairs: Sequence[JudgedPair]) -> list[Strength]:
    """Fit the strengths, and list the strongest first. ValueError if the pairs give none: where models that
    are compared never lose to the others, their strength has no bound."""
    names = sorted({name for pair in pairs for name in (pair.first, pair.second)})
    at = {name: number for number, name in enumerate(names)}
    first, second = (np.array([at[getattr(pair, side)] for pair in pairs]) for side in ("first", "second"))
    outcomes = np.array([pair.outcome for pair in pairs])
    wins, games = _count_wins(first, second, outcomes, len(names))
    _check_connected(wins, names)
    strengths = _maximize(wins, games)
    errors, units = _compute_errors(strengths, first, second, outcomes, [pair.question for pair in pairs])
    if units < 2:
        raise ValueError("no strengths: a single question, or cluster, shows nothing of how they vary")
    reach = find_quantile(units - 1) * errors
    found = [
        Strength(
            name,
            float(ELO * strengths[each]),
            float(ELO * (strengths[each] - reach[each])),
            float(ELO * (strengths[each] + reach[each])),
            float(wins[each].sum() / games[each].sum()),
            int(games[each].sum()),
        )
        for name, each in at.items()
    ]
    return sorted(found, key=lambda each: -each.rating)


def _count_wins(first: Array, second: Array, outcomes: Array, count: int) -> tuple[Array, Array]:
    """How often each model won against each other one, and how often they were compared."""
    wins = np.zeros((count, count))
    np.add.at(wins, (first, second), outcomes)
    np.add.at(wins, (second, first), 1 - outcomes)
    return wins, wins + wins.T


def _check_connected(wins: Array, names: Sequence[str]) -> None:
    count, parts = connected_components(wins > 0, directed=True, connection="strong")
    if count > 1:
        groups = [
            [name for name, part in zip(names, parts, strict=True) if part == each] for each in range(count)
        ]
        texts = " / ".join(", ".join(group) for group in groups)
        raise ValueError(
            f"no finite strengths: between {texts}, one side never wins, or they are not compared"
        )


def _maximize(wins: Array, games: Array) -> Array:
    """The strengths of the greatest likelihood, by Newton's method; their mean is 0."""
    strengths = np.zeros(len(wins))
    for _ in range(200):
        expected, hessian = _expect(strengths, games)
        step = np.linalg.pinv(hessian) @ (wins.sum(axis=1) - expected)
        strengths = strengths + step / max(1.0, abs(step).max())
        if abs(step).max() < 1e-12:
            break
    found: Array = strengths - strengths.mean()
    return found


def _expect(strengths: Array, games: Array) -> tuple[Array, Array]:
    """The expected wins of each model, and the matrix of information."""
    chances = 1 / (1 + np.exp(strengths[None, :] - strengths[:, None]))
    weights = games * chances * (1 - chances)
    return (games * chances).sum(axis=1), np.diag(weights.sum(axis=1)) - weights


def _compute_errors(
    strengths: Array, first: Array, second: Array, outcomes: Array, questions: Sequence[Hashable]
) -> tuple[Array, int]:
    """The standard error of each strength, clustered by question, and the number of questions."""
    numbers: dict[Hashable, int] = {}
    rows = np.array([numbers.setdefault(each, len(numbers)) for each in questions])
    units, count = len(numbers), len(strengths)
    residuals = outcomes - 1 / (1 + np.exp(strengths[second] - strengths[first]))
    scores = np.zeros((units, count))
    np.add.at(scores, (rows, first), residuals)
    np.add.at(scores, (rows, second), -residuals)
    games = np.zeros((count, count))
    np.add.at(games, (first, second), 1)
    bread = np.linalg.pinv(_expect(strengths, games + games.T)[1])
    variance = bread @ scores.T @ scores @ bread * (units / max(1, units - 1))
    return np.sqrt(np.maximum(0, np.diag(variance))), units
