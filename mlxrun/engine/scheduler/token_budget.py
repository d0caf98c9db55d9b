"""Decides how many prompt tokens a step computes, in which chunks, and which rows fit in memory.

The prefix cache gives way to rows, and the budget of a step shrinks before a request has to wait. The
scheduler preempts rows that outgrow the memory, least urgent first.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.config.settings import SchedulerSettings
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.core.step_plan import PrefillChunk, SnapshotRequest, StepCosts
from mlxrun.engine.scheduler.prefill_pace import PrefillPace
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.waiting_queue import WaitingQueue

# Admission reserves memory for this many output tokens. If rows outgrow the memory later, some are preempted.
DECODE_RESERVE = 256
MIN_DEEP_CHUNK = 4  # tokens; smaller chunks would cost more forwards than they save


class TextMemory:
    """The memory of pooled texts, which are computed between the steps of rows. The base class: no texts."""

    wanted_bytes = 0  # of a text that waits for memory; no row is admitted into them

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that are being computed."""
        return 0


class TokenBudget:
    """Limits the prompt tokens and the memory of a step. `min_chunk`: prompt tokens of the smallest step that
    a shortage of memory may lead to."""

    def __init__(
        self,
        settings: SchedulerSettings,
        chunk: int,
        min_chunk: int,
        memory: MemoryBudget,
        prefix_cache: PrefixCacheInterface,
        costs: StepCosts,
    ) -> None:
        self.min_chunk = min_chunk
        self._memory = memory
        self._prefix_cache = prefix_cache
        self._max_tokens = settings.prefill_budget
        self._max_tokens_busy = settings.prefill_budget_busy or chunk
        self.costs = costs
        self.texts = TextMemory()  # what shares the memory with rows
        self.shared_tokens = 0  # of decoding rows, in memory that another row counts
        self.pace = PrefillPace(settings.step_ms or 0, chunk, min_chunk, costs)

    def can_admit(self, running: Sequence[RequestState], state: RequestState, use_cache: bool = True) -> bool:
        """Whether a request fits beside the running ones. `use_cache`: see fits_memory."""
        reserve = min(state.remaining_output, DECODE_RESERVE)
        lengths, decoding = list_lengths(running)
        lengths.append(state.expected_length + reserve)
        tokens = self._compute_min_prefill([*running, state])
        return self.fits_memory(lengths, tokens, use_cache, decoding, self.texts.wanted_bytes)

    def can_start_texts(self, running: Sequence[RequestState], nbytes: int) -> bool:
        """Whether texts of `nbytes` bytes fit beside the running requests. The prefix cache is shrunk for
        them."""
        lengths, decoding = list_lengths(running, DECODE_RESERVE)
        return self.fits_memory(lengths, self._compute_min_prefill(running), True, decoding, nbytes)

    @property
    def is_shared_with_texts(self) -> bool:
        """Whether texts hold memory or wait for it."""
        return self.texts.held_bytes > 0 or self.texts.wanted_bytes > 0

    def fits_next_step(self, running: Sequence[RequestState]) -> bool:
        """Whether the running requests can take one more step. Each token of a draft also needs a recurrent
        state."""
        lengths, decoding = list_lengths(running)
        states = self._memory.footprint.fixed * sum(len(state.draft) for state in running)
        tokens = self._compute_min_prefill(running)
        return self.fits_memory(lengths, tokens, decoding=decoding, besides=states)

    def record_leaving(self, state: RequestState) -> None:
        """Note that a row leaves before the next step says what the others share. It shared at most its own
        tokens."""
        if state.joined:
            self.shared_tokens = max(self.shared_tokens - state.projected_length, 0)

    def fits_memory(
        self,
        lengths: Sequence[int],
        prefill_tokens: int,
        use_cache: bool = True,
        decoding: Sequence[int] = (),
        besides: int = 0,
    ) -> bool:
        """Whether rows fit beside a step of `prefill_tokens` prompt tokens and the prefix cache, which is
        shrunk if necessary. `decoding`: lengths of rows in the decode batch; `lengths`: of the others.
        `use_cache` False: as if the cache were empty, without shrinking it. `besides`: bytes besides these
        and the texts in progress."""
        spare = self._memory.compute_spare_bytes(lengths, prefill_tokens, decoding)
        if spare is None:
            return True
        spare -= self.texts.held_bytes + besides
        most = sum(decoding) - max(decoding, default=0)  # what a row shares counts once, as long as it runs
        spare += self._memory.footprint.per_token * min(self.shared_tokens, most)
        if not use_cache:
            return spare >= 0
        if self._prefix_cache.nbytes > spare >= 0:
            self._prefix_cache.shrink(spare)
        return self._prefix_cache.nbytes <= spare

    def compute_prefill_budget(
        self, running: Sequence[RequestState], decoding: int, waiting: int, depth: int = 0
    ) -> int:
        """The prompt tokens of this step. `decoding`: number of rows; `waiting`: number of prompts with
        tokens left to compute; `depth`: computed tokens of the step's first prompt.

        A step delays all decoding rows and serves the waiting prompts, so its size follows the ratio of the
        two. It is limited by the time of a step, and shrinks if memory is short, down to `min_chunk`.
        """
        budget = self._max_tokens
        if decoding:
            weight = max(waiting * self.costs.waiting_weight, decoding)
            budget = min(budget, self._limit_for_depth(self._max_tokens_busy * weight // decoding, depth))
        budget = self.pace.limit_tokens(budget, decoding > 0, lone=not decoding and waiting == 1)
        lengths, others = list_lengths(running)
        while budget > self.min_chunk and not self.fits_memory(lengths, budget, decoding=others):
            budget = max(budget // 2, self.min_chunk)
        if len(running) == 1:
            self._release_pinned_memory(lengths, budget, others)
        return budget

    def _release_pinned_memory(
        self, lengths: Sequence[int], prefill_tokens: int, decoding: Sequence[int]
    ) -> None:
        """Let pinned prefixes give way to a request that runs alone: nothing else could make room for it."""
        if not self.fits_memory(lengths, prefill_tokens, decoding=decoding):
            spare = self._memory.compute_spare_bytes(lengths, prefill_tokens, decoding)
            self._prefix_cache.release_pinned_memory(max(0, (spare or 0) - self.texts.held_bytes))

    def _limit_for_depth(self, budget: int, depth: int) -> int:
        """The budget with which chunks of a deep prompt cost about the same at every depth."""
        deep = self.costs.deep_prompt
        if not deep or depth <= deep:
            return budget
        return max(min(budget, MIN_DEEP_CHUNK), budget * deep // depth)

    def _compute_min_prefill(self, running: Sequence[RequestState]) -> int:
        """Prompt tokens of the smallest step: a minimal chunk, or an image if that is larger."""
        left = [s for s in running if s.remaining_prefill]
        spans = ((s, span) for s in left for span in s.request.image_spans)
        images = [stop - start for s, (start, stop) in spans if stop > s.num_computed_tokens]
        return max([min(self.min_chunk, sum(s.remaining_prefill for s in left)), *images])


def list_lengths(states: Sequence[RequestState], reserve: int = 0) -> tuple[list[int], list[int]]:
    """Tokens, and at most `reserve` that they may still get, of the rows with caches of their own, and of
    those in the decode batch. A row that joins it in the next step counts as the former: many may join at
    once, and each is quantized only then."""
    lengths: tuple[list[int], list[int]] = [], []
    for state in states:
        more = min(state.remaining_output, reserve) if reserve else 0
        lengths[state.joined].append(state.projected_length + more)
    return lengths


# Tokens that the rows of a step may hold already, beside the first one's. After a long prefix that they share
# the rest of each prompt is short, and a step would have a copy of the prefix for each.
HELD_TOKENS = 1 << 14


class PrefillPlanner:
    """Splits prompts into chunks. `chunk`: distance of the grid points, in tokens. `aligned_chunks`: see
    Scheduler."""

    def __init__(
        self,
        waiting_queue: WaitingQueue,
        token_budget: TokenBudget,
        prefix_cache: PrefixCacheInterface,
        chunk: int,
        aligned_chunks: bool,
    ) -> None:
        self._waiting_queue = waiting_queue
        self._token_budget = token_budget
        self._prefix_cache = prefix_cache
        self._chunk = chunk
        self._aligned_chunks = aligned_chunks

    def plan_chunks(
        self, queue: Sequence[RequestState], running: Sequence[RequestState], num_decoding: int
    ) -> tuple[list[PrefillChunk], list[SnapshotRequest], list[str]]:
        """The chunks of the running requests in `queue`, the snapshots after them, and the requests whose
        next chunk waits for images. `queue` has all requests with prefill left, in order. Only the first
        chunk is shortened to fit the budget, since short chunks cost more forwards than they save."""
        chunks: list[PrefillChunk] = []
        snapshots: list[SnapshotRequest] = []
        blocked: list[str] = []
        picked, is_shared = self._waiting_queue.pick_for_step([s for s in queue if s.running], self._chunk)
        if not picked:
            return chunks, snapshots, blocked
        depth = 0 if self._aligned_chunks else picked[0].num_computed_tokens
        budget = self._token_budget.compute_prefill_budget(running, num_decoding, len(queue), depth)
        budget = min(budget, self._chunk) if is_shared else budget
        held = -picked[0].num_computed_tokens
        for state in picked:
            held += state.num_computed_tokens
            if held > HELD_TOKENS:
                break
            while state.remaining_prefill and budget > 0:
                start = state.num_computed_tokens
                max_tokens = self._chunk
                if not (self._aligned_chunks or chunks):
                    max_tokens = self._token_budget.costs.limit_chunk(state.remaining_prefill, budget)
                stop = state.find_chunk_end(self._chunk, max_tokens)
                if state.num_ready is not None and stop > state.num_ready:
                    blocked.append(state.id)
                    break
                if stop - start > budget and chunks:  # the first chunk may exceed the budget: a large image
                    return chunks, snapshots, blocked
                chunks.append(PrefillChunk(state.id, start, stop))
                budget -= stop - start
                self._waiting_queue.record_served(state, stop - start)
                state.record_prefill(stop)
                snapshots += self._prefix_cache.plan_snapshots(state.id, start, stop, state.prefill_target)
                if self._prefix_cache.survives_restart and stop % self._chunk == 0:
                    break
        return chunks, snapshots, blocked
