"""Prefill steps: chunks of prompts, one or several in a forward, and the snapshots due after them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxrun.core.request import find_chunk_stop
from mlxrun.core.step_plan import PrefillChunk, SnapshotRequest, SnapshotResult
from mlxrun.model.hooks.device_attention import count_dummies
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import (
    FilledTogether,
    flatten_caches,
    list_all_arrays,
    reserve_capacity,
)
from mlxrun.model.kv.snapshot.copier import DueSnapshots, SnapshotCopier
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.run.chunk_grouping import group_chunks
from mlxrun.model.run.compute_methods import ComputeMethods, uses_pages
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.prompt_logprobs import (
    LogprobForward,
    LogprobPart,
    LogprobSlice,
    PrefillForward,
    PromptLogprobReader,
    choose_slice_bytes,
)
from mlxrun.model.run.sampler import Sampler
from mlxrun.model.run.step_output import LogitsBatch, RunningRow, compute_capacity
from mlxrun.model.speculation.mtp_source import MTPSource

LAYERS_PER_LAUNCH = 7  # layers of a prompt that are launched together where launching takes the time
RECOMPUTE_CHUNK = 2048  # tokens of a forward that computes a prefix which could not be restored


@dataclass(slots=True)
class PrefillOutput:
    """Logits of the rows with complete prompts, arrays to evaluate, and snapshots (lazy until then)."""

    logits: list[LogitsBatch] = field(default_factory=list)
    arrays: list[mx.array] = field(default_factory=list)
    snapshots: list[SnapshotResult] = field(default_factory=list)
    prompt_logprobs: list[LogprobSlice] = field(default_factory=list)


class PrefillRunner:
    """Computes chunks into the rows' own caches. `mtp`: a head that drafts and wants the hidden states of
    prompts."""

    def __init__(
        self,
        caller: ModelCaller,
        vocab: int,
        methods: ComputeMethods,
        copier: SnapshotCopier,
        mtp: MTPSource | None = None,
    ) -> None:
        self._caller = caller
        self._mtp = mtp
        self._vocab = vocab
        self._methods = methods
        self._copier = copier
        self._layers = LAYERS_PER_LAUNCH if methods.launch_first else 0
        kinds = {layer_caches.get_kind(layer) for layer in flatten_caches(caller.make_cache())}
        self._has_only_keys = kinds == {layer_caches.LayerKind.KV}
        slice_bytes = choose_slice_bytes(count_weight_bytes(caller.model))
        self._logprob_reader = PromptLogprobReader(
            caller, vocab, slice_bytes, aligned=methods.fixed_width > 0
        )

    def forward(
        self,
        chunks: Sequence[PrefillChunk],
        requests: Sequence[SnapshotRequest],
        rows: Mapping[str, RunningRow],
    ) -> PrefillOutput:
        """Compute the chunks, whose images are encoded. Copy what `requests` ask for as soon as a row has
        that many tokens."""
        output, due = PrefillOutput(), DueSnapshots(requests)
        if not chunks:
            return output
        shareable = {c.request_id for c in chunks if self._is_shareable(c, rows[c.request_id])}
        ends = {rid: len(row.tokens) - 1 for rid, row in rows.items() if row.ends_unsampled}
        for group in group_chunks(chunks, shareable, self._methods.sharing, due.forward_ends, ends):
            if len(group) > 1:
                output.prompt_logprobs += self._forward_shared(
                    group, [rows[chunk.request_id] for chunk in group]
                )
            else:
                self._forward_single(group[0], rows[group[0].request_id], output)
            for chunk in group:
                ready = due.pop_ready(chunk.request_id, chunk.stop)
                output.snapshots += self._copier.copy_rows(ready, lambda rid: rows[rid].view_cache())
        # Not those after earlier chunks of a row: they would stay in memory until the step is collected.
        computed = [rows[rid] for rid in dict.fromkeys(chunk.request_id for chunk in chunks)]
        caches = [row.cache if row.together is None else row.together.cache for row in computed]
        for cache in {id(cache): cache for cache in caches}.values():
            output.arrays += list_all_arrays(cache)
        output.arrays += self._copier.list_arrays(output.snapshots)
        output.arrays += [array for part in output.prompt_logprobs for array in part.list_arrays()]
        return output

    def _is_shareable(self, chunk: PrefillChunk, row: RunningRow) -> bool:
        """Whether a chunk needs token ids only and samples nothing, and its logprobs take no small
        forwards."""
        if self._methods.library_chunks and chunk.stop >= row.prompt_length:
            return False
        needs_ids_only = row.inputs is TEXT_ONLY and (chunk.stop < len(row.tokens) or row.ends_unsampled)
        return needs_ids_only and (not _list_parts([chunk], [row]) or self._logprob_reader.hook is not None)

    def compute_prefix(self, row: RunningRow, length: int) -> None:
        """Fill the row's empty cache with its first `length` tokens, and wait for them. In reproducible mode
        the chunks are those of a prompt without a hit. Images are never split."""
        grid = self._methods.grid if self._methods.grid > 1 else RECOMPUTE_CHUNK
        stop = 0
        while stop < length:
            start = stop
            stop = find_chunk_stop(start, min((start // grid + 1) * grid, length), row.image_spans)
            row.inputs = self._caller.encode_images(row.inputs, stop)
            ids = [row.tokens[start:stop]]
            self._call_model(PrefillForward(ids, row.cache, start, row.inputs, (row.adapter,)))
            mx.eval(list_all_arrays(row.cache))
        row.cached = length

    def compute_trial(self) -> None:
        """Compute two tokens in caches of their own, and wait for them."""
        cache, adapters = self._caller.make_cache(), (self._caller.row_adapters.find(None),)
        logits = PrefillForward([[1, 1]], cache, 0, TEXT_ONLY, adapters).call(self._caller)
        mx.eval(logits, list_all_arrays(cache))

    def _forward_single(self, chunk: PrefillChunk, row: RunningRow, output: PrefillOutput) -> None:
        """Add the logprobs of the chunk to `output`, and logits if it ends the row's tokens: then nothing is
        left for a decode step to compute."""
        for part in self._split_chunk(chunk, row):
            ids, parts = [row.tokens[part.start : part.stop]], _list_parts([part], [row])
            dummies = self._count_dummies(row.cache, part.start, part.stop)
            dummies = dummies if row.inputs is TEXT_ONLY and not parts else 0
            adapters, layers = (row.adapter,), self._layers
            forward = PrefillForward(ids, row.cache, part.start, row.inputs, adapters, layers, dummies)
            done = self._call_model(forward, parts, [part], [row])
            output.prompt_logprobs += done.slices
        row.cached = chunk.stop
        if chunk.stop == len(row.tokens) and not row.ends_unsampled:
            own, sampler = (chunk.request_id,), Sampler([row.sampling], self._vocab)
            output.logits.append(LogitsBatch(own, done.last, sampler, [chunk.stop], hidden=done.hidden))

    def _count_dummies(self, cache: Sequence[Any], start: int, stop: int) -> int:
        """Dummy tokens behind a chunk. They cost less than what each layer's attention would add on CUDA."""
        if not (self._methods.launch_first and self._methods.sharing.max_padded) or self._mtp is not None:
            return 0
        count, layers = count_dummies(start, stop - start), flatten_caches(cache)
        fits = all(layer.keys is None or stop + count <= layer.keys.shape[2] for layer in layers)
        return count if self._has_only_keys and fits else 0

    def _split_chunk(self, chunk: PrefillChunk, row: RunningRow) -> list[PrefillChunk]:
        """The forwards of a chunk: one, or as the library computed them first for tokens that the row had
        decoded before it was preempted, where that matters."""
        if not self._methods.library_chunks:
            return [chunk]
        first = row.prompt_length - (not self._methods.whole_prompts)  # that the library computes by itself
        decoded = max(chunk.start, min(first, chunk.stop))
        edges = [chunk.start, *range(max(decoded, chunk.start + 1), chunk.stop), chunk.stop]
        return [PrefillChunk(chunk.request_id, a, b) for a, b in itertools.pairwise(edges)]

    def _forward_shared(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[RunningRow]
    ) -> list[LogprobSlice]:
        """Chunks of several rows, which begin at the same position, in one forward, padded on the right.
        Returns their logprobs."""
        start, longest = chunks[0].start, max(chunk.stop for chunk in chunks)
        ids = [
            row.tokens[start : c.stop] + [0] * (longest - c.stop) for row, c in zip(rows, chunks, strict=True)
        ]
        parts, dummies = _list_parts(chunks, rows), self._count_dummies((), start, longest)
        dummies = 0 if parts else dummies
        if start:
            cache = layer_caches.stack_rows([row.cache for row in rows], longest + dummies - start)
        else:
            cache = reserve_capacity(self._caller.make_cache(), longest + dummies)
        adapters = tuple(row.adapter for row in rows)
        forward = PrefillForward(ids, cache, start, TEXT_ONLY, adapters, self._layers, dummies)
        done = self._call_model(forward, parts, chunks, rows)
        for index, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            # A row that joins the decode batch in the next step is copied then, so it needs no copy now; a
            # row that never decodes is freed.
            is_freed = row.ends_unsampled or self._methods.decode != "row_by_row"
            copied = not (is_freed and chunk.stop == len(row.tokens) - 1)
            own = layer_caches.split_row(cache, index, chunk.stop, copied=copied)
            row.cache = reserve_capacity(own, compute_capacity(row.tokens, row.params))
            row.cached = chunk.stop
            if not copied and uses_pages(self._methods.decode):
                row.together = FilledTogether(cache, index, chunk.stop)
        return done.slices

    def _call_model(
        self,
        forward: PrefillForward,
        parts: Sequence[LogprobPart] = (),
        chunks: Sequence[PrefillChunk] = (),
        rows: Sequence[RunningRow] = (),
    ) -> LogprobForward:
        """Compute a forward of these chunks; the head that drafts does not see those that are read for
        logprobs."""
        if parts:
            return self._logprob_reader.forward(forward, parts)
        if self._mtp is None:
            return LogprobForward([], forward.call(self._caller)[:, -1])
        logits, hidden = self._mtp.call_prefill(forward)
        for index, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            self._mtp.read_chunk(chunk, hidden[index], row.tokens)
        return LogprobForward([], logits[:, -1], hidden[:, -1])


def _list_parts(chunks: Sequence[PrefillChunk], rows: Sequence[RunningRow]) -> list[LogprobPart]:
    """The chunks of a forward that have wanted tokens; each row has one chunk."""
    return [
        LogprobPart(index, chunk, row.logprobs)
        for index, (chunk, row) in enumerate(zip(chunks, rows, strict=True))
        if row.logprobs is not None and row.logprobs.list_positions(chunk.start, chunk.stop)
    ]
