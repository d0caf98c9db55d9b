"""The order in which prompts are computed: one small class per policy, and their registry.

A policy only sorts; the scheduler decides what fits and how much of it runs. The order depends on the
requests and on the policy's own counters alone, so the same calls give the same plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mlxrun.core.errors import ConfigError
from mlxrun.engine.scheduler.request_state import RequestState


class Policy:
    """First come, first served; the base class of the others."""

    def rank(self, state: RequestState) -> tuple[int, ...]:
        """A sort key: lower goes first, ties go by arrival."""
        return ()

    def record_served(self, state: RequestState, tokens: int) -> None:
        """Called for each chunk that is scheduled."""

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
    """The key that has been served the fewest prompt tokens first, so that no client crowds out others."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def rank(self, state: RequestState) -> tuple[int, ...]:
        return (self._tokens[state.request.fairness_key],)

    def record_served(self, state: RequestState, tokens: int) -> None:
        self._tokens[state.request.fairness_key] += tokens

    def sort(self, states: Sequence[RequestState]) -> list[RequestState]:
        """A new or returning key starts at the lowest count of those present: idle time earns no credit."""
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


def build_policy(name: str) -> Policy:
    """The policy of that name; ConfigError lists the known ones."""
    if name not in POLICIES:
        raise ConfigError(f"scheduler.policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()
