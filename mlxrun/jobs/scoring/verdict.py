"""The verdict on one answer, the protocol of scorers, and the metrics of a line with several choices.

A choice passes if it scores 1. With n choices of which c pass:

    pass@k = 1 - C(n-c, k) / C(n, k)    at least one of k passes; the unbiased estimator of Chen et al. 2021,
                                        "Evaluating Large Language Models Trained on Code", section 2.1
    pass^k = C(c, k) / C(n, k)          all of k pass; Yao et al. 2024, "tau-bench"
    majority                            the score of the answer that most choices give; Wang et al. 2022,
                                        "Self-Consistency Improves Chain of Thought Reasoning"
    maj@k                               the same of k of them, the mean over all ways to take k

Where several answers have most votes, the majority's score is the mean of theirs. This is what choosing one
of them at random gives on average.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any, Protocol

from mlxrun.jobs.scoring.measure import ScoreMeasure, read_measure


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of one answer, from 0 to 1, or any number with a `measure`. `extracted`: what was compared in
    it, None for nothing; `note`: why it could not be scored; `scores`: further scores by name; `comment`:
    what a scorer says of an answer that it has scored; `sums`: what is added up over lines, for figures of
    all of them together."""

    score: float
    extracted: Any = None
    note: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    comment: str | None = None
    sums: Mapping[str, float] = field(default_factory=dict)
    measure: ScoreMeasure | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Verdict:
        """Read what `asdict` has made of a verdict."""
        return cls(**{**found, "measure": read_measure(found)})


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer with its context. `text`: without reasoning; `index`: the choice's index; `line`: the job
    line as data; `body`: the response body without reasoning; `talk`: the `transcript` and last `state` of a
    conversation with tools."""

    text: str
    index: int
    expected: Any
    line: Mapping[str, Any]
    body: Mapping[str, Any]
    talk: Mapping[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores answers in place of a match. Records have `name` and `digest`, a digest of what decides the
    scores."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    def score(self, answer: ScoredAnswer) -> Verdict:
        """Score one answer; a failure becomes a note. ScorerEnded if a process of the scorer was ended."""


@dataclass(frozen=True, slots=True)
class UnloadedScorer:
    """Stands for a scorer where lines are read and not scored."""

    name: str
    digest: str = ""

    def score(self, answer: ScoredAnswer) -> Verdict:
        return Verdict(0, note=f"the scorer {self.name} was not loaded")


MEAN, MAJORITY = "mean", "majority"
_OF_SOME = re.compile(r"(pass@|pass\^|maj@)([1-9]\d{0,5})")


def check_metric(name: object) -> int:
    """Return the number of choices that a metric needs. ValueError if there is no such metric."""
    found = _OF_SOME.fullmatch(name) if isinstance(name, str) else None
    if found is None and name not in (MEAN, MAJORITY):
        raise ValueError(f"{name!r} is not one of mean, majority, pass@K, pass^K and maj@K")
    return int(found[2]) if found else 1


def is_metric(name: str) -> bool:
    """Whether `compute_metric` has a metric of this name."""
    return name in (MEAN, MAJORITY) or _OF_SOME.fullmatch(name) is not None


def list_default_metrics(count: int) -> tuple[str, ...]:
    """List the metrics of a line with `count` choices that names none."""
    return (MEAN, f"pass@{count}", f"pass^{count}", MAJORITY) if count > 1 else ()


def compute_metric(name: str, verdicts: Sequence[Verdict], votes_by_score: bool) -> float:
    """Compute one metric of all choices. Choices with equal `extracted` vote together, as JSON: 42 is 42.0.
    With `votes_by_score`, `extracted` does not tell wrong answers apart: the majority then votes on right or
    wrong."""
    if name == MEAN:
        return sum(each.score for each in verdicts) / len(verdicts)
    if name == MAJORITY:
        return _score_majority(verdicts, votes_by_score, len(verdicts))
    found = _OF_SOME.fullmatch(name)
    assert found is not None
    k, n, passed = int(found[2]), len(verdicts), sum(each.score == 1 for each in verdicts)
    if found[1] == "maj@":
        return _score_majority(verdicts, votes_by_score, k)
    if found[1] == "pass^":
        return comb(passed, k) / comb(n, k)
    return 1 - comb(n - passed, k) / comb(n, k)


def _score_majority(verdicts: Sequence[Verdict], votes_by_score: bool, k: int) -> float:
    """The mean score of the answer with most votes, over all ways to take `k` choices. Choices in which
    nothing was found do not vote."""
    votes: dict[Hashable, list[float]] = defaultdict(list)
    for each in verdicts:
        if votes_by_score:
            votes[each.score].append(each.score)
        elif each.extracted is not None:
            votes[_make_vote(each.extracted)].append(each.score)
    answers = [(len(scores), scores[0]) for scores in votes.values()]
    silent = len(verdicts) - sum(count for count, _ in answers)
    most = max((count for count, _ in answers), default=0)
    if k == len(verdicts):
        tied = [score for count, score in answers if count == most]
        return sum(tied) / len(tied) if tied else 0.0
    total = sum(_sum_won(answers, silent, k, winning) for winning in range(1, min(most, k) + 1))
    return total / comb(len(verdicts), k)


def _make_vote(value: Any) -> Hashable:
    """The same key for all values that are equal as JSON: 1 is 1.0 but not true."""
    if isinstance(value, Mapping):
        return frozenset((key, _make_vote(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_make_vote, value))
    return (bool, value) if isinstance(value, bool) else value


def _sum_won(answers: Sequence[tuple[int, float]], silent: int, k: int, winning: int) -> float:
    """The sum of the majority's scores over all ways to take `k` choices in which the most votes of an answer
    are `winning`. `answers`: the number of choices with each answer, and its score; `silent`: the number of
    choices that do not vote."""
    # By votes so far and tied answers: the number of ways, and the sum of the scores of the tied over them.
    ways: dict[tuple[int, int], tuple[int, float]] = {
        (taken, 0): (comb(silent, taken), 0.0) for taken in range(min(silent, k) + 1)
    }
    for count, score in answers:
        new: dict[tuple[int, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for (taken, tied), (number, scores) in ways.items():
            for more in range(min(count, winning, k - taken) + 1):
                wins, times = more == winning, comb(count, more)
                old = new[taken + more, tied + wins]
                added = (number * times, (scores + number * score * wins) * times)
                new[taken + more, tied + wins] = old[0] + added[0], old[1] + added[1]
        ways = new
    return sum(scores / tied for (taken, tied), (_, scores) in ways.items() if taken == k and tied)
