"""From logits to tokens: sampling what a forward gave, and reading what was sampled a step before."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.adapter import PromptInputs
from mlxrun.model.grammar_masks import RowGrammar, allowed
from mlxrun.model.sampler import RowSampling, SampledBatch, Sampler, read
from mlxrun.scheduler.request import SamplingParams
from mlxrun.scheduler.step_plan import SampledToken, SnapshotResult

log = logging.getLogger(__name__)

Drawn = tuple[tuple[str, ...], SampledBatch]  # rows, and what they drew


@dataclass(slots=True, eq=False)
class RowState:
    """A request that runs. `cache` is its own until it joins the decode batch."""

    tokens: list[int]  # prompt, and answer so far if it was preempted
    inputs: PromptInputs
    sampling: RowSampling
    cache: list[Any]
    newest: mx.array  # [1]: the token that the first decode step takes in
    filled: int = 0  # tokens in `cache`
    drew: bool = False  # a token of this row was launched
    guard: RowGrammar | None = None  # of its grammar; knows all tokens that were read

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params


Rows = Mapping[str, RowState]


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """Logits [rows, V] that are to be sampled, with their rows, and the positions that these draw for."""

    ids: tuple[str, ...]
    logits: mx.array
    sampler: Sampler
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Draws under way, with the rows that they are for, and prefilled arrays to wait for."""

    draws: tuple[Drawn, ...] = ()
    filled: tuple[mx.array, ...] = ()
    saved: tuple[SnapshotResult, ...] = ()
    first: bool = False  # every draw is the first of its request


def guarded(forwards: Sequence[LaunchedForward], rows: Rows) -> bool:
    """Whether a row has a grammar, so that its last token must be known before it can be sampled."""
    return any(rows[rid].guard for forward in forwards for rid in forward.ids)


def sample(forward: LaunchedForward, rows: Rows, vocab: int) -> SampledBatch:
    """Sample each row by its settings, as its grammar allows."""
    drawing = [rows[rid] for rid in forward.ids]
    for row in drawing:
        row.drew = True
    mask = allowed([row.guard for row in drawing], vocab)
    return forward.sampler(forward.logits, forward.positions, mask)


def collect(
    launched: LaunchedStep, rows: Rows, left: Mapping[str, SamplingParams | None]
) -> tuple[dict[str, SampledToken], dict[str, Exception]]:
    """Wait for a step and read it; the errors of rows whose grammar failed, in place of their tokens. `left`:
    rows that were freed meanwhile, whose tokens count if they were preempted; None for ids that are back
    already, as such a row or as another request: what was drawn before is not theirs."""
    tokens: dict[str, SampledToken] = {}
    errors: dict[str, Exception] = {}
    for ids, draw in launched.draws:
        known = [left[rid] if rid in left else rows[rid].params if rid in rows else None for rid in ids]
        found = read(draw, [SamplingParams() if params is None else params for params in known])
        for rid, params, sampled in zip(ids, known, found, strict=True):
            if params is None:
                continue
            row = None if rid in left else rows[rid]
            try:
                if row is not None and row.guard is not None:
                    row.guard.accept(sampled.token)
                tokens[rid] = sampled
            except Exception as error:  # the border: a grammar fails its own row alone
                log.warning("request %s fails: %s", rid, error)
                errors[rid] = error
                if row is not None:
                    row.guard = None
    if launched.filled:
        mx.eval(launched.filled)  # no more than two steps of prefill are ever in flight
    return tokens, errors
