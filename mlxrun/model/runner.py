"""Computes what the scheduler planned. Owns every array of a request: caches, embeddings, sampling state.

`execute` launches this step and then reads the tokens of the one before (decode-ahead), so that the device
never waits for Python. Copies for the prefix cache are made in passing and come back when they are evaluated;
a hit that cannot be restored is computed instead. Runs on the engine thread only. An exception that can be
told to one request (its images, its grammar) comes back in `errors`; any other leaves the runner and all rows
are lost: `reset`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxrun.model.adapter import PLAIN, Adapter, PromptInputs
from mlxrun.model.compute_methods import ComputeMethods, make_batch
from mlxrun.model.grammar_masks import RowGrammar
from mlxrun.model.prefill import shared
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import engine_forward
from mlxrun.model.ragged.decode_batch import Joining
from mlxrun.model.ragged.layer_caches import RowView
from mlxrun.model.ragged.row_group import STEP
from mlxrun.model.sampler import RowSampling, Sampler
from mlxrun.model.snapshot.copier import DueSnapshots, SnapshotCopier
from mlxrun.model.snapshot.snapshots import SnapshotCodec
from mlxrun.model.step_output import Drawn, LaunchedForward, LaunchedStep, RowState, collect, guarded, sample
from mlxrun.scheduler.request import SamplingParams
from mlxrun.scheduler.step_plan import (
    Admission,
    PrefillChunk,
    SnapshotRequest,
    SnapshotResult,
    StepPlan,
    StepResult,
)

log = logging.getLogger(__name__)

CLEAR_EVERY = 256  # steps between giving MLX's free buffers back, if they are more than POOL bytes
POOL = 1 << 31
PIECE = 7  # layers of a prompt's forward that are launched together where launching is what takes time
AT_ONCE = 2048  # tokens of a forward where a hit failed and its prefix is computed after all


class ModelRunner:
    """`vocab`: width of the logits. `methods`: how this model decodes and prefills (see model/compute_methods.py)."""

    def __init__(
        self, adapter: Adapter, vocab: int, methods: ComputeMethods, snapshots: SnapshotCodec | None = None
    ) -> None:
        self._adapter = adapter
        self._copies = SnapshotCopier(snapshots)
        self._vocab = vocab
        self._methods = methods
        self._steps = 0
        self.reset()

    def reset(self) -> None:
        """Forget all rows and whatever is under way."""
        self._rows: dict[str, RowState] = {}
        self._batch = make_batch(self._adapter.new_cache(), self._methods)
        self._order: list[str] = []  # rows of `_sampler` and `_newest`
        self._sampler: Sampler | None = None
        self._newest: mx.array | None = None  # [rows]: what the last decode step drew
        self._launched = LaunchedStep()

    def close(self) -> None:
        """Drop all arrays and this thread's streams; nothing can be computed after that."""
        mx.synchronize()
        self.reset()
        self._adapter = None  # type: ignore[assignment]
        mx.clear_cache()
        mx.clear_streams()

    @property
    def pending(self) -> bool:
        """Whether copies are under way that the next step gives back."""
        return bool(self._launched.saved)

    @property
    def waited_for(self) -> bool:
        """Whether all that is under way are first tokens: reading them at once delays nobody's next one."""
        return self._launched.first

    def collect(self) -> StepResult:
        """Read what is under way, and launch nothing."""
        before, self._launched = self._launched, LaunchedStep()
        return StepResult(*collect(before, self._rows, {}), saved=before.saved)

    # -- the step ---------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch the plan; returns what the previous one drew, and the requests that failed alone.

        A row with a grammar needs its last token before the next can be drawn, but not before the forward:
        that is launched as ever, and the masks are made while it is computed.
        """
        saved = self._keep(plan.keep)
        left = {rid: row.params for rid in plan.free if (row := self._rows.pop(rid, None)) is not None}
        self._leave(set(plan.free).intersection(plan.decode))
        self._tidy(plan.clear_pool)
        errors, unusable = self._admit(plan.admit)
        fresh = {rid for rid, row in self._rows.items() if not row.drew}
        forwards = self._decode([r for r in plan.decode if r in self._rows])
        filled: list[mx.array] = []
        chunks = [c for c in plan.prefill if c.request_id in self._rows]
        saved += self._prefill(chunks, plan.save, forwards, filled)
        ids = [rid for forward in forwards for rid in forward.ids]
        later = guarded(forwards, self._rows)
        draws = [] if later else self._draw(forwards)
        wanted = self._arrays(draws) + [f.logits for f in forwards if later] + filled
        if self._methods.launch_first:
            mx.async_eval(wanted)
        before = self._launched
        back = dict.fromkeys(admission.request.id for admission in plan.admit)
        tokens, failed = collect(before, self._rows, left | back)
        if not self._methods.launch_first:
            mx.async_eval(wanted)
        if later:
            draws = self._draw(forwards)
            mx.async_eval(self._arrays(draws))
        first = bool(ids) and fresh.issuperset(ids)
        self._launched = LaunchedStep(tuple(draws), tuple(filled), tuple(saved), first)
        return StepResult(tokens, errors | failed, before.saved + self._awaited(), unusable)

    def _draw(self, forwards: Sequence[LaunchedForward]) -> list[Drawn]:
        draws = [(forward.ids, sample(forward, self._rows, self._vocab)) for forward in forwards]
        for forward, (ids, draw) in zip(forwards, draws, strict=True):
            if forward.sampler is self._sampler:
                self._newest = draw.tokens
            else:
                self._rows[ids[0]].newest = draw.tokens
        return draws

    def _awaited(self) -> tuple[SnapshotResult, ...]:
        """This step's copies, if one of them is wanted at once: a kill would lose what it is a copy of."""
        now = self._launched
        if not any(copy.save.at_once for copy in now.saved):
            return ()
        self._launched = replace(now, saved=())
        mx.eval(self._copies.arrays(now.saved))
        return now.saved

    def _arrays(self, draws: Sequence[Drawn]) -> list[mx.array]:
        """What a step has to evaluate: its draws, and state that would else grow a graph."""
        sampling = [] if self._sampler is None else self._sampler.arrays()
        return [a for _, draw in draws for a in draw.arrays()] + sampling + self._batch.state_arrays()

    def _tidy(self, now: bool) -> None:
        self._steps += 1
        if now or (self._steps % CLEAR_EVERY == 0 and mx.get_cache_memory() > POOL):
            mx.clear_cache()

    def _admit(self, admissions: Sequence[Admission]) -> tuple[dict[str, Exception], tuple[str, ...]]:
        """Make rows; the errors of those that cannot start, and the rows whose hit could not be restored."""
        errors: dict[str, Exception] = {}
        unusable: list[str] = []
        for admission in admissions:
            request = admission.request
            try:
                row, usable = self._start(admission)
                self._rows[request.id] = row
                unusable += [] if usable else [request.id]
            except Exception as error:  # the border: what one request's images do must not reach the others
                log.warning("request %s cannot start: %s", request.id, error)
                errors[request.id] = error
        return errors, tuple(unusable)

    def _start(self, admission: Admission) -> tuple[RowState, bool]:
        """A row with what the prefix cache gave in its cache; False if that could not be restored and was
        computed."""
        request, output, hit = admission.request, admission.output, admission.hit
        tokens = [*request.prompt, *output]
        room = self._room(tokens, request.params)
        restored = None if hit is None else self._copies.restore(hit, room, self._adapter.new_cache())
        if restored is not None:
            mx.async_eval(layer_caches.all_arrays(restored))  # while the forward is being built
        done = hit.length if hit is not None and restored is not None else 0
        inputs = self._adapter.inputs(request.prompt, request.media, done)
        sampling = RowSampling.start(request.params, request.prompt, output, self._vocab)
        cache = restored or layer_caches.reserve(self._adapter.new_cache(), room)
        grammar = request.grammar
        guard = None if grammar is None else RowGrammar(grammar.start(output, request.params.stop_ids))
        row = RowState(tokens, inputs, sampling, cache, mx.array(tokens[-1:]), done, guard=guard)
        if hit is not None and restored is None:
            self._compute(row, hit.length)
        return row, hit is None or restored is not None

    def _compute(self, row: RowState, length: int) -> None:
        """Fill the row's empty cache with its first tokens at once."""
        for start in range(0, length, AT_ONCE):
            stop = min(start + AT_ONCE, length)
            self._prompt([row.tokens[start:stop]], row.cache, start, row.inputs)
            mx.eval(layer_caches.all_arrays(row.cache))
        row.filled = length

    def _room(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """Tokens that a row's cache should hold before it has to grow."""
        return len(tokens) + min(params.max_tokens, STEP)

    # -- the prefix cache -------------------------------------------------------------------------------

    def _keep(self, saves: Sequence[SnapshotRequest]) -> list[SnapshotResult]:
        """Copies out of rows that are freed now, under way before the batch writes over them."""
        saved = self._copied(saves)
        if saved:
            (mx.async_eval if self._methods.launch_first else mx.eval)(self._copies.arrays(saved))
        return saved

    def _copied(self, saves: Sequence[SnapshotRequest]) -> list[SnapshotResult]:
        """Copies of what the rows hold now, one for each save; no payload for rows that never started."""
        views = {rid: self._view(rid) for rid in {save.request_id for save in saves}}
        return [
            SnapshotResult(save, None)
            if (row := views[save.request_id]) is None
            else self._copies.make(save, *row)
            for save in saves
        ]

    def _view(self, request_id: str) -> tuple[int, RowView] | None:
        """Tokens of a row, and what it holds."""
        row = self._rows.get(request_id)
        if row is not None and row.cache:
            return row.filled, layer_caches.view(row.cache)
        return self._batch.row(request_id) if row is not None and request_id in self._batch.ids else None

    # -- decode -----------------------------------------------------------------------------------------

    def _decode(self, ids: Sequence[str]) -> list[LaunchedForward]:
        """One token for each of these rows; rows that are not named leave the batch."""
        present = set(self._batch.ids)
        joining = {rid: self._rows[rid] for rid in ids if rid not in present}
        rows = [Joining(rid, row.filled, row.cache) for rid, row in joining.items()]
        later = self._rows.keys() - present - joining.keys() if joining else ()
        self._batch.update(set(ids), rows, [len(self._rows[rid].tokens) for rid in later])
        for row in joining.values():
            row.cache = []
        if not ids:
            self._order, self._sampler, self._newest = [], None, None
            return []
        self._reorder()
        lengths = self._batch.lengths
        positions = [n + self._rows[r].inputs.delta for r, n in zip(self._order, lengths, strict=True)]
        with engine_forward():
            logits = self._batch.forward(self._call(positions))
        assert self._sampler is not None
        return [LaunchedForward(tuple(self._order), logits, self._sampler, tuple(n + 1 for n in lengths))]

    def _leave(self, again: set[str]) -> None:
        """Take out of the batch what was freed in this very step and decodes again from the prefix cache."""
        if again:
            self._batch.update(set(self._batch.ids) - again, ())
            self._order = ["" if rid in again else rid for rid in self._order]

    def _reorder(self) -> None:
        """Bring newest tokens and sampler into the batch's order after rows joined, left or moved."""
        order = self._batch.ids
        if order == self._order and self._newest is not None:
            return
        old = {rid: i for i, rid in enumerate(self._order)}
        fresh = [rid for rid in order if rid not in old]
        parts = [] if self._newest is None else [self._newest]
        pool = mx.concatenate([*parts, *(self._rows[rid].newest for rid in fresh)])
        place = old | {rid: len(self._order) + i for i, rid in enumerate(fresh)}
        self._newest = pool[mx.array([place[rid] for rid in order])]
        self._sampler = Sampler([self._rows[rid].sampling for rid in order], self._vocab)
        self._order = order

    def _call(self, positions: Sequence[int]) -> Any:
        tokens = self._newest
        assert tokens is not None

        def call(first: int, count: int, caches: list[Any]) -> mx.array:
            padding = self._batch.padding(count)
            ids = tokens[first : first + count]
            if padding:
                ids = mx.concatenate([ids, mx.zeros(padding, ids.dtype)])
            where = [*positions[first : first + count], *([0] * padding)]
            return self._adapter.decode(ids[:, None], caches, where)

        return call

    # -- prefill ----------------------------------------------------------------------------------------

    def _prefill(
        self,
        chunks: Sequence[PrefillChunk],
        saves: Sequence[SnapshotRequest],
        forwards: list[LaunchedForward],
        filled: list[mx.array],
    ) -> list[SnapshotResult]:
        """Prefill; appends logits of chunks that sample, and the arrays to evaluate. Returns copies."""
        plain = {c.request_id for c in chunks if self._is_plain(c)}
        due, saved = DueSnapshots(saves), list[SnapshotResult]()
        for forward in shared(chunks, plain, self._methods.sharing, due.breaks):
            if len(forward) > 1:
                self._prefill_shared(forward)
            else:
                self._prefill_alone(forward[0], forwards)
            for chunk in forward:
                filled.extend(layer_caches.all_arrays(self._rows[chunk.request_id].cache))
                saved += self._copied(due.take(chunk.request_id, chunk.stop))
        filled.extend(self._copies.arrays(saved))
        return saved

    def _prompt(
        self, ids: list[list[int]], cache: list[Any], start: int, inputs: PromptInputs, pieces: int = 0
    ) -> mx.array:
        """Logits of these prompt tokens, which fill `cache`; launched every so many layers, 0: not yet."""
        with engine_forward(pieces):
            return self._adapter.prefill(mx.array(ids), cache, start, inputs)

    def _is_plain(self, chunk: PrefillChunk) -> bool:
        row = self._rows[chunk.request_id]
        return row.inputs is PLAIN and chunk.stop < len(row.tokens)

    def _prefill_shared(self, forward: Sequence[PrefillChunk]) -> None:
        longest = max(c.stop for c in forward)
        rows = [self._rows[c.request_id] for c in forward]
        ids = [row.tokens[: c.stop] + [0] * (longest - c.stop) for row, c in zip(rows, forward, strict=True)]
        cache = layer_caches.reserve(self._adapter.new_cache(), longest)
        self._prompt(ids, cache, 0, PLAIN)
        for index, (row, chunk) in enumerate(zip(rows, forward, strict=True)):
            alone = layer_caches.split(cache, index, chunk.stop, copied=not self._joins_next(chunk))
            row.cache = layer_caches.reserve(alone, self._room(row.tokens, row.params))
            row.filled = chunk.stop

    def _joins_next(self, chunk: PrefillChunk) -> bool:
        """Whether the row is copied into the decode batch in the next step, so that it needs no copy now."""
        return self._methods.decode != "alone" and chunk.stop == len(self._rows[chunk.request_id].tokens) - 1

    def _prefill_alone(self, chunk: PrefillChunk, forwards: list[LaunchedForward]) -> None:
        row = self._rows[chunk.request_id]
        pieces = PIECE if self._methods.launch_first else 0
        ids = [row.tokens[chunk.start : chunk.stop]]
        logits = self._prompt(ids, row.cache, chunk.start, row.inputs, pieces)
        row.filled = chunk.stop
        if chunk.stop == len(row.tokens):  # nothing is left to hand to the decode batch: sample here
            sampler = Sampler([row.sampling], self._vocab)
            forwards.append(LaunchedForward((chunk.request_id,), logits[:, -1], sampler, (chunk.stop,)))
