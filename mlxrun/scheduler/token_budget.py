"""What fits: rows, the transients of a step and the prefix cache, against the memory's limit.

The prefix cache gives way to rows, the budget of a step shrinks before anybody waits, and rows that outgrow
the memory are given up by the scheduler, least urgent first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrun.config.settings import SchedulerSettings
from mlxrun.scheduler.memory_budget import MemoryBudget
from mlxrun.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.scheduler.request_state import RequestState

# A row is admitted with room for this many answer tokens; if rows outgrow the memory later, one has to wait.
DECODE_RESERVE = 256
SHALLOWEST = 4  # tokens; smaller pieces would cost more forwards than they spare
LEAST_CHUNK = 64  # memory shortage does not cut chunks smaller than this


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the device makes of a step. All numbers are tokens, but `hurry`.

    `sampling`: so many after a hit go through one forward, which samples, where a forward costs more than its
    tokens. `hurry`: how much a waiting prompt counts beside a row that decodes; more where each forward costs
    much by itself. `deep`: beside decoding rows a prompt of more tokens than this is computed in smaller
    pieces the longer it is, where attention is most of the cost; 0: never.
    """

    sampling: int = 0
    hurry: int = 1
    deep: int = 0


class TokenBudget:
    """`least`: prompt tokens of the smallest step that a shortage of memory may lead to."""

    def __init__(
        self,
        settings: SchedulerSettings,
        chunk: int,
        memory: MemoryBudget,
        prefixes: PrefixCacheInterface,
        *,
        whole_chunks: bool,
        pace: StepCosts | None = None,
    ) -> None:
        self.memory = memory
        self._prefixes = prefixes
        self._most = settings.prefill_budget
        self._busy = settings.prefill_budget_busy or chunk
        self._pace = pace or StepCosts()
        self.least = chunk if whole_chunks else min(chunk, LEAST_CHUNK)

    def fits(self, lengths: Sequence[int], prefill_tokens: int) -> bool:
        """Whether rows of these lengths fit beside a step of so many prompt tokens; shrinks the prefix cache
        if that is what it takes."""
        spare = self.memory.spare(lengths, prefill_tokens)
        if spare is None:
            return True
        if self._prefixes.nbytes > spare >= 0:
            self._prefixes.shrink(spare)
        return self._prefixes.nbytes <= spare

    def admits(self, running: Sequence[RequestState], entry: RequestState) -> bool:
        """Whether `entry` may run beside those that do."""
        lengths = [e.length for e in running] + [entry.length + min(entry.room, DECODE_RESERVE)]
        return self.fits(lengths, self._least_prefill([*running, entry]))

    def holds(self, running: Sequence[RequestState]) -> bool:
        """Whether those that run can take one more step."""
        return self.fits([e.length for e in running], self._least_prefill(running))

    def budget(self, running: Sequence[RequestState], decoding: int, waiting: int, depth: int = 0) -> int:
        """Prompt tokens of this step: the more rows decode, for each prompt that waits, the fewer. `depth`:
        how much is computed of the step's first prompt.

        A step holds up every decoding row and gets every waiting prompt on, so what is best for all of them
        depends on how many there are of each. Shrinks where memory is short, so far as a chunk may.
        """
        budget = self._most
        if decoding:
            shared = self._busy * max(waiting * self._pace.hurry, decoding) // decoding
            budget = min(budget, self._shallow(shared, depth))
        lengths = [e.length for e in running]
        while budget > self.least and not self.fits(lengths, budget):
            budget = max(budget // 2, self.least)
        return budget

    def _shallow(self, budget: int, depth: int) -> int:
        """The budget for a prompt so deep: its pieces cost about the same all along."""
        deep = self._pace.deep
        return budget if not deep or depth <= deep else max(min(budget, SHALLOWEST), budget * deep // depth)

    def _least_prefill(self, running: Sequence[RequestState]) -> int:
        """Prompt tokens of a step whose budget has shrunk: the least chunk, or an image that is larger."""
        left = [e for e in running if e.prefill_left]
        images = (stop - start for e in left for start, stop in e.request.spans if stop > e.computed)
        return max([min(self.least, sum(e.prefill_left for e in left)), *images])
