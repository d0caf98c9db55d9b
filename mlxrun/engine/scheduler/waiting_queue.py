"""The order in which prompts are computed, and which of them get the tokens of a step.

The policy sorts. Overdue requests go to the front, and background requests behind all others. If much shorter
prompts wait behind the first one, steps of one chunk alternate between the short ones and the first. A short
prompt is then computed within two chunks, and the long one keeps every other step.

The scheduler decides what fits and how much of it runs. The order depends only on the requests and the
policy's own counters, so the same calls give the same plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mlxrun.config.settings import SchedulerSettings
from mlxrun.engine.scheduler.request_state import RequestState

SHORT_RATIO = 4  # a prompt is short beside one with at least this many times as much prefill left
LONG_TOKENS = 1024  # prompts with more left are overtaken, also where one step might compute all of them


class WaitingQueue:
    """Sorts the requests that have prefill left, without regard to memory and rows."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self._max_wait = settings.aging
        self._policy_name = settings.policy
        self._policy = POLICIES[settings.policy]()
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
        """Whether a request came more than `aging` seconds ago and still has prefill left."""
        return self._has_waited_long(state, self._clock()) and state.remaining_prefill > 0

    def _has_waited_long(self, state: RequestState, now: float) -> bool:
        return 0 < self._max_wait < now - state.arrival_time

    def pick_for_step(self, queue: Sequence[RequestState], chunk: int) -> tuple[list[RequestState], bool]:
        """The running requests in `queue` that this step prefills, in order. The flag says whether steps
        alternate, so that this one may take at most one chunk."""
        head = queue[0] if queue else None
        is_long = head is not None and head.remaining_prefill > min(chunk, LONG_TOKENS)
        behind = queue[1:] if is_long else ()
        short = [s for s in behind if head is not None and self._may_overtake(s, head)]
        self._served_head_last = not short or not self._served_head_last
        if self._served_head_last:
            return list(queue), bool(short)
        return short, True

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
        """Note that a chunk of this many tokens was scheduled."""
        self._policy.record_served(state, tokens)


class Policy:
    """First come, first served. It is the base class of the other policies."""

    def rank(self, state: RequestState) -> tuple[int, ...]:
        """A sort key: lower goes first, ties go by arrival."""
        return ()

    def record_served(self, state: RequestState, tokens: int) -> None:
        """Note a scheduled chunk."""

    def sort(self, states: Sequence[RequestState]) -> list[RequestState]:
        return sorted(states, key=lambda s: (*self.rank(s), s.arrival_index))


class PriorityPolicy(Policy):
    """Lower `priority` first."""

    def rank(self, state: RequestState) -> tuple[int, ...]:
        return (state.request.priority,)


class ShortestPolicy(Policy):
    """Least remaining prefill first, which gives the best mean time to first token."""

    def rank(self, state: RequestState) -> tuple[int, ...]:
        return (state.remaining_prefill,)


class FairPolicy(Policy):
    """The key with the fewest served prompt tokens goes first, so that no client crowds out others."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def rank(self, state: RequestState) -> tuple[int, ...]:
        return (self._tokens[state.request.fairness_key],)

    def record_served(self, state: RequestState, tokens: int) -> None:
        self._tokens[state.request.fairness_key] += tokens

    def sort(self, states: Sequence[RequestState]) -> list[RequestState]:
        """A new or returning key starts at the lowest count of those present, so that idle time earns no
        credit."""
        keys = {s.request.fairness_key for s in states}
        lowest = min((self._tokens[k] for k in keys if k in self._tokens), default=0)
        for key in keys - self._tokens.keys():
            self._tokens[key] = lowest
        for key in self._tokens.keys() - keys:
            del self._tokens[key]
        return super().sort(states)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Policy,
    "priority": PriorityPolicy,
    "shortest": ShortestPolicy,
    "fair": FairPolicy,
}
