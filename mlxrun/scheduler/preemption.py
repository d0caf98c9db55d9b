"""Chooses the rows to preempt so that others fit: the least urgent ones, and as few as necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxrun.scheduler.request_state import RequestState


def rank_urgency(state: RequestState, overdue: bool) -> tuple[bool, bool, int, int]:
    """A sort key; lower is more urgent. `overdue`: see WaitingQueue.is_overdue."""
    return (state.request.background, not overdue, state.request.priority, state.arrival_index)


def choose_victims(
    rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]
) -> list[RequestState]:
    """Of `rows`, most urgent first, those to preempt so that `fits(the others)`; all if nothing less fits.

    `fits` must stay true when rows are removed. It is called about twice for each preempted row.
    """
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
