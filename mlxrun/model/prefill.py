"""Prefill steps: chunks of prompts, one or several in a forward, and the snapshots due after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxrun.model.adapter import Adapter
from mlxrun.model.chunk_grouping import group_chunks
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.prompt_inputs import TEXT_ONLY, PromptInputs
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.layer_caches import list_all_arrays, reserve_capacity
from mlxrun.model.sampler import Sampler
from mlxrun.model.snapshot.copier import DueSnapshots, SnapshotCopier
from mlxrun.model.step_output import LogitsBatch, RowState, compute_capacity
from mlxrun.scheduler.step_plan import PrefillChunk, SnapshotRequest, SnapshotResult

LAYERS_PER_LAUNCH = 7  # layers of a prompt that are launched together where launching takes the time
RECOMPUTE_CHUNK = 2048  # tokens of a forward that computes a prefix which could not be restored


@dataclass(slots=True)
class PrefillOutput:
    """Logits of the rows whose prompt is complete, arrays to evaluate, and snapshots (lazy until then)."""

    logits: list[LogitsBatch] = field(default_factory=list)
    arrays: list[mx.array] = field(default_factory=list)
    snapshots: list[SnapshotResult] = field(default_factory=list)


class PrefillRunner:
    """Fills the rows' own caches."""

    def __init__(self, adapter: Adapter, vocab: int, methods: ComputeMethods, copier: SnapshotCopier) -> None:
        self._adapter = adapter
        self._vocab = vocab
        self._methods = methods
        self._copier = copier

    def forward(
        self,
        chunks: Sequence[PrefillChunk],
        requests: Sequence[SnapshotRequest],
        rows: Mapping[str, RowState],
    ) -> PrefillOutput:
        """Compute the chunks, and copy what `requests` ask for as soon as a row has that many tokens."""
        output, due = PrefillOutput(), DueSnapshots(requests)
        shareable = {  # their chunks need token ids only, and sample nothing
            chunk.request_id
            for chunk in chunks
            for row in [rows[chunk.request_id]]
            if row.inputs is TEXT_ONLY and chunk.stop < len(row.tokens)
        }
        for group in group_chunks(chunks, shareable, self._methods.sharing, due.forward_ends):
            if len(group) > 1:
                self._forward_shared(group, [rows[chunk.request_id] for chunk in group])
            else:
                output.logits += self._forward_single(group[0], rows[group[0].request_id])
            for chunk in group:
                output.arrays += list_all_arrays(rows[chunk.request_id].cache)
                ready = due.pop_ready(chunk.request_id, chunk.stop)
                output.snapshots += self._copier.copy_rows(ready, lambda rid: rows[rid].view_cache())
        output.arrays += self._copier.list_arrays(output.snapshots)
        return output

    def compute_prefix(self, row: RowState, length: int) -> None:
        """Fill the row's empty cache with its first `length` tokens, and wait for them."""
        for start in range(0, length, RECOMPUTE_CHUNK):
            stop = min(start + RECOMPUTE_CHUNK, length)
            self._call_model([row.tokens[start:stop]], row.cache, start, row.inputs)
            mx.eval(list_all_arrays(row.cache))
        row.cached = length

    def _forward_single(self, chunk: PrefillChunk, row: RowState) -> list[LogitsBatch]:
        """Logits if the chunk ends the row's tokens: then nothing is left for a decode step to compute."""
        layers = LAYERS_PER_LAUNCH if self._methods.launch_first else 0
        logits = self._call_model(
            [row.tokens[chunk.start : chunk.stop]], row.cache, chunk.start, row.inputs, layers
        )
        row.cached = chunk.stop
        if chunk.stop < len(row.tokens):
            return []
        sampler = Sampler([row.sampling], self._vocab)
        return [LogitsBatch((chunk.request_id,), logits[:, -1], sampler, [chunk.stop])]

    def _forward_shared(self, chunks: Sequence[PrefillChunk], rows: Sequence[RowState]) -> None:
        """First chunks of several rows in one forward, padded on the right."""
        longest = max(chunk.stop for chunk in chunks)
        ids = [row.tokens[: c.stop] + [0] * (longest - c.stop) for row, c in zip(rows, chunks, strict=True)]
        cache = reserve_capacity(self._adapter.make_cache(), longest)
        self._call_model(ids, cache, 0, TEXT_ONLY)
        for index, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            # A row that joins the decode batch in the next step is copied then, so it needs no copy now.
            joins_next = self._methods.decode != "row_by_row" and chunk.stop == len(row.tokens) - 1
            own = layer_caches.split_row(cache, index, chunk.stop, copied=not joins_next)
            row.cache = reserve_capacity(own, compute_capacity(row.tokens, row.params))
            row.cached = chunk.stop

    def _call_model(
        self, ids: list[list[int]], cache: list[Any], start: int, inputs: PromptInputs, layers: int = 0
    ) -> mx.array:
        """Logits of prompt tokens, which fill `cache`. `layers`: launch so many at a time; 0: none yet."""
        with use_engine_attention(layers):
            return self._adapter.prefill(mx.array(ids), cache, start, inputs)
