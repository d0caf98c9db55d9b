"""What stands for a scorer that was not loaded."""

from __future__ import annotations

from mlxrun.jobs.scoring.verdict import ScoredAnswer, UnloadedScorer


def test_an_unloaded_scorer_scores_nothing() -> None:
    found = UnloadedScorer("my:score").score(ScoredAnswer("x", 0, None, {}, {}))
    assert (found.score, found.note) == (0, "the scorer my:score was not loaded")
