"""Metrics of a line with several choices: pass@k, pass^k, their mean and the majority's score.

A choice passes if it scores 1. With n choices of which c pass:

    pass@k = 1 - C(n-c, k) / C(n, k)    at least one of k passes; the unbiased estimator of Chen et al. 2021,
                                        "Evaluating Large Language Models Trained on Code", section 2.1
    pass^k = C(c, k) / C(n, k)          all of k pass; Yao et al. 2024, "tau-bench"
    majority                            the score of the answer that most choices give; Wang et al. 2022,
                                        "Self-Consistency Improves Chain of Thought Reasoning"

Where several answers have most votes, the majority's score is the mean of theirs: what choosing one at random
gives on average.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from math import comb

from mlxrun.jobs.scoring.verdict import Verdict

MEAN, MAJORITY = "mean", "majority"
_PASS = re.compile(r"pass([@^])([1-9]\d{0,5})")


def check_metric(name: object) -> int:
    """The number of choices that a metric needs; ValueError if there is no such metric."""
    found = _PASS.fullmatch(name) if isinstance(name, str) else None
    if found is None and name not in (MEAN, MAJORITY):
        raise ValueError(f"{name!r} is not one of mean, majority, pass@K and pass^K")
    return int(found[2]) if found else 1


def list_default_metrics(count: int) -> tuple[str, ...]:
    """The metrics of a line with so many choices that names none."""
    return (MEAN, f"pass@{count}", f"pass^{count}", MAJORITY) if count > 1 else ()


def compute_metric(name: str, verdicts: Sequence[Verdict], votes_by_score: bool) -> float:
    """One metric of all choices. `votes_by_score`: `extracted` does not tell wrong answers apart, so that the
    majority is that of right or wrong answers."""
    if name == MEAN:
        return sum(each.score for each in verdicts) / len(verdicts)
    if name == MAJORITY:
        return _score_majority(verdicts, votes_by_score)
    found = _PASS.fullmatch(name)
    assert found is not None
    k, n, passed = int(found[2]), len(verdicts), sum(each.score == 1 for each in verdicts)
    if found[1] == "^":
        return comb(passed, k) / comb(n, k)
    return 1 - comb(n - passed, k) / comb(n, k)


def _score_majority(verdicts: Sequence[Verdict], votes_by_score: bool) -> float:
    """Choices in which nothing was found do not vote."""
    votes: dict[str, list[float]] = defaultdict(list)
    for each in verdicts:
        if votes_by_score:
            votes[str(each.score)].append(each.score)
        elif each.extracted is not None:
            votes[json.dumps(each.extracted, sort_keys=True)].append(each.score)
    most = max(map(len, votes.values()), default=0)
    tied = [scores[0] for scores in votes.values() if len(scores) == most]
    return sum(tied) / len(tied) if tied else 0.0
