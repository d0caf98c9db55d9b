"""Rows, the logits of a step, the step that the device computes, and its tokens once they are known.

A row's grammar decides which tokens it may sample. An exception of its matcher, or a mask that allows
nothing, fails only that row. It fails when its next token is read, so that earlier tokens are delivered.
Until then it is sampled without a mask.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import RequestError
from mlxrun.core.request import GrammarMatcher, SamplingParams
from mlxrun.core.step_plan import CacheHit, SampledToken, SnapshotResult
from mlxrun.model.kv.ragged.layer_caches import FilledTogether, RowView, view_row
from mlxrun.model.kv.ragged.row_group import BUFFER_STEP
from mlxrun.model.run.prompt_inputs import PromptInputs
from mlxrun.model.run.prompt_logprobs import LogprobSlice, RowLogprobs
from mlxrun.model.run.sampler import RowSampling, SampledBatch, Sampler, read_sampled
from mlxrun.model.speculation.drafted_rows import DraftedRows

log = logging.getLogger(__name__)
ALLOW_ALL = b"\xff"  # allows its eight tokens


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampled tokens of rows: one each, or several for those with drafts. `grammars`: the grammar that
    masked each row of the forward; empty: none did. `hidden`: as in LogitsBatch."""

    ids: tuple[str, ...]
    batch: SampledBatch
    drafted: DraftedRows | None = None
    grammars: Sequence[RowGrammar | None] = ()
    hidden: mx.array | None = None

    def read(self, params: Sequence[SamplingParams]) -> list[tuple[SampledToken, ...]]:
        """The tokens that each row gets. Waits for the step."""
        if self.drafted is None:
            return [(token,) for token in read_sampled(self.batch, params)]
        counts = self.drafted.counts
        repeated = [p for p, count in zip(params, counts, strict=True) for _ in range(count)]
        sampled = read_sampled(self.batch, repeated)
        firsts = itertools.accumulate(counts, initial=0)
        kept = self.drafted.count_accepted([each.token for each in sampled])
        return [tuple(sampled[first : first + size]) for first, size in zip(firsts, kept, strict=False)]

    def list_forks(self) -> list[Sequence[RowGrammar | None]]:
        """The grammars that masked each row, along its draft."""
        if not self.grammars:
            return [()] * len(self.ids)
        counts = [1] * len(self.ids) if self.drafted is None else self.drafted.counts
        firsts = itertools.accumulate(counts, initial=0)
        return [self.grammars[first : first + size] for first, size in zip(firsts, counts, strict=False)]


@dataclass(slots=True, eq=False)
class RunningRow:
    """A running request. Its `cache` is empty once the row has joined the decode batch."""

    tokens: list[int]  # the prompt, and the answer so far if the request was preempted
    inputs: PromptInputs
    sampling: RowSampling
    cache: list[Any]
    newest_token: mx.array  # [1]: input of the first decode step
    cached: int = 0  # tokens in `cache`
    hit: CacheHit | None = None  # to be restored before the row is computed; `cache` is empty until then
    has_sampled: bool = False  # a token of this row was launched
    grammar: RowGrammar | None = None  # knows all tokens that were read
    logprobs: RowLogprobs | None = None
    prompt_length: int = 0  # tokens that the row did not sample
    media: Any = None  # see core.request.Request
    image_spans: Sequence[tuple[int, int]] = ()  # see core.request.Request
    adapter: int = 0  # number of its LoRA adapter; see hooks/adapted_layers.py
    page_keys: Sequence[bytes] = ()  # of pages that it may share; see kv/paged/page_table.py
    together: FilledTogether | None = None  # where `cache` comes from, if rows filled it together

    def view_cache(self) -> tuple[int, RowView]:
        """The number of tokens in the row's own cache, and its content."""
        return self.cached, view_row(self.cache)

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params

    @property
    def ends_unsampled(self) -> bool:
        """Whether the request ends with its prompt, so that the row never decodes."""
        return self.params.max_tokens == 0


def compute_capacity(tokens: Sequence[int], params: SamplingParams) -> int:
    """The number of tokens that a row's cache can hold before it grows."""
    return len(tokens) + min(params.max_tokens, BUFFER_STEP)


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """Logits [rows, V] to be sampled, their rows, and the positions of the tokens to sample.

    With `drafted`, a row of `ids` has several rows of logits. `hidden` [rows, D]: the states that they are
    made from, if a head drafts. `decodes`: they are the rows of the decode batch, not the row of a chunk.
    """

    ids: tuple[str, ...]
    logits: mx.array
    sampler: Sampler
    positions: Sequence[int]
    drafted: DraftedRows | None = None
    hidden: mx.array | None = None
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes: sampled tokens, prefilled arrays to wait for, snapshots and
    logprobs."""

    sampled: Sequence[SampledRows] = ()
    prefilled: Sequence[mx.array] = ()
    snapshots: tuple[SnapshotResult, ...] = ()
    prompt_logprobs: tuple[LogprobSlice, ...] = ()
    first_tokens: bool = False  # every sampled token is the first of its request

    @property
    def drafted(self) -> SampledRows | None:
        """The rows of the forward that verifies drafts, if there is one."""
        return next((rows for rows in self.sampled if rows.drafted is not None), None)


def list_grammars(rows: Sequence[RunningRow], drafted: DraftedRows | None) -> list[RowGrammar | None]:
    """The grammar of each row of logits, for a draft as after the tokens before. Empty if no row has one."""
    if all(row.grammar is None for row in rows):
        return []
    drafts = [()] * len(rows) if drafted is None else drafted.drafts
    forks = [
        [None] * (len(draft) + 1) if row.grammar is None else row.grammar.fork_along(draft)
        for row, draft in zip(rows, drafts, strict=True)
    ]
    return [grammar for found in forks for grammar in found]


def collect_tokens(
    launched: LaunchedStep, rows: Mapping[str, RunningRow], freed: Mapping[str, SamplingParams | None]
) -> tuple[dict[str, tuple[SampledToken, ...]], dict[str, Exception]]:
    """Wait for a step and read its tokens. A row whose grammar failed has an error, not a token.

    `freed`: rows that were freed since the launch; their tokens count if they were preempted. None: the id
    was admitted again, so tokens that were sampled before are not its own.
    """
    tokens: dict[str, tuple[SampledToken, ...]] = {}
    errors: dict[str, Exception] = {}
    for batch in launched.sampled:
        ids = batch.ids
        params = [freed[rid] if rid in freed else rows[rid].params if rid in rows else None for rid in ids]
        found = batch.read([p or SamplingParams() for p in params])
        for rid, known, sampled, forks in zip(ids, params, found, batch.list_forks(), strict=True):
            row = None if rid in freed else rows.get(rid)
            masked_by = next(iter(forks), None) if known is not None and row is None else None
            if masked_by is not None and masked_by.error is not None:  # preempted, or ended, after a bad mask
                errors[rid] = masked_by.error
                continue
            try:
                if row is not None and row.grammar is not None:
                    sampled = row.grammar.accept_all(sampled, forks)
                if known is not None:
                    tokens[rid] = sampled
            except Exception as error:  # a grammar that raises fails its own row only
                log.warning("request %s fails: %s", rid, error)
                errors[rid] = error
                if row is not None:
                    row.grammar = None
    if launched.prefilled:
        mx.eval(launched.prefilled)  # so that at most two steps of prefill are in flight
    return tokens, errors


@dataclass(slots=True)
class RowGrammar:
    """A row's matcher, and the error that it failed with."""

    matcher: GrammarMatcher
    error: Exception | None = None

    def compute_mask(self, size: int) -> bytes:
        """The mask in `size` bytes. Tokens that the tokenizer does not have are forbidden."""
        if self.error is None:
            try:
                return self.matcher.mask()[:size].ljust(size, b"\0")
            except Exception as error:  # see the module's docstring
                self.error = error
        return ALLOW_ALL * size

    def accept(self, token: int) -> None:
        """Advance by the sampled token. Raises an earlier error."""
        if self.error is not None:
            raise self.error
        self.matcher.accept(token)

    def accept_all(
        self, sampled: tuple[SampledToken, ...], forks: Sequence[RowGrammar | None] = ()
    ) -> tuple[SampledToken, ...]:
        """Advance by the tokens of a step. `forks`: of `fork_along`, one for each token. Returns the tokens
        before one that fails, or whose mask failed. That one fails the row in its next step; if it is the
        first token, it raises."""
        for index, each in enumerate(sampled):
            fork = forks[index] if forks else self
            try:
                if fork is not None and fork.error is not None:
                    raise fork.error
                self.accept(each.token)
            except Exception as error:
                if index == 0:
                    raise
                self.error = error
                return sampled[:index]
        return sampled

    def fork_along(self, draft: Sequence[int]) -> list[RowGrammar | None]:
        """This grammar, and its state after each token of a draft. None from the first token that it does not
        allow, where nothing is accepted."""
        forks: list[RowGrammar | None] = [self]
        newest: RowGrammar = self
        for token in draft:
            try:
                newest = RowGrammar(newest.matcher.fork(), newest.error)
                newest.accept(token)
            except Exception:  # the draft does not match
                break
            forks.append(newest)
        return forks + [None] * (len(draft) + 1 - len(forks))


def make_grammar_mask(grammars: Sequence[RowGrammar | None], vocab: int) -> mx.array | None:
    """Bool [rows, vocab], True for allowed tokens; None if no row has a grammar."""
    if not any(grammars):
        return None
    size = (vocab + 7) // 8
    rows = [ALLOW_ALL * size if grammar is None else grammar.compute_mask(size) for grammar in grammars]
    packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), size)
    mask = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
    for index in np.flatnonzero(~mask.any(axis=1)).tolist():
        grammar = grammars[index]
        assert grammar is not None
        reason = "the grammar allows no token that this model has"
        if grammar.matcher.done:
            reason = "the answer is complete by its grammar, and the request has no stop token to say so"
        grammar.error = RequestError(reason, code="grammar_failed")
        mask[index] = True
    return mx.array(mask)
