"""The order in which prompts are computed, and which of them get the tokens of a step.

The policy sorts; overdue requests go to the front, and background requests go behind all others. If prompts
wait that are much shorter than what is left of the first one, steps of one chunk alternate between the short
ones and the first. A short prompt is then computed within two chunks, and the long one keeps every other
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mlxrun.config.settings import SchedulerSettings
from mlxrun.engine.scheduler.policy import build_policy
from mlxrun.engine.scheduler.request_state import RequestState

SHORT_RATIO = 4  # a prompt is short beside one with at least this many times as much prefill left


class WaitingQueue:
    """Sorts the requests that have prefill left. Memory and rows are not its concern."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self._max_wait = settings.aging
        self._policy_name = settings.policy
        self._policy = build_policy(settings.policy)
        self._clock = clock
        self._served_head_last = True  # the last step went to the first request

    def order_requests(self, requests: Iterable[RequestState], freeing: bool) -> list[RequestState]:
        """The requests with prefill left, in the order of service. `freeing`: this step also frees rows."""
        requests = list(requests)
        suspects = [s for s in requests if s.suspect]
        if suspects:  # each must complete a step alone, with no other row in it or in flight
            return suspects[:1] if suspects[0].remaining_prefill and not freeing else []
        now = self._clock()
        requests = [s for s in requests if s.remaining_prefill]  # there may be thousands
        queue = self._policy.sort(requests)
        overdue = [s for s in requests if self._has_waited_long(s, now)]
        if overdue:
            queue = overdue + [s for s in queue if not self._has_waited_long(s, now)]
        return sorted(queue, key=lambda s: s.request.background)  # stable

    def is_overdue(self, state: RequestState) -> bool:
        """Whether it came more than `aging` seconds ago and still has prefill left."""
        return self._has_waited_long(state, self._clock()) and state.remaining_prefill > 0

    def _has_waited_long(self, state: RequestState, now: float) -> bool:
        return 0 < self._max_wait < now - state.arrival_time

    def pick_for_step(self, queue: Sequence[RequestState], chunk: int) -> tuple[list[RequestState], bool]:
        """Of the running requests in `queue`, those that this step prefills, in order; and whether the steps
        alternate, so that this one may take at most one chunk."""
        head = queue[0] if queue else None
        behind = queue[1:] if head is not None and head.remaining_prefill > chunk else ()
        short = [s for s in behind if head is not None and self._may_overtake(s, head)]
        self._served_head_last = not short or not self._served_head_last
        if self._served_head_last:
            return list(queue), bool(short)
        return sorted(short, key=lambda s: (s.remaining_prefill, s.arrival_index)), True

    def _may_overtake(self, state: RequestState, head: RequestState) -> bool:
        """Whether a much shorter prompt may pass the first one. It may not if that defeats the policy: a less
        urgent request passes nobody, and keys that get equal shares need no overtaking."""
        if state.request.background and not head.request.background:
            return False
        if self._policy_name == "fair" and state.request.fairness_key != head.request.fairness_key:
            return False
        if self._policy_name == "priority" and state.request.priority > head.request.priority:
            return False
        return state.remaining_prefill * SHORT_RATIO <= head.remaining_prefill

    def record_served(self, state: RequestState, tokens: int) -> None:
        """A chunk of this many tokens was scheduled."""
        self._policy.record_served(state, tokens)
