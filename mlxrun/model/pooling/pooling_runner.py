"""Computes batches of texts: token states by a decoder or an encoder, and their vectors.

Decoders compute a batch in chunks, with caches as in prefill. Causal attention never sees the padding after a
row's end. An encoder needs the whole text at once. Each text gives the same vector alone and in company,
within rounding. With one row at a time (`engine.reproducible`) it is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import PoolingBatch, StepPlan, StepResult
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.load.footprint import count_token_embeddings, count_weight_bytes
from mlxrun.model.pooling.encoders import TextBlocks
from mlxrun.model.pooling.pooler import RowPooler, VectorHead
from mlxrun.model.run.hidden_hook import HiddenStateHook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.prompt_logprobs import PrefillForward

# A forward of MiniLM's shape costs as much as 13 to 18 tokens do, beside its tokens (measured on a CPU with
# OpenBLAS). A decoder's text that adds more padding than that to a batch is faster in another forward.
CPU_PADDING = 16
PADDING = 0  # a token id that every vocabulary has; its states are ignored


@dataclass(frozen=True, slots=True)
class PoolingCheck:
    """A comparison of vectors of texts alone and in one forward. `difference`: the largest; `limit`: the
    largest that is rounding."""

    name: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # not for NaN


@dataclass(slots=True)
class BatchState:
    """A batch under way: `ids` [B, T] with padding, and the caches of its rows."""

    ids: list[list[int]]
    types: list[list[int]]
    lengths: list[int]
    pooler: RowPooler
    cache: list[Any] = field(default_factory=list)


class DecoderStates:
    """The hidden states of a text model, in chunks. `grid`: tokens of every chunk; 0: any number."""

    nbytes, num_embeddings, takes_whole_texts = 0, 0, False  # see EncoderStates

    def __init__(self, caller: ModelCaller, hook: HiddenStateHook, grid: int) -> None:
        self._caller = caller
        self._hook = hook
        self._grid = grid

    def make_cache(self) -> list[Any]:
        return self._caller.make_cache()

    def choose_stop(self, start: int, length: int, chunk: int) -> int:
        return min(length, start + (self._grid or max(chunk, 1)))

    def compute(self, state: BatchState, start: int, stop: int) -> mx.array:
        """States [B, stop - start, D]. Fills the caches."""
        ids = [row[start:stop] for row in state.ids]
        forward = PrefillForward(ids, state.cache, start, TEXT_ONLY, ())
        return self._hook.compute_hidden(forward.call)


class EncoderStates:
    """The states of an encoder. `nbytes`: of its weights; `num_embeddings`: the number of tokens with
    embeddings; `takes_whole_texts`: each text is one forward."""

    takes_whole_texts = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.nbytes = count_weight_bytes(model)
        self.num_embeddings = count_token_embeddings(model)

    def make_cache(self) -> list[Any]:
        return []

    def choose_stop(self, start: int, length: int, chunk: int) -> int:
        return length

    def compute(self, state: BatchState, start: int, stop: int) -> mx.array:
        """States [B, T, D]."""
        blocks = TextBlocks(state.lengths)
        return blocks.pad(self._model(blocks.join(state.ids), blocks.join(state.types), blocks))


TokenStates = DecoderStates | EncoderStates


class PoolingRunner:
    """Computes vectors.

    `max_rows`: texts in a batch; `max_tokens`: of a text; `max_padding`: tokens of padding that a text may
    add to a batch, None for no limit; `checks`: the comparisons at load. `nbytes`, `num_embeddings`,
    `takes_whole_texts`: see EncoderStates.
    """

    def __init__(self, states: TokenStates, head: VectorHead, max_rows: int, max_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.checks: tuple[PoolingCheck, ...] = ()
        pads = mx.default_device() == mx.cpu and not states.takes_whole_texts  # encoders: see TextBlocks
        self.max_padding = CPU_PADDING if pads else None
        self.nbytes, self.num_embeddings = states.nbytes, states.num_embeddings
        self.takes_whole_texts = states.takes_whole_texts
        self._states, self._head = states, head

    def advance(self, batch: PoolingBatch, tokens: int) -> Sequence[bytes] | None:
        """Compute up to `tokens` tokens of a batch, padding included, but at least one of each row. Once all
        are computed, return the vector of each row as float32, little-endian."""
        state = batch.state
        if not isinstance(state, BatchState):
            state = batch.state = self._start(batch.requests)
        start = batch.computed
        stop = self._states.choose_stop(start, batch.length, tokens // len(batch.requests))
        state.pooler.add(self._states.compute(state, start, stop), start)
        batch.computed = stop
        if stop < batch.length:
            mx.eval(state.pooler.list_arrays(), list_all_arrays(state.cache))
            return None
        vectors = self._head.compute(state.pooler.finish())
        return [row.tobytes() for row in np.array(vectors, dtype="<f4")]

    def compute_trial(self) -> None:
        """Compute the vector of two tokens of no request. Raises what the model raises."""
        batch = PoolingBatch((Request("trial", (PADDING, PADDING), SamplingParams(), pooled=True),))
        while self.advance(batch, 2) is None:
            pass

    def _start(self, requests: Sequence[Request]) -> BatchState:
        lengths = [len(request.prompt) for request in requests]
        most = max(lengths)
        ids = [[*r.prompt, *[PADDING] * (most - len(r.prompt))] for r in requests]
        types = [[*r.token_types, *[0] * (most - len(r.token_types))] for r in requests]
        pooler = RowPooler(self._head.modes, lengths)
        return BatchState(ids, types, lengths, pooler, self._states.make_cache())

    def close(self) -> None:
        """Drop all arrays."""
        del self._states, self._head


class IdleRunner:
    """Replaces a model runner if the model does not generate, so that the scheduler never has a request."""

    has_pending_snapshots = False
    awaits_first_tokens = False
    awaits_drafts = False

    def collect(self) -> StepResult:
        return StepResult()

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult()

    def reset(self) -> None:
        """Do nothing, since nothing is kept."""

    def compute_trial(self) -> None:
        """Do nothing, since no step fails."""

    def close(self) -> None:
        """Drop this thread's streams. Nothing can be computed afterwards."""
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()
