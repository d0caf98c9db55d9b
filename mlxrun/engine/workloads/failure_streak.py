"""Consecutive failures of a workload, which its requests or the device may have caused."""

from __future__ import annotations

import logging
from typing import Protocol

from mlxrun.core.errors import EngineDead

log = logging.getLogger(__name__)


class TrialRunner(Protocol):
    """A runner that can compute something of no request."""

    def compute_trial(self) -> None:
        """Compute something small, and wait for it. Raises what the model raises."""


class FailureStreak:
    """Counts consecutive failures of `subject`, such as "steps". Once there are `max_errors`, a trial of the
    runner shows whether the model still computes."""

    def __init__(self, subject: str, max_errors: int, runner: TrialRunner) -> None:
        self._subject = subject
        self._max_errors = max_errors
        self._runner = runner
        self.length = 0

    def end(self) -> None:
        """Begin again: the model has computed something."""
        self.length = 0

    def add(self, error: Exception) -> None:
        """Count a failure. EngineDead if there are too many and the trial fails too; else the requests caused
        them, and the streak ends."""
        self.length += 1
        if self.length < self._max_errors:
            return
        try:
            self._runner.compute_trial()
        except Exception as problem:  # whatever the model raises
            text = f"{self.length} {self._subject} failed in a row: {error}"
            raise EngineDead(text if str(problem) == str(error) else f"{text}; then: {problem}") from error
        text = "%d %s failed in a row by their requests: the model computes"
        log.warning(text, self.length, self._subject)
        self.end()
