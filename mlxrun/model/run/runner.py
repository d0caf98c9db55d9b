"""Computes what the scheduler planned. It owns every array of a request: caches, embeddings, sampling state.

`execute` launches a step and then reads the tokens of the step before (decode-ahead), so that the device
never waits for Python. It runs on the engine thread only. An exception that concerns one request (its images,
its grammar) is returned in `errors`. After any other exception all rows are lost, and `reset` must be called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from mlxrun.core.request import SamplingParams
from mlxrun.core.step_plan import Admission, SnapshotResult, StepPlan, StepResult
from mlxrun.model.kv.paged.page_table import compute_page_keys
from mlxrun.model.kv.ragged.layer_caches import RowView, list_all_arrays, reserve_capacity
from mlxrun.model.kv.snapshot.copier import SnapshotCopier
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.machine.device import uses_cuda
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.decode import DecodeRunner
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prefill import PrefillRunner
from mlxrun.model.run.prompt_inputs import place_tokens
from mlxrun.model.run.prompt_logprobs import RowLogprobs, read_prompt_logprobs
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.run.step_output import (
    LaunchedStep,
    LogitsBatch,
    RowGrammar,
    RunningRow,
    SampledRows,
    collect_tokens,
    compute_capacity,
    list_grammars,
    make_grammar_mask,
)
from mlxrun.model.speculation.mtp_source import MTPSource

log = logging.getLogger(__name__)

CLEAR_EVERY = 256  # steps between giving MLX's free buffers back, if they exceed POOL_LIMIT
POOL_LIMIT = 1 << 31  # bytes


class ModelRunner:
    """Executes step plans. `vocab`: width of the logits. `methods`: how the model decodes and prefills.
    `mtp`: a head that drafts; it gets all hidden states."""

    def __init__(
        self,
        caller: ModelCaller,
        vocab: int,
        methods: ComputeMethods,
        snapshots: SnapshotCodec,
        mtp: MTPSource | None = None,
    ) -> None:
        self._caller = caller
        self._mtp = mtp
        self._vocab = vocab
        self._methods = methods
        self._copier = SnapshotCopier(snapshots)
        self._prefiller = PrefillRunner(caller, vocab, methods, self._copier, mtp)
        self._steps = 0
        self.reset()

    def reset(self) -> None:
        """Forget all rows and the launched step."""
        self._rows: dict[str, RunningRow] = {}
        self._decoder = DecodeRunner(self._caller, self._vocab, self._methods, self._mtp)
        if self._mtp is not None:
            self._mtp.rows.keep_only(())
        self._launched = LaunchedStep()

    def compute_trial(self) -> None:
        """Compute two tokens of no request, and wait for them. Raises what the model raises."""
        self._prefiller.compute_trial()

    def close(self) -> None:
        """Drop all arrays and this thread's streams. Nothing can be computed afterwards."""
        mx.synchronize()
        self.reset()
        del self._caller, self._decoder, self._prefiller, self._mtp
        mx.clear_cache()
        mx.clear_streams()

    @property
    def has_pending_snapshots(self) -> bool:
        """Whether the launched step makes snapshots, which the next step returns."""
        return bool(self._launched.snapshots)

    @property
    def awaits_first_tokens(self) -> bool:
        """Whether the launched step samples first tokens only, so that reading it at once delays no row."""
        return self._launched.first_tokens

    @property
    def awaits_drafts(self) -> bool:
        """Whether the launched step has drafts, so that it must be collected before the next one."""
        return self._launched.drafted is not None

    def collect(self) -> StepResult:
        """Read the launched step without launching another."""
        launched, self._launched = self._launched, LaunchedStep()
        if launched.drafted is not None:
            self._decoder.accept(launched.drafted, self._rows)
        tokens, errors = collect_tokens(launched, self._rows, {})
        shared, logprobs = self._decoder.batch.shared_tokens, read_prompt_logprobs(launched.prompt_logprobs)
        return StepResult(tokens, errors, launched.snapshots, prompt_logprobs=logprobs, shared_tokens=shared)

    # -- the step ---------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step in five stages: free, admit, forward, collect, launch.

        Returns the tokens of the previous step. CUDA launches before it collects, for the reasons in
        docs/architecture/decoding.md ("Decode-ahead"). Rows with a grammar are sampled last, because a mask
        needs the token before it. It is made while the device computes the forward.
        """
        assert self._launched.drafted is None, "drafts are collected before the next plan"
        freed, snapshots = self._free(plan)
        errors = self._admit(plan.admit)
        failed, invalid_hits = self._restore_hits(plan)
        failed_images, ready = self._encode_images(plan)
        errors |= failed | failed_images
        step, launch, unsampled = self._forward(plan, snapshots)
        if self._methods.launch_first:
            mx.async_eval(launch)
        previous = self._launched
        tokens, failed = collect_tokens(previous, self._rows, freed)
        if not self._methods.launch_first:
            mx.async_eval(launch)
        self._launched, urgent = self._launch_rest(step, unsampled)
        admitted = [admission.request.id for admission in plan.admit]  # older logprobs are not theirs
        logprobs = read_prompt_logprobs(previous.prompt_logprobs, admitted)
        shared = self._decoder.batch.shared_tokens
        return StepResult(
            tokens, errors | failed, previous.snapshots + urgent, invalid_hits, logprobs, shared, ready
        )

    def _free(self, plan: StepPlan) -> tuple[dict[str, SamplingParams | None], list[SnapshotResult]]:
        """Drop rows. Returns their params, None for ids that are admitted again, and their last snapshots."""
        snapshots = self._copier.copy_rows(plan.final_snapshots, self._view_row)
        if snapshots:  # launched before the batch writes over the rows
            launch = mx.async_eval if self._methods.launch_first else mx.eval
            launch(self._copier.list_arrays(snapshots))
        freed: dict[str, SamplingParams | None] = {
            rid: row.params for rid in plan.free if (row := self._rows.pop(rid, None)) is not None
        }
        self._decoder.remove(set(plan.free).intersection(plan.decode))
        if self._mtp is not None:
            self._mtp.rows.keep_only(self._rows.keys())
        self._steps += 1
        is_due = self._steps % CLEAR_EVERY == 0 and not uses_cuda()  # allocating is slow there
        if plan.clear_pool or (is_due and mx.get_cache_memory() > POOL_LIMIT):
            mx.clear_cache()
        return freed | dict.fromkeys(admission.request.id for admission in plan.admit), snapshots

    def _admit(self, admissions: Sequence[Admission]) -> dict[str, Exception]:
        """Make rows. Returns the errors of requests that cannot start."""
        errors: dict[str, Exception] = {}
        for admission in admissions:
            with self._contain_error(admission.request.id, errors):
                self._rows[admission.request.id] = self.start_row(admission)
        return errors

    @contextmanager
    def _contain_error(
        self, rid: str, errors: dict[str, Exception], text: str = "request %s cannot start: %s"
    ) -> Iterator[None]:
        """Whatever is raised meanwhile becomes the error of a request, whose row is dropped: what one
        request's images do must not reach the others."""
        try:
            yield
        except Exception as error:
            log.warning(text, rid, error)
            errors[rid] = error
            self._rows.pop(rid, None)

    def _restore_hits(self, plan: StepPlan) -> tuple[dict[str, Exception], tuple[str, ...]]:
        """Fill the caches of rows that this step computes first: a hit may be large, and many rows may wait.
        Returns the errors of requests that cannot start, and those whose hit had to be computed."""
        errors: dict[str, Exception] = {}
        invalid_hits: list[str] = []
        for rid in (*plan.decode, *(chunk.request_id for chunk in plan.prefill)):
            row = self._rows.get(rid)
            if row is None or row.hit is None:
                continue
            hit, row.hit = row.hit, None
            capacity = compute_capacity(row.tokens, row.params)
            restored = self._copier.restore(hit, capacity, self._caller.make_cache())
            if restored is not None:
                mx.async_eval(list_all_arrays(restored))  # while the forward is being built
                row.cache, row.cached = restored, hit.length
                continue
            invalid_hits.append(rid)
            with self._contain_error(rid, errors):
                if row.media is not None:  # images of the hit were left out
                    prompt = row.tokens[: row.prompt_length]
                    row.inputs = self._caller.prepare_inputs(prompt, row.media)
                row.cache = reserve_capacity(self._caller.make_cache(), capacity)
                self._prefiller.compute_prefix(row, hit.length)
        return errors, tuple(invalid_hits)

    def _encode_images(self, plan: StepPlan) -> tuple[dict[str, Exception], dict[str, int | None]]:
        """Encode images of the plan's requests, part by part until its time is over, and what is left of its
        chunks and rows. Returns the errors of requests whose images fail, and the tokens that can be computed
        now."""
        errors: dict[str, Exception] = {}
        ready: dict[str, int | None] = {}
        for rid in (a.request.id for a in plan.admit if a.request.media is not None):
            if rid in self._rows:
                ready[rid] = self._rows[rid].inputs.ready
        text = "the images of request %s cannot be encoded: %s"
        started, limit = time.perf_counter(), plan.encode_seconds
        for rid in (rid for rid in plan.encode if rid in self._rows):
            row = self._rows[rid]
            with self._contain_error(rid, errors, text):
                while row.inputs.pending is not None:
                    row.inputs = self._caller.encode_part(row.inputs, whole=limit is None)
                    if limit is not None and time.perf_counter() - started >= limit:
                        break
                ready[rid] = row.inputs.ready
            if row.inputs.pending is not None:  # the time is over
                break
        stops = {chunk.request_id: chunk.stop for chunk in plan.prefill}
        pending = {rid: row for rid, row in self._rows.items() if row.inputs.pending is not None}
        # Rows whose prompt is cached whole need the positions behind their images.
        stops |= {rid: len(pending[rid].tokens) for rid in plan.decode if rid in pending}
        for rid, row in pending.items():
            with self._contain_error(rid, errors, text):
                row.inputs = self._caller.encode_images(row.inputs, stops.get(rid, 0))
        return errors, ready

    def start_row(self, admission: Admission) -> RunningRow:
        """A row with an empty cache, or with none yet if the prefix cache has a hit for it."""
        request, output, hit = admission.request, admission.output, admission.hit
        tokens = [*request.prompt, *output]
        if request.positions:
            inputs = place_tokens(request.positions)
        else:
            cached = 0 if hit is None else hit.length
            inputs = self._caller.prepare_inputs(request.prompt, request.media, cached)
        sampling = RowSampling.start(request.params, request.prompt, output, self._vocab, request.left_out)
        cache = []
        if hit is None:
            cache = reserve_capacity(self._caller.make_cache(), compute_capacity(tokens, request.params))
        grammar = None
        if request.grammar is not None:
            grammar = RowGrammar(request.grammar.start(output, request.params.stop_ids))
        newest, logprobs = mx.array(tokens[-1:]), RowLogprobs.start(request)
        row = RunningRow(tokens, inputs, sampling, cache, newest, hit=hit, grammar=grammar, logprobs=logprobs)
        row.prompt_length, row.media = len(request.prompt), request.media
        row.image_spans = request.image_spans
        row.adapter = self._caller.row_adapters.find(request.adapter and request.adapter.name)
        if self._methods.shares_pages:
            row.page_keys = compute_page_keys(request, row.adapter, self._methods.grid)
        return row

    def _forward(
        self, plan: StepPlan, snapshots: Sequence[SnapshotResult]
    ) -> tuple[LaunchedStep, list[mx.array], Sequence[LogitsBatch]]:
        """Build the graph of one decode forward for all rows, of the prompts' chunks and of the sampling.
        Returns the step, the arrays to launch, and what is sampled once the tokens of the step before are
        known."""
        ids = [rid for rid in plan.decode if rid in self._rows]
        decoded = self._decoder.forward(ids, self._rows, plan.drafts)
        chunks = [chunk for chunk in plan.prefill if chunk.request_id in self._rows]
        prefilled = self._prefiller.forward(chunks, plan.snapshots, self._rows)
        batches = decoded + prefilled.logits
        rows = [self._rows[rid] for batch in batches for rid in batch.ids]
        first_tokens = bool(rows) and not any(row.has_sampled for row in rows)
        unsampled = batches if any(row.grammar for row in rows) else []
        sampled = [] if unsampled else self.sample_rows(batches)
        arrays = self._list_arrays(sampled) + [batch.logits for batch in unsampled] + prefilled.arrays
        copies, logprobs = (*snapshots, *prefilled.snapshots), tuple(prefilled.prompt_logprobs)
        step = LaunchedStep(sampled, prefilled.arrays, copies, logprobs, first_tokens)
        return step, arrays, unsampled

    def _launch_rest(
        self, step: LaunchedStep, unsampled: Sequence[LogitsBatch]
    ) -> tuple[LaunchedStep, tuple[SnapshotResult, ...]]:
        """Sample rows with a grammar. Returns the step, and snapshots that have to be stored at once."""
        if unsampled:
            step = replace(step, sampled=self.sample_rows(unsampled))
            mx.async_eval(self._list_arrays(step.sampled))
        if not any(snapshot.request.synchronous for snapshot in step.snapshots):
            return step, ()
        mx.eval(self._copier.list_arrays(step.snapshots))
        return replace(step, snapshots=()), step.snapshots

    def sample_rows(self, batches: Sequence[LogitsBatch]) -> list[SampledRows]:
        """Sample each row by its settings and its grammar; the row's next decode step takes in the token."""
        sampled = []
        for batch in batches:
            rows = [self._rows[rid] for rid in batch.ids]
            grammars = list_grammars(rows, batch.drafted)
            mask = make_grammar_mask(grammars, self._vocab)
            tokens = batch.sampler(batch.logits, batch.positions, mask)
            for row in rows:
                row.has_sampled = True
            if not batch.decodes:
                rows[0].newest_token = tokens.tokens
            elif batch.drafted is None:  # else the decoder takes in what is accepted
                self._decoder.newest_tokens = tokens.tokens
            self._tell_head(batch, tokens.tokens)
            sampled.append(SampledRows(batch.ids, tokens, batch.drafted, grammars, batch.hidden))
        return sampled

    def _tell_head(self, batch: LogitsBatch, tokens: mx.array) -> None:
        """Tell the head that drafts what was sampled. Drafted tokens are known once they are collected."""
        if self._mtp is None or batch.hidden is None or batch.drafted is not None:
            return
        if batch.decodes:
            self._mtp.read_step(batch.ids, batch.hidden, tokens)
        else:
            self._mtp.read_prompt(batch.ids[0], batch.hidden, tokens)

    def _list_arrays(self, sampled: Sequence[SampledRows]) -> list[mx.array]:
        heads = [] if self._mtp is None else self._mtp.rows.list_arrays()
        return [a for rows in sampled for a in rows.batch.list_arrays()] + self._decoder.list_arrays() + heads

    def _view_row(self, request_id: str) -> tuple[int, RowView] | None:
        """The number of tokens in a row's caches, and what they hold; None for rows that never started."""
        row = self._rows.get(request_id)
        if row is not None and row.cache:
            return row.view_cache()
        in_batch = row is not None and request_id in self._decoder.batch.ids
        return self._decoder.batch.view_row(request_id) if in_batch else None
