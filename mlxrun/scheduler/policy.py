"""In which order prompts are computed: one small class a policy, one registry.

A policy sorts; what fits and how much of it runs is the scheduler's business. Sorting is stable and
depends on the entries and the policy's own counters alone, so the same calls give the same plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from mlxrun.errors import ConfigError


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def arrival(self) -> int: ...  # counts up with each request
    @property
    def priority(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def prefill_left(self) -> int: ...


class Policy:
    """First come, first served; the base of the others."""

    def rank(self, entry: Candidate) -> tuple[int, ...]:
        """Lower goes first; ties go by arrival."""
        return ()

    def record_served(self, entry: Candidate, tokens: int) -> None:
        """Called once for each chunk that is handed out."""

    def sort(self, entries: Sequence[Candidate]) -> list[Candidate]:
        return sorted(entries, key=lambda e: (*self.rank(e), e.arrival))


class PriorityPolicy(Policy):
    """Lower `priority` first."""

    def rank(self, entry: Candidate) -> tuple[int, ...]:
        return (entry.priority,)


class ShortestPolicy(Policy):
    """Least prefill left first: the best mean time to first token."""

    def rank(self, entry: Candidate) -> tuple[int, ...]:
        return (entry.prefill_left,)


class FairPolicy(Policy):
    """The key that was handed the fewest prompt tokens first, so that nobody crowds out the others."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def rank(self, entry: Candidate) -> tuple[int, ...]:
        return (self._tokens[entry.key],)

    def served(self, entry: Candidate, tokens: int) -> None:
        self._tokens[entry.key] += tokens

    def order(self, entries: Sequence[Candidate]) -> list[Candidate]:
        """A key that comes (back) starts at the least count present: idle time earns no credit."""
        keys = {e.key for e in entries}
        floor = min((self._tokens[k] for k in keys if k in self._tokens), default=0)
        for key in keys - self._tokens.keys():
            self._tokens[key] = floor
        for key in self._tokens.keys() - keys:
            del self._tokens[key]
        return super().sort(entries)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Policy,
    "priority": PriorityPolicy,
    "shortest": ShortestPolicy,
    "fair": FairPolicy,
}


def build_policy(name: str) -> Policy:
    """The policy of that name; ConfigError names the known ones."""
    if name not in POLICIES:
        raise ConfigError(f"scheduler.policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()
