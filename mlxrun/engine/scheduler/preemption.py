"""Decides whether a request fits beside the running rows, and which rows are preempted to make room.

The least urgent rows are preempted, and as few as necessary: for a waiting request, or for the memory of the
next step.

After the device ran out of memory, fewer rows run together for a while, even if the budget allows all. If all
ran together again at once, the step would fail again, without end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.token_budget import TokenBudget
from mlxrun.engine.scheduler.waiting_queue import WaitingQueue

Preempt = Callable[[RequestState], None]
STEPS = 256  # successful steps until twice as many rows may run


def rank_urgency(state: RequestState, overdue: bool) -> tuple[bool, bool, int, int]:
    """A sort key; lower is more urgent. `overdue`: WaitingQueue.is_overdue of the row."""
    return (state.request.background, not overdue, state.request.priority, state.arrival_index)


def choose_victims(
    rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]
) -> list[RequestState]:
    """Of `rows`, most urgent first, the ones to preempt so that the others fit. All of them if nothing less
    fits. `fits` must stay true when rows are removed. It is called about twice for each preempted row."""
    kept, removed = list(rows), []
    while kept and not fits(kept):
        removed.append(kept.pop())
    # Removing the last one was necessary. Those removed before it may have been too small to matter.
    victims = removed[-1:]
    for row in reversed(removed[:-1]):
        if fits([*kept, row]):
            kept.append(row)
        else:
            victims.append(row)
    return victims[::-1]


class Preemption:
    """Makes room for rows, in number and in memory.

    `running`: all rows that run; `preempt`: frees a row, and what it pins in the prefix cache.
    """

    def __init__(self, row_limit: RowLimit, token_budget: TokenBudget, waiting_queue: WaitingQueue) -> None:
        self._row_limit = row_limit
        self._token_budget = token_budget
        self._waiting_queue = waiting_queue

    def make_room(self, state: RequestState, running: list[RequestState], preempt: Preempt) -> bool:
        """Whether a waiting request can run now. Background rows may be preempted for it, and are removed
        from `running`."""
        return self._can_run(state, running) or self.preempt_background(state, running, preempt)

    def preempt_for_memory(self, running: Sequence[RequestState], preempt: Preempt) -> bool:
        """Preempt the least urgent rows if the next step does not fit in memory. Returns whether any was."""
        if len(running) < 2 or self._token_budget.fits_next_step(running):
            return False
        left = self._sort_by_urgency(running)
        while len(left) > 1 and not self._token_budget.fits_next_step(left):
            preempt(left.pop())
        return True

    def _can_run(self, state: RequestState, running: Sequence[RequestState], use_cache: bool = True) -> bool:
        """Whether a row and memory are left. Beside other requests, background ones get half of the rows."""
        if not running and not self._token_budget.is_shared_with_texts:
            return True
        max_rows = self._row_limit.rows
        background = sum(s.request.background for s in running)
        if state.request.background and background < len(running) and 2 * background >= max_rows:
            return False
        return len(running) < max_rows and self._token_budget.can_admit(running, state, use_cache)

    def preempt_background(self, state: RequestState, running: list[RequestState], preempt: Preempt) -> bool:
        """Preempt as few background rows as needed for a request that is not in the background, or none if
        that is not enough. Returns whether the request can run now."""
        background = [s for s in self._sort_by_urgency(running) if s.request.background]
        live = [s for s in running if not s.request.background]
        # Preempting a row unpins its prefix cache entries, so the memory of the cache does not count yet.
        if state.request.background or not background or not self._can_run(state, live, use_cache=False):
            return False
        for victim in choose_victims(background, lambda rows: self._can_run(state, [*live, *rows], False)):
            running.remove(victim)
            preempt(victim)
        left = [s for s in background if s.running]
        while left and not self._can_run(state, running):
            running.remove(left[-1])
            preempt(left.pop())
        return self._can_run(state, running)

    def _sort_by_urgency(self, states: Sequence[RequestState]) -> list[RequestState]:
        return sorted(states, key=lambda s: rank_urgency(s, self._waiting_queue.is_overdue(s)))


class RowLimit:
    """How many rows may run. `most`: the limit while no step has run out of memory."""

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._successes = 0

    def record_shortage(self, rows: int) -> None:
        """Halve the limit: memory ran out while `rows` rows ran."""
        self.rows, self._successes = max(rows // 2, 1), 0

    def record_success(self) -> None:
        """Note a successful step. After STEPS of them, the limit is doubled."""
        if self.rows < self._most:
            self._successes += 1
            if self._successes == STEPS:
                self.rows, self._successes = min(2 * self.rows, self._most), 0
