"""In which order prompts are computed, and whose turn a step is.

The policy's order is the line; who waits too long goes to its front; background requests stand behind all
others. Where prompts wait that are much shorter than what the head of the line has left, steps of a chunk
alternate between the line and them, shortest first: a short prompt has its first token two chunks after the
step in which it came, whatever computes before it, and a long one keeps every other step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from mlxrun.config.settings import SchedulerSettings
from mlxrun.scheduler.policy import build_policy
from mlxrun.scheduler.request_state import RequestState

SHORT_RATIO = 4  # a prompt is short beside one that has so many times as much left


class WaitingQueue:
    """Sorts entries that have prompt left; knows no memory and no rows."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self._aging = settings.aging
        self._policy_name = settings.policy
        self._policy = build_policy(settings.policy)
        self._clock = clock
        self._head_was_served = False  # the last step was the line's, and short prompts waited behind its head

    def order_requests(self, entries: Iterable[RequestState], freeing: bool) -> list[RequestState]:
        """Entries with prompt left, as they are served. `freeing`: rows are dropped in this step."""
        entries = list(entries)
        suspects = [e for e in entries if e.suspect]
        if suspects:  # quarantine: one at a time, and nobody beside it or under way
            return suspects[:1] if suspects[0].remaining_prefill and not freeing else []
        now = self._clock()
        line = cast("list[RequestState]", self._policy.sort([e for e in entries if e.remaining_prefill]))
        overdue = [e for e in entries if e.remaining_prefill and self.is_overdue(e, now)]
        line = overdue + [e for e in line if not self.is_overdue(e, now)]
        return sorted(line, key=lambda e: e.request.background)  # stable

    def is_overdue(self, entry: RequestState, now: float) -> bool:
        """Came longer than `aging` ago, in seconds of the clock, and its prompt is not computed."""
        return entry.remaining_prefill > 0 and 0 < self._aging < now - entry.arrival_time

    def pick_for_step(self, order: Sequence[RequestState], chunk: int) -> tuple[list[RequestState], bool]:
        """The entries of this step, of those that run, in order; and whether the step is shared with others,
        so that it is to take a chunk at most."""
        head = order[0] if order else None
        behind = order[1:] if head is not None and head.remaining_prefill > chunk else ()
        short = [e for e in behind if head is not None and self._may_overtake(e, head)]
        self._head_was_served = bool(short) and not self._head_was_served
        if not short or self._head_was_served:
            return list(order), bool(short)
        return sorted(short, key=lambda e: (e.remaining_prefill, e.arrival_index)), True

    def _may_overtake(self, entry: RequestState, head: RequestState) -> bool:
        if entry.request.background and not head.request.background:
            return False
        if self._policy_forbids_overtaking(entry, head):
            return False
        return entry.remaining_prefill * SHORT_RATIO <= head.remaining_prefill

    def _policy_forbids_overtaking(self, entry: RequestState, head: RequestState) -> bool:
        """Whether passing would undo what the policy is for: urgent before less urgent; and keys that are
        handed as much as each other need no passing."""
        if self._policy_name == "fair":
            return entry.key != head.key
        return self._policy_name == "priority" and entry.priority > head.priority

    def record_served(self, entry: RequestState, tokens: int) -> None:
        """A chunk of so many tokens was handed out."""
        self._policy.record_served(entry, tokens)
