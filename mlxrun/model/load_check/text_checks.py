"""The checks of text: prompts in chunks, rows in one batch, shared forwards, restored snapshots, drafts.

Each method computes the reference's prompts in another way, and returns logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxrun.core.request import HitKind
from mlxrun.core.step_plan import CacheHit
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind, RowView
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.kv.snapshot.snapshots import Payload, SnapshotCodec
from mlxrun.model.load_check.attention_checks import KernelCheck
from mlxrun.model.load_check.reference import STEPS, Reference
from mlxrun.model.load_check.rounding import CheckLogits
from mlxrun.model.run.compute_methods import ComputeMethods, DecodeMethod, make_decode_batch
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

SHORTEST = 8  # so that the rows make two row groups, and the first moves from one to the other
COPIED_STEP = 1  # or the last but one: the step after which a decoding row is copied out of the batch
# Forwards with drafts: by row, the tokens that it takes, and how many of them are kept. A row that is not
# named has left. Each row takes the load check's answer, wherever that is kept.
FORWARDS = ({0: (2, 2), 1: (3, 1), 2: (3, 3)}, {0: (1, 1), 1: (2, 1)}, {1: (1, 1)})
MOST_ROWS = max(sum(count for count, _ in blocks.values()) for blocks in FORWARDS)
CopiedRow = tuple[int, list[tuple[int, int, Payload]], Payload | None]  # tokens, deltas, state


class TextChecks:
    """Computes the reference's prompts. `snapshots`: whether rows are copied for the prefix cache. `kernel`:
    the check of the attention kernel of pages, None if there is no kernel."""

    def __init__(self, reference: Reference, snapshots: bool, kernel: KernelCheck | None = None) -> None:
        self.reference = reference
        self._kernel = kernel
        self._caller = reference.caller
        self._prompts = reference.prompts
        self._rows = range(len(self._prompts))
        self._longest = max(self._rows, key=lambda i: len(self._prompts[i]))
        self._sharing = self._rows[1:]  # the shortest prompt and the longest one
        self.codec = SnapshotCodec(reference.copy_filled(self._longest)) if snapshots else None
        self.copied: CopiedRow | Exception | None = None  # row 0, while it decoded

    # -- prompts in chunks ------------------------------------------------------------------------------

    def prefill(self, split: bool) -> CheckLogits:
        """The longest prompt at once, or `split` in chunks of different sizes. The second chunk begins in a
        window that is not full, the others after a full one."""
        prompt, (cache, first) = self._prompts[self._longest], self.reference.copy_start(self._longest)
        tokens = len(prompt) - 1
        third = (tokens - first) // 3
        later = () if first else (2 * third + 3, tokens - 2)
        edges = (first, first + third, *later, tokens) if split else (first, tokens)
        for start, stop in itertools.pairwise(edges):
            self._caller.prefill(mx.array([prompt[start:stop]]), cache, start, TEXT_ONLY)
            mx.eval(layer_caches.list_all_arrays(cache))
        return self.reference.decode_answer(self._longest, cache)

    # -- rows in a batch --------------------------------------------------------------------------------

    def decode(
        self, method: DecodeMethod, width: int, quantization: KVQuantization | None = None
    ) -> CheckLogits:
        """Row 0 alone, then all rows in one batch, until row 0 leaves. The others join in the second step.
        Quantized rows join in the third, so that row 2 takes the place of row 0 in a group. Compare those
        with `round_rows`."""
        methods = ComputeMethods(method, fixed_width=width, quantization=quantization)
        # The paged method's kernel is compared with the library's; the compiled one's is the same.
        attend = self._kernel if method == "paged" else None
        empty = self.reference.make_cache()
        batch = make_decode_batch(empty, methods, SHORTEST, attend, compiled_at_once=True)
        logits: CheckLogits = {}
        last, later = self.reference.steps, 1 if quantization is None else 2
        starts = [0, *[later if len(self._rows) > 2 else 0] * (len(self._rows) - 1)]
        for step in range(last + 1 + starts[-1]):
            rows = [self.reference.make_row(i) for i in self._rows if step == starts[i]]
            alive = [i for i in self._rows if starts[i] <= step <= last + starts[i]]
            batch.update({str(i) for i in alive}, rows)
            computed = [(i, step - starts[i]) for i in map(int, batch.ids)]
            output = self.reference.forward(batch, [self.reference.inputs[i][at] for i, at in computed])
            logits |= {key: output[row] for row, key in enumerate(computed)}
            if step == min(COPIED_STEP, last - 1) and self.codec is not None:
                self.copied = self._try_copy(self.codec, batch.view_row("0")) or self.copied
        return {key: row for key, row in logits.items() if key[0] in self.reference.compared}

    def decode_beside(self, methods: ComputeMethods, companies: Sequence[int]) -> CheckLogits:
        """Row 0 beside companies of these sizes, as far as a forward of fixed width has room, in another
        place each time. The keys are (index of the company, step)."""
        logits: CheckLogits = {}
        for index, others in enumerate(companies):
            sources = [self._sharing[i % 2] for i in range(min(others, methods.fixed_width - 1))]
            sources.insert(index * len(sources) // max(len(companies) - 1, 1), 0)
            names = [str(i) if i == 0 else f"{i} at {at}" for at, i in enumerate(sources)]
            batch = make_decode_batch(self.reference.make_cache(), methods, compiled_at_once=True)
            batch.update(set(names), list(map(self.reference.make_row, sources, names)))
            for step, token in enumerate(self.reference.inputs[0]):
                at = batch.ids.index("0")
                tokens = [token if i == at else step for i in range(len(names))]
                logits[index, step] = self.reference.forward(batch, tokens)[at]
        return logits

    def decode_copies(self, methods: ComputeMethods) -> CheckLogits:
        """Row 0 in every place of a forward of fixed width, one step. The keys are (place, 0)."""
        names = [str(place) for place in range(methods.fixed_width)]
        batch = make_decode_batch(self.reference.make_cache(), methods)
        batch.update(set(names), [self.reference.make_row(0, name) for name in names])
        output = self.reference.forward(batch, [self.reference.inputs[0][0]] * len(names))
        return {(place, 0): row for place, row in enumerate(output)}

    def round_rows(self, quantization: KVQuantization) -> CheckLogits:
        """Each row by itself, with the library's own attention over keys and values that are rounded like the
        packed form."""
        logits: CheckLogits = {}
        for i in self._rows:
            cache = self.reference.copy_filled(i)
            for layer in layer_caches.flatten_caches(cache):
                if layer_caches.get_kind(layer) is LayerKind.KV:
                    layer.update_and_fetch = RoundedUpdate(layer, quantization)
            logits |= self.reference.decode_answer(i, cache, STEPS)
        return logits

    # -- prompts that share a forward -------------------------------------------------------------------

    def prefill_equal(self) -> CheckLogits:
        """Each prompt prefilled beside its reverse, before or after it."""
        return self._decode_shared(self._share_pairs(0))

    def prefill_padded(self, limit: int) -> CheckLogits:
        """The prompts' first `limit` tokens in one forward, padded on the right; the rest one by one."""
        prompts = [self._prompts[i][:-1] for i in self._sharing]
        caches = self._share([prompt[:limit] for prompt in prompts], 0)
        for prompt, cache in zip(prompts, caches, strict=True):
            if limit < len(prompt):
                self._caller.prefill(mx.array([prompt[limit:]]), cache, limit, TEXT_ONLY)
        return self._decode_shared(caches)

    def prefill_tails(self, padded: bool) -> CheckLogits:
        """The prompts' first tokens one by one. Then the rest of all in one forward, padded on the right, or
        each beside its reverse."""
        rows = [self._prompts[i][:-1] for i in self._sharing]
        return self._decode_shared(self._share(rows, 1) if padded else self._share_pairs(1))

    def _share_pairs(self, start: int) -> list[list[Any]]:
        """The caches of the prompts, each of which shares a forward with its reverse."""
        caches = []
        for i in self._sharing:
            rows = [self._prompts[i][:-1][::-1]] * 2
            rows[i % 2] = self._prompts[i][:-1]
            caches.append(self._share(rows, start)[i % 2])
        return caches

    def _share(self, rows: Sequence[list[int]], start: int) -> list[list[Any]]:
        """The caches of rows whose tokens from `start` on are computed by one forward."""
        longest = max(map(len, rows))
        shared = self.reference.make_cache()
        if start:
            caches = [self.reference.make_cache() for _ in rows]
            for row, cache in zip(rows, caches, strict=True):
                self._caller.prefill(mx.array([row[:start]]), cache, 0, TEXT_ONLY)
            shared = layer_caches.stack_rows(caches, longest - start)
        tails = [row[start:] + [0] * (longest - len(row)) for row in rows]
        self._caller.prefill(mx.array(tails), shared, start, TEXT_ONLY)
        return [layer_caches.split_row(shared, i, len(row)) for i, row in enumerate(rows)]

    def _decode_shared(self, caches: Sequence[list[Any]]) -> CheckLogits:
        logits: CheckLogits = {}
        for i, cache in zip(self._sharing, caches, strict=True):
            logits |= self.reference.decode_answer(i, cache)
        return logits

    # -- snapshots --------------------------------------------------------------------------------------

    @property
    def keeps_keys_only(self) -> bool:
        """Whether a snapshot has only keys and values, whose copies do not depend on their number."""
        return self.codec is not None and not self.codec.has_states

    def restore_snapshots(self) -> CheckLogits:
        """The longest prompt continues from a copy. Row 0 continues from a copy that was taken while it
        decoded beside others."""
        assert self.codec is not None
        tokens = len(self._prompts[self._longest]) - 1
        view = layer_caches.view_row(self.reference.copy_filled(self._longest))
        copied = self._copy(self.codec, tokens, view)
        logits = self.reference.decode_answer(self._longest, self._restore(self.codec, copied))
        if isinstance(self.copied, Exception):
            raise self.copied
        if self.copied is not None:
            cache = self._restore(self.codec, self.copied)
            steps = self.reference.steps
            logits |= self.reference.decode_answer(0, cache, steps, min(COPIED_STEP, steps - 1) + 1)
        return logits

    def _try_copy(
        self, codec: SnapshotCodec, row: tuple[int, RowView] | None
    ) -> CopiedRow | Exception | None:
        try:
            return row and self._copy(codec, *row)
        except Exception as error:  # counts against snapshots, not against the batch
            return error

    def _copy(self, codec: SnapshotCodec, tokens: int, view: RowView) -> CopiedRow:
        """An evaluated copy of a row that holds so many tokens, whose keys are copied in two parts."""
        spans = [(0, tokens // 3), (tokens // 3, tokens)] if codec.has_deltas else []
        deltas: list[tuple[int, int, Payload]] = [(a, b, codec.copy_delta(view, a, b)) for a, b in spans]
        state = codec.copy_state(view, tokens) if codec.has_states else None
        mx.eval([a for _, _, p in deltas for a in codec.list_arrays(p)])
        if state is not None:
            mx.eval(codec.list_arrays(state))
        return tokens, deltas, state

    def _restore(self, codec: SnapshotCodec, copied: CopiedRow) -> list[Any]:
        tokens, deltas, state = copied
        hit = CacheHit(tokens, HitKind.EXACT, tuple(deltas), state)
        return codec.restore(hit, tokens + STEPS, self.reference.make_cache())


class RoundedUpdate:
    """Replaces `update_and_fetch` of a KV layer of one row. It computes the same as quantized attention,
    within rounding, but over plain arrays and with the library's own code."""

    def __init__(self, layer: Any, form: KVQuantization) -> None:
        self._layer = layer
        self._form = form
        self._is_rounded = False

    def __call__(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens [1, H, n, D]. Returns all keys and values."""
        layer = self._layer
        if layer.offset >= self._form.start:
            if not self._is_rounded:
                layer.keys, layer.values = self._round(layer.keys), self._round(layer.values)
                self._is_rounded = True
            keys, values = self._round(keys), self._round(values)
        fetched: tuple[mx.array, mx.array] = type(layer).update_and_fetch(layer, keys, values)
        return fetched

    def _round(self, array: mx.array) -> mx.array:
        bits, size, _ = self._form
        return mx.dequantize(*mx.quantize(array, size, bits), size, bits).astype(array.dtype)


class DraftCheck:
    """Rows that take several tokens in a forward, of which some are rejected, must equal rows with one token
    a step. The rejected tokens are wrong ones. So a state that keeps one, or loses an accepted one, changes
    the logits of the next step.

    `methods`: how rows decode, by pages. A fixed width is at least MOST_ROWS here.
    """

    def __init__(self, reference: Reference, methods: ComputeMethods) -> None:
        width = methods.fixed_width and max(methods.fixed_width, MOST_ROWS)
        self._reference, self._methods = reference, replace(methods, fixed_width=width)
        self._inputs = reference.inputs

    def take_steps(self) -> CheckLogits:
        """All rows in one batch, one token a step."""
        batch, logits = self._start_batch(), CheckLogits()
        for step in range(STEPS + 1):
            tokens = [tokens[step] for tokens in self._inputs]
            output = self._forward(batch, tokens, [1] * len(tokens))
            logits |= {(row, step): output[row] for row in range(len(tokens))}
        return logits

    def take_drafts(self) -> CheckLogits:
        """The same rows with the drafts of FORWARDS."""
        batch, logits = self._start_batch(), CheckLogits()
        done = [0] * len(self._inputs)  # tokens by row
        for blocks in FORWARDS:
            batch.update({str(row) for row in blocks}, ())
            given = []
            for row, (count, kept) in blocks.items():
                tokens = self._inputs[row][done[row] :]
                wrong = [tokens[0] ^ 1] * (count - kept)
                given += [*tokens[:kept], *wrong]
            lengths = dict(zip(batch.ids, batch.lengths, strict=True))
            output = self._forward(batch, given, [count for count, _ in blocks.values()])
            batch.accept({str(row): lengths[str(row)] + kept for row, (_, kept) in blocks.items()})
            first = 0
            for row, (count, kept) in blocks.items():
                logits |= {(row, done[row] + i): output[first + i] for i in range(kept)}
                done[row] += kept
                first += count
        return logits

    def _start_batch(self) -> PagedDecodeBatch:
        batch = make_decode_batch(self._reference.make_cache(), self._methods, compiled_at_once=True)
        assert isinstance(batch, PagedDecodeBatch), "drafts need pages"
        rows = list(map(self._reference.make_row, range(len(self._inputs))))
        batch.update({row.id for row in rows}, rows)
        return batch

    def _forward(self, batch: PagedDecodeBatch, tokens: list[int], counts: list[int]) -> mx.array:
        places = [n + i for n, count in zip(batch.lengths, counts, strict=True) for i in range(count)]
        return self._reference.forward(batch, tokens, places, counts)
