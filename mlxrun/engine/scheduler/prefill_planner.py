"""The prompt chunks of a step, within its budget of tokens, and the snapshots to take of them."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.core.step_plan import PrefillChunk, SnapshotRequest
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.token_budget import TokenBudget
from mlxrun.engine.scheduler.waiting_queue import WaitingQueue

# Tokens that the rows of a step may hold already, beside the first one's. After a long prefix that they share
# the rest of each prompt is short, and a step would have a copy of the prefix for each.
HELD_TOKENS = 1 << 14


class PrefillPlanner:
    """`chunk`: distance of the grid points, in tokens. `aligned_chunks`: see Scheduler."""

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
    ) -> tuple[list[PrefillChunk], list[SnapshotRequest]]:
        """Chunks of the running requests in `queue`, which has all requests with prefill left, in order. Only
        the first chunk is shortened to fit the budget: short chunks cost more forwards than they save."""
        chunks: list[PrefillChunk] = []
        snapshots: list[SnapshotRequest] = []
        picked, is_shared = self._waiting_queue.pick_for_step([s for s in queue if s.running], self._chunk)
        if not picked:
            return chunks, snapshots
        depth = 0 if self._aligned_chunks else picked[0].num_computed_tokens
        budget = self._token_budget.compute_prefill_budget(running, num_decoding, len(queue), depth)
        budget = min(budget, self._chunk) if is_shared else budget
        images = None if self._aligned_chunks else self._token_budget.pace.limit_images()
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
                stop = state.find_chunk_end(self._chunk, max_tokens, images)
                chunk = PrefillChunk(state.id, start, stop, state.count_images(start, stop))
                exceeds = stop - start > budget or (images is not None and chunk.images > images)
                if exceeds and chunks:  # the first chunk may exceed the budget: a large image
                    return chunks, snapshots
                chunks.append(chunk)
                budget -= stop - start
                images = None if images is None else max(0, images - chunk.images)
                self._waiting_queue.record_served(state, stop - start)
                state.record_prefill(stop)
                snapshots += self._prefix_cache.plan_snapshots(state.id, start, stop, state.prefill_target)
                if self._prefix_cache.survives_restart and stop % self._chunk == 0:
                    break
        return chunks, snapshots
