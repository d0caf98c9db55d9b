from __future__ import annotations

import logging

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.engine.workloads.failure_streak import FailureStreak


class FakeTrial:
    """Counts trials. `problem`: what they raise."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.count = 0
        self.problem = problem

    def compute_trial(self) -> None:
        self.count += 1
        if self.problem is not None:
            raise self.problem


def test_only_consecutive_failures_lead_to_a_trial() -> None:
    runner = FakeTrial()
    streak = FailureStreak("texts", 3, runner)
    for _ in range(4):
        streak.add(ValueError("bad"))
        streak.add(ValueError("bad"))
        streak.end()
    assert runner.count == 0


def test_requests_that_fail_end_the_streak(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeTrial()
    streak = FailureStreak("texts", 2, runner)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            streak.add(ValueError("bad"))
    assert (runner.count, streak.length) == (2, 1)
    assert caplog.text.count("2 texts failed in a row by their requests: the model computes") == 2


@pytest.mark.parametrize(
    ("problem", "text"),
    [("gone", "1 texts failed in a row: gone"), ("lost", "1 texts failed in a row: gone; then: lost")],
)
def test_a_model_that_computes_nothing_is_dead(problem: str, text: str) -> None:
    error = ValueError("gone")
    with pytest.raises(EngineDead) as dead:
        FailureStreak("texts", 1, FakeTrial(RuntimeError(problem))).add(error)
    assert str(dead.value).endswith(text)
    assert dead.value.__cause__ is error
