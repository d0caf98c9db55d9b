"""Scores answers off the event loop, so that scoring ends as soon as nobody waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mlxrun.core.workers import Lane, end_by
from mlxrun.jobs.scoring.scorer_process import end_scorers_by

P = ParamSpec("P")
T = TypeVar("T")

# Each thread may wait for a process that takes a whole CPU. Work that may not run long needs none of them.
SCORES = Lane("scores", max(2, min(4, (os.cpu_count() or 1) // 2)))


async def run_scorers(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that scores answers. If this is cancelled, processes of scorers are killed,
    and the function ends by Abandoned."""

    def run() -> T:
        with end_scorers_by(end_by):
            return function(*args, **kwargs)

    return await SCORES.run(run)
