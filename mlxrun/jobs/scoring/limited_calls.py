"""Scores answers in ways that may run long, in child processes (scorer_process.py).

A line that has ended its scorer twice, by a limit or a crash, is not scored any more: its answers get a note.

`run_scorers` scores off the event loop, so that scoring ends as soon as nobody waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar

from mlxrun.core.workers import Lane, end_by
from mlxrun.jobs.scoring.eval_spec import EvalSpec
from mlxrun.jobs.scoring.matching import match_answer
from mlxrun.jobs.scoring.scorer_process import ScorerEnded, ScorerLimits, ScorerPool, end_scorers_by
from mlxrun.jobs.scoring.verdict import Verdict

MOST_ENDS = 2  # of the scorer of one line: the machine may have been too busy for the first one
SLOW_MATCHES = ("regex", "json_schema")
OWN = ScorerPool(ScorerLimits(seconds=10.0, memory=1_000_000_000))

T = TypeVar("T")
P = ParamSpec("P")

# Each thread may wait for a process that takes a whole CPU. Work that may not run long needs none of them.
SCORES = Lane("scores", max(2, min(4, (os.cpu_count() or 1) // 2)))


class LineTries:
    """Counts how often one line has ended its scorer."""

    def __init__(self) -> None:
        self._ends: list[str] = []

    def call(self, function: Callable[[T], Verdict], answer: T) -> Verdict:
        """The verdict on an answer; one with a note if the line has ended its scorer too often."""
        while len(self._ends) < MOST_ENDS:
            try:
                return function(answer)
            except ScorerEnded as error:
                self._ends.append(str(error))
        return Verdict(0, note=f"the scorer was ended {len(self._ends)} times: {self._ends[-1]}")


def runs_long(spec: EvalSpec) -> bool:
    """Whether scoring by `spec` may wait for a child process."""
    return spec.scorer is not None or spec.match in SLOW_MATCHES


def match_limited(spec: EvalSpec, answer: str) -> Verdict:
    """As `match_answer`; ScorerEnded if it takes too much time or memory."""
    if not runs_long(spec):
        return match_answer(spec, answer)
    fields = {
        "expected": spec.expected,
        "match": spec.match,
        "after": spec.after,
        "options": {**spec.options},
    }
    return Verdict(**OWN.call(f"{__name__}:match_fields", fields, answer))


def match_fields(fields: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """The child's side of `match_limited`."""
    try:
        verdict = match_answer(EvalSpec(**fields), answer)
    except MemoryError:
        raise  # this process cannot go on with what is left
    except Exception as error:  # of a library
        verdict = Verdict(0, note=f"the answer cannot be scored: {type(error).__name__}: {error}"[:500])
    return asdict(verdict)


async def run_scorers(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that scores answers. If this is cancelled, processes of scorers are killed,
    and the function ends by Abandoned."""

    def run() -> T:
        with end_scorers_by(end_by):
            return function(*args, **kwargs)

    return await SCORES.run(run)
