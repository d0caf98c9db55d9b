"""Scoring off the event loop, which is killed when nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from mlxrun.jobs.scoring.line_scores import run_scorers
from mlxrun.jobs.scoring.scorer_process import ScorerLimits, ScorerPool
from tests.helpers.raw_clients import until
from tests.helpers.scorer_bombs import is_running, list_scorers


async def test_cancelling_kills_the_process() -> None:
    pool = ScorerPool(ScorerLimits(600.0, 1_000_000_000))
    assert await run_scorers(pool.call, "builtins:abs", -3) == 3
    (pid,) = [child._process.pid for child in pool._idle]
    assert pid in list_scorers(os.getpid())
    task, before = asyncio.create_task(run_scorers(pool.call, "time:sleep", 500)), time.monotonic()
    await until(lambda: not pool._idle)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - before < 300
    assert not is_running(pid)
