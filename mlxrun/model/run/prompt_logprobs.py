"""Logprobs of prompt tokens, computed with the chunks of their prompts.

The logits of a token give the logprob of the next one. They are made for a slice of tokens at a time, and
reduced at once to a few float32 numbers a token. So the logits of a whole chunk are never in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlxrun.core.request import Request, TokenLogprob
from mlxrun.core.step_plan import PrefillChunk, PromptLogprobs
from mlxrun.model.hooks.quantized_layers import bound_transients
from mlxrun.model.kv.ragged.layer_caches import flatten_caches
from mlxrun.model.run.hidden_hook import HiddenStateHook, find_hidden_hook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY, PromptInputs
from mlxrun.model.run.sampler import add_exponentials

SLICE_BYTES = 1 << 25  # of float32 logits in a slice, and in all slices that are not evaluated yet
MIN_SLICE_BYTES = 1 << 22  # the same for a model of few weights, beside which 32 MB would be much
WEIGHTS_SHARE = 8
MAX_SLICE, MIN_SLICE = 256, 8  # tokens


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Which tokens of a row's prompt get a logprob, and how many of the likeliest tokens with it."""

    prompt: tuple[int, ...]
    first: int
    count: int
    image_spans: tuple[tuple[int, int], ...]

    @classmethod
    def start(cls, request: Request) -> RowLogprobs | None:
        """The wanted logprobs of a request; None if it wants none of its prompt."""
        count = request.params.prompt_logprobs
        if count is None:
            return None
        return cls(request.prompt, max(request.logprobs_from, 1), max(count, 1), request.image_spans)

    def list_positions(self, start: int, stop: int) -> list[int]:
        """The tokens whose logprobs follow from a chunk [start, stop)."""
        positions = range(max(self.first, start + 1), min(stop + 1, len(self.prompt)))
        inside = [range(*span) for span in self.image_spans if span[0] <= stop and span[1] > start]
        if not inside:
            return list(positions)
        return [at for at in positions if not any(at in span for span in inside)]


@dataclass(frozen=True, slots=True)
class LogprobPart:
    """A chunk of one row in a forward. `index`: of the row in the forward."""

    index: int
    chunk: PrefillChunk
    logprobs: RowLogprobs


@dataclass(frozen=True, slots=True)
class PrefillForward:
    """The arguments of a forward. `ids` [rows, n]; `adapters`: the numbers of the LoRA adapters, one for each
    row or each token; `layers`: how many are launched at a time, 0: none yet. `dummies`: tokens that are
    computed behind each row and dropped; all layers must be KV."""

    ids: list[list[int]]
    cache: list[Any]
    start: int
    inputs: PromptInputs
    adapters: Sequence[int]
    layers: int = 0
    dummies: int = 0

    def call(self, caller: ModelCaller) -> mx.array:
        """Logits [rows, n, V]."""
        rows = caller.row_adapters.use(self.adapters)
        with caller.use_attention(self.layers), bound_transients(), rows:
            ids = [row + [0] * self.dummies for row in self.ids]
            logits = caller.prefill(mx.array(ids), self.cache, self.start, self.inputs)
        if not self.dummies:
            return logits
        for layer in flatten_caches(self.cache):
            layer.trim(self.dummies)
        return logits[:, : -self.dummies]


@dataclass(frozen=True, slots=True)
class LogprobSlice:
    """Lazy logprobs of some tokens: `logprobs` and `ranks` [n], `top_ids` and `top_logprobs` [n, k], best
    first. `tokens`: request and position of each."""

    tokens: Sequence[tuple[str, int]]
    logprobs: mx.array
    ranks: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    def list_arrays(self) -> list[mx.array]:
        return [self.logprobs, self.ranks, self.top_ids, self.top_logprobs]


@dataclass(frozen=True, slots=True)
class LogprobForward:
    """The results of a forward: logprobs, and logits [rows, V] of the last token. `hidden` [rows, D]: of that
    token, if a head drafts."""

    slices: list[LogprobSlice]
    last: mx.array
    hidden: mx.array | None = None


def choose_slice_bytes(weights: int) -> int:
    """The most bytes of logits in memory at a time. `weights`: bytes of the model's weights."""
    return min(SLICE_BYTES, max(MIN_SLICE_BYTES, weights // WEIGHTS_SHARE))


class PromptLogprobReader:
    """Computes forwards with logprobs. `slice_bytes`: bytes of logits in memory at a time. `aligned`: slices
    begin at fixed places of a chunk, and a chunk is always one forward. So its logprobs do not depend on
    which are wanted."""

    def __init__(self, caller: ModelCaller, vocab: int, slice_bytes: int, *, aligned: bool) -> None:
        self._caller = caller
        self._slice_bytes = slice_bytes
        self._size = max(MIN_SLICE, min(MAX_SLICE, slice_bytes // (4 * vocab)))
        self._aligned = aligned
        self._unevaluated: list[mx.array] = []
        self._unevaluated_bytes = 0

    @cached_property
    def hook(self) -> HiddenStateHook | None:
        """The hook of the hidden states, searched when the first prompt wants logprobs."""
        return find_hidden_hook(self._caller)

    def forward(self, forward: PrefillForward, parts: Sequence[LogprobPart]) -> LogprobForward:
        """Compute a forward, which fills its caches, and the logprobs of these parts of it."""
        if self.hook is not None:
            return self._read_hidden(self.hook, forward, parts)
        if not self._aligned and forward.inputs is TEXT_ONLY and len(forward.ids) == 1:
            return self._read_small_forwards(forward, parts[0])
        logits = forward.call(self._caller)
        flat = logits.reshape(-1, logits.shape[-1])
        slices = [self.reduce_logits(_take(flat, rows), at, parts) for rows, at in self._cut(forward, parts)]
        return LogprobForward(slices, logits[:, -1])

    def _read_hidden(
        self, hook: HiddenStateHook, forward: PrefillForward, parts: Sequence[LogprobPart]
    ) -> LogprobForward:
        def compute_logits(hidden: mx.array, ids: list[int], adapters: Sequence[int]) -> mx.array:
            part = PrefillForward([ids], forward.cache, forward.start, forward.inputs, adapters)
            return hook.compute_logits(hidden[None], part.call)[0]

        hidden = hook.compute_hidden(forward.call)
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), [token for row in forward.ids for token in row]
        adapters = [number for number in forward.adapters for _ in forward.ids[0]]
        slices = []
        for rows, tokens in self._cut(forward, parts):
            own = [adapters[i] for i in rows] if adapters else ()
            logits = compute_logits(_take(flat, rows), [ids[i] for i in rows], own)
            slices.append(self.reduce_logits(logits, tokens, parts))
        last = compute_logits(hidden[:, -1], [row[-1] for row in forward.ids], forward.adapters)
        return LogprobForward(slices, last)

    def _read_small_forwards(self, forward: PrefillForward, part: LogprobPart) -> LogprobForward:
        (ids,), chunk = forward.ids, part.chunk
        slices: list[LogprobSlice] = []
        for start in range(0, len(ids), self._size):
            part_ids = ids[start : start + self._size]
            first = forward.start + start
            small = PrefillForward([part_ids], forward.cache, first, forward.inputs, forward.adapters)
            own = LogprobPart(0, PrefillChunk(chunk.request_id, first, first + len(part_ids)), part.logprobs)
            logits = small.call(self._caller)[0]
            slices += [
                self.reduce_logits(_take(logits, rows), tokens, [own])
                for rows, tokens in self._cut(small, [own])
            ]
        return LogprobForward(slices, logits[-1:])

    def _cut(
        self, forward: PrefillForward, parts: Sequence[LogprobPart]
    ) -> Iterator[tuple[list[int], list[tuple[str, int]]]]:
        """Slices: the rows of flattened logits, and the tokens that they predict."""
        width = len(forward.ids[0])
        rows: list[int] = []
        tokens: list[tuple[str, int]] = []
        for part in parts:
            chunk = part.chunk
            offset = part.index * width - chunk.start - 1
            wanted = part.logprobs.list_positions(chunk.start, chunk.stop)
            if self._aligned:
                wanted = self._align(wanted, chunk)
            rows += [offset + at for at in wanted]
            tokens += [(chunk.request_id, at) for at in wanted]
        for at in range(0, len(rows), self._size):
            yield rows[at : at + self._size], tokens[at : at + self._size]

    def _align(self, wanted: Sequence[int], chunk: PrefillChunk) -> list[int]:
        """The tokens of all aligned slices of a chunk that have a wanted one."""
        numbers = sorted({(at - chunk.start - 1) // self._size for at in wanted})
        return [
            at
            for number in numbers
            for at in range(chunk.start + number * self._size + 1, chunk.stop + 1)[: self._size]
        ]

    def reduce_logits(
        self, logits: mx.array, tokens: Sequence[tuple[str, int]], parts: Sequence[LogprobPart]
    ) -> LogprobSlice:
        """The logprobs of one slice of logits [rows, V], for the tokens of `tokens` in the same order."""
        by_request = {part.chunk.request_id: part.logprobs for part in parts}
        own = [(by_request[rid], at) for rid, at in tokens]
        # A slice that is aligned may end after the prompt; nothing is read of that.
        targets = [wanted.prompt[at] if at < len(wanted.prompt) else 0 for wanted, at in own]
        count = max(wanted.count for wanted, _ in own)
        part = LogprobSlice(tokens, *compute_logprobs(logits, mx.array(targets), count))
        self.bound_memory(part, 4 * logits.size)
        return part

    def bound_memory(self, part: LogprobSlice, nbytes: int) -> None:
        """Evaluate earlier slices before their logits and those of `part` are too many: MLX would have them
        all in memory at the same time."""
        if self._unevaluated and self._unevaluated_bytes + nbytes > self._slice_bytes:
            mx.eval(self._unevaluated)
            self._unevaluated, self._unevaluated_bytes = [], 0
        self._unevaluated += part.list_arrays()
        self._unevaluated_bytes += nbytes


def compute_logprobs(
    logits: mx.array, targets: mx.array, count: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Reduce logits [n, V] to the logprobs and ranks [n] of `targets` [n], and to the ids and logprobs [n, k]
    of the likeliest tokens. These are `count` or V tokens, best first. Ties go to the lowest id, since MLX's
    sorts and partitions are stable."""
    raw = logits.astype(mx.float32)
    total = add_exponentials(raw)
    own = mx.take_along_axis(raw, targets[:, None], axis=-1)
    chosen, ranks = (own - total)[:, 0], 1 + mx.sum(raw > own, axis=-1)
    width = raw.shape[-1]
    if count == 1:
        ids = mx.argmax(raw, axis=-1, keepdims=True)
    elif count < width:
        found = mx.sort(mx.argpartition(-raw, count, axis=-1)[:, :count], axis=-1)
        order = mx.argsort(-mx.take_along_axis(raw, found, axis=-1), axis=-1)
        ids = mx.take_along_axis(found, order, axis=-1)
    else:
        ids = mx.argsort(-raw, axis=-1)
    return chosen, ranks, ids, mx.take_along_axis(raw, ids, axis=-1) - total


def read_prompt_logprobs(
    slices: Sequence[LogprobSlice], left_out: Collection[str] = ()
) -> tuple[PromptLogprobs, ...]:
    """The logprobs as Python numbers, each request's in order of position. Waits for them. `left_out`:
    requests whose logprobs are not read."""
    found: dict[str, dict[int, TokenLogprob]] = {}
    for part in slices:
        rows = zip(*(array.tolist() for array in part.list_arrays()), strict=True)
        for (rid, at), (logprob, rank, ids, values) in zip(part.tokens, rows, strict=True):
            if rid not in left_out:
                top = tuple(zip(ids, values, strict=True))
                found.setdefault(rid, {})[at] = TokenLogprob(logprob, top, rank)
    return tuple(run for rid, logprobs in found.items() for run in _list_runs(rid, logprobs))


def _list_runs(request_id: str, logprobs: Mapping[int, TokenLogprob]) -> Iterator[PromptLogprobs]:
    """Logprobs by position, as runs of consecutive tokens."""
    positions = sorted(logprobs)
    starts = [at for at in positions if at - 1 not in logprobs]
    for start in starts:
        stop = start
        while stop in logprobs:
            stop += 1
        yield PromptLogprobs(request_id, start, tuple(logprobs[at] for at in range(start, stop)))


def _take(flat: mx.array, rows: Sequence[int]) -> mx.array:
    """These rows of an array; a view if they are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return flat[rows[0] : rows[-1] + 1]
    return flat[mx.array(list(rows))]
