"""What makes rows be preempted for memory, and counts them.

An engine sets memory aside for answers, and counts it in large steps, so that it rarely comes to that. Here
it does neither: a step for which the rows have grown too long preempts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from benchmarks.reproduce.replacement import replace_name

if TYPE_CHECKING:
    from mlxrun.engine.client import EngineClient
    from mlxrun.engine.scheduler.request_state import RequestState
    from mlxrun.engine.scheduler.scheduler import Scheduler

ROWS_IN_MEMORY = (12, 6, 5, 4, 3, 2)  # what is tried until rows are preempted


@dataclass(slots=True)
class Preemptions:
    """Rows that were preempted; `begun`: those that had tokens of their answers."""

    rows: int = 0
    begun: int = 0


@contextmanager
def count_preemptions() -> Iterator[Preemptions]:
    """Count the preemptions of all engines of this process meanwhile."""
    from mlxrun.engine.scheduler.scheduler import Scheduler

    found, preempt = Preemptions(), Scheduler.preempt

    def count(self: Scheduler, state: RequestState) -> None:
        found.rows += 1
        found.begun += bool(state.output)
        preempt(self, state)

    with replace_name(Scheduler, "preempt", count):
        yield found


@contextmanager
def reserve_nothing() -> Iterator[None]:
    """Engines that start meanwhile count memory by the token, and set none aside for answers."""
    from mlxrun.engine.scheduler import token_budget
    from mlxrun.model.load import footprint

    with replace_name(footprint, "BUFFER_STEP", 1), replace_name(token_budget, "DECODE_RESERVE", 0):
        yield


async def compute_tight_limit(
    client: EngineClient, headroom: float, lengths: Sequence[int], rows: int
) -> int:
    """Bytes that hold the weights and some rows, the longest and others; `lengths`: tokens of all lines."""
    scheduler: Scheduler = await client._call_engine(lambda engine: engine.scheduler)
    memory, chunk = scheduler.limits.memory, scheduler.token_budget.min_chunk
    needed = memory.compute_needed_bytes([max(lengths)], chunk, [int(mean(lengths))] * (rows - 1))
    return int(needed / (1 - headroom)) + 1
