"""Which rows are given up so that others fit: the least urgent, and none that need not go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxrun.scheduler.request_state import RequestState


def rank_urgency(entry: RequestState, overdue: bool) -> tuple[bool, bool, int, int]:
    """Lower is more urgent. `overdue`: it has waited for too long (see Line)."""
    return (entry.request.background, not overdue, entry.priority, entry.arrival_index)


def choose_victims(
    rows: Sequence[RequestState], fits: Callable[[Sequence[RequestState]], bool]
) -> list[RequestState]:
    """Of `rows`, most urgent first, those to give up so that `fits(the others)`; all if nothing else does.

    `fits` never turns false as rows go. Asks it about as often as rows are given up.
    """
    kept, given = list(rows), []
    while kept and not fits(kept):
        given.append(kept.pop())
    # The last one had to go; what went before it may be too small to matter.
    victims = given[-1:]
    for row in reversed(given[:-1]):
        if fits([*kept, row]):
            kept.append(row)
        else:
            victims.append(row)
    return victims[::-1]
