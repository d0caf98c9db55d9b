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
MIN_DEEP_CHUNK = 4  # tokens; smaller pieces would cost more forwards than they spare
MIN_CHUNK = 64  # memory shortage does not cut chunks smaller than this


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the device makes of a step. All numbers are tokens, but `hurry`.

    `sampling`: so many after a hit go through one forward, which samples, where a forward costs more than its
    tokens. `hurry`: how much a waiting prompt counts beside a row that decodes; more where each forward costs
    much by itself. `deep`: beside decoding rows a prompt of more tokens than this is computed in smaller
    pieces the longer it is, where attention is most of the cost; 0: never.
    """

    max_sampling_chunk: int = 0
    waiting_weight: int = 1
    deep_prompt: int = 0


class TokenBudget:
    """`least`: prompt tokens of the smallest step that a shortage of memory may lead to."""

    def __init__(
        self,
        settings: SchedulerSettings,
        chunk: int,
        memory: MemoryBudget,
        prefix_cache: PrefixCacheInterface,
        *,
        aligned_chunks: bool,
        costs: StepCosts | None = None,
    ) -> None:
        self.memory = memory
        self._prefix_cache = prefix_cache
        self._max_tokens = settings.prefill_budget
        self._max_tokens_busy = settings.prefill_budget_busy or chunk
        self._costs = costs or StepCosts()
        self.min_chunk = chunk if aligned_chunks else min(chunk, MIN_CHUNK)

    def fits_memory(self, lengths: Sequence[int], prefill_tokens: int) -> bool:
        """Whether rows of these lengths fit beside a step of so many prompt tokens; shrinks the prefix cache
        if that is what it takes."""
        spare = self.memory.compute_spare_bytes(lengths, prefill_tokens)
        if spare is None:
            return True
        if self._prefix_cache.nbytes > spare >= 0:
            self._prefix_cache.shrink(spare)
        return self._prefix_cache.nbytes <= spare

    def can_admit(self, running: Sequence[RequestState], entry: RequestState) -> bool:
        """Whether `entry` may run beside those that do."""
        lengths = [e.projected_length for e in running] + [entry.projected_length + min(entry.remaining_output, DECODE_RESERVE)]
        return self.fits_memory(lengths, self._compute_min_prefill([*running, entry]))

    def fits_next_step(self, running: Sequence[RequestState]) -> bool:
        """Whether those that run can take one more step."""
        return self.fits_memory([e.projected_length for e in running], self._compute_min_prefill(running))

    def compute_prefill_budget(self, running: Sequence[RequestState], decoding: int, waiting: int, depth: int = 0) -> int:
        """Prompt tokens of this step: the more rows decode, for each prompt that waits, the fewer. `depth`:
        how much is computed of the step's first prompt.

        A step holds up every decoding row and gets every waiting prompt on, so what is best for all of them
        depends on how many there are of each. Shrinks where memory is short, so far as a chunk may.
        """
        budget = self._max_tokens
        if decoding:
            shared = self._max_tokens_busy * max(waiting * self._costs.waiting_weight, decoding) // decoding
            budget = min(budget, self._limit_for_depth(shared, depth))
        lengths = [e.projected_length for e in running]
        while budget > self.min_chunk and not self.fits_memory(lengths, budget):
            budget = max(budget // 2, self.min_chunk)
        return budget

    def _limit_for_depth(self, budget: int, depth: int) -> int:
        """The budget for a prompt so deep: its pieces cost about the same all along."""
        deep = self._costs.deep_prompt
        return budget if not deep or depth <= deep else max(min(budget, MIN_DEEP_CHUNK), budget * deep // depth)

    def _compute_min_prefill(self, running: Sequence[RequestState]) -> int:
        """Prompt tokens of a step whose budget has shrunk: the least chunk, or an image that is larger."""
        left = [e for e in running if e.remaining_prefill]
        images = (stop - start for e in left for start, stop in e.request.image_spans if stop > e.num_computed_tokens)
        return max([min(self.min_chunk, sum(e.remaining_prefill for e in left)), *images])
