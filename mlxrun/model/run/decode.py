"""Decode steps: the decode batch, and what its rows need besides caches, in the batch's order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlxrun.model.kv.ragged.decode_batch import DecodeBatch, ExpectedRow, JoiningRow
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch, uses_pages
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.sampler import Sampler
from mlxrun.model.run.step_output import LogitsBatch, RunningRow, SampledRows
from mlxrun.model.speculation.drafted_rows import DraftedRows

if TYPE_CHECKING:
    from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
    from mlxrun.model.speculation.mtp_source import MTPSource


class DecodeRunner:
    """Computes decode steps. `sampler` and `newest_tokens` [rows], the output of the last decode step, follow
    `order`. `mtp`: a head that drafts and wants the hidden states of all rows."""

    def __init__(
        self, caller: ModelCaller, vocab: int, methods: ComputeMethods, mtp: MTPSource | None = None
    ) -> None:
        self._caller = caller
        self._mtp = mtp
        self._vocab = vocab
        self._uses_pages = uses_pages(methods.decode)
        self._awaited: frozenset[str] = frozenset()  # rows for which the batch keeps pages
        self.batch = make_decode_batch(caller.make_cache(), methods)
        self.order: list[str] = []
        self.sampler: Sampler | None = None
        self.newest_tokens: mx.array | None = None

    def remove(self, ids: Collection[str]) -> None:
        """Take rows out of the batch that were freed in this step and decode again from the prefix cache."""
        if ids:
            self.batch.update(set(self.batch.ids).difference(ids), ())
            self.order = ["" if rid in ids else rid for rid in self.order]

    def forward(
        self, ids: Sequence[str], rows: Mapping[str, RunningRow], drafts: Mapping[str, tuple[int, ...]]
    ) -> list[LogitsBatch]:
        """Logits of one token for each of these rows, and of the drafted ones, in one batch. Other rows
        leave. `accept` must follow a forward with drafts."""
        self._join(ids, rows)
        if not ids:
            self.order, self.sampler, self.newest_tokens = [], None, None
            return []
        self._reorder(rows)
        assert self.newest_tokens is not None and self.sampler is not None
        lengths, tokens, sampler = self.batch.lengths, self.newest_tokens, self.sampler
        positions = [n + rows[rid].inputs.position_delta for rid, n in zip(self.order, lengths, strict=True)]
        after, drafted = [n + 1 for n in lengths], None  # without rotary deltas
        counts: tuple[Sequence[int], ...] = ()
        if not drafts.keys().isdisjoint(self.order):
            blocks = [drafts.get(rid, ()) for rid in self.order]
            drafted = DraftedRows.start(blocks, [rows[rid].sampling for rid in self.order])
            tokens, counts = drafted.expand_tokens(tokens), (drafted.counts,)
            positions, after = map(drafted.expand_positions, (positions, after))
            sampler = Sampler([fork for forks in drafted.forks for fork in forks], self._vocab)
        with self._caller.use_attention():
            output = self.batch.forward(self._make_decode(rows, *counts), tokens, positions, *counts)
        logits, hidden = (output, None) if self._mtp is None else self._mtp.split(output)
        return [LogitsBatch(tuple(self.order), logits, sampler, after, drafted, hidden, decodes=True)]

    def _join(self, ids: Sequence[str], rows: Mapping[str, RunningRow]) -> None:
        """Give these rows a place in the batch, and take it from all others."""
        present = set(self.batch.ids)
        joining = {rid: rows[rid] for rid in ids if rid not in present}
        # Pages are also given back where rows only leave, or will not come, but not those that others need.
        has_fewer = self._uses_pages and (len(ids) < len(present) or not self._awaited <= rows.keys())
        expected: list[ExpectedRow] | None = None
        if joining or has_fewer:
            waiting = rows.keys() - present - joining.keys()
            self._awaited = frozenset(rid for rid in waiting if not rows[rid].ends_unsampled)
            expected = [ExpectedRow(len(rows[rid].tokens), rows[rid].page_keys) for rid in self._awaited]
        self.batch.update(set(ids), [make_joining(rid, row) for rid, row in joining.items()], expected)
        for row in joining.values():
            row.cache, row.together = [], None

    def _make_decode(
        self, rows: Mapping[str, RunningRow], counts: Sequence[int] | None = None
    ) -> Callable[..., mx.array]:
        """The model's decode with the adapter of each row. `counts`: tokens of each row, None: one each."""
        pairs = zip(self.order, counts or [1] * len(self.order), strict=True)
        numbers: Iterator[int] = (rows[rid].adapter for rid, count in pairs for _ in range(count))
        if isinstance(self.batch, DecodeBatch):
            numbers = self.batch.pad_rows(numbers)
        return (self._mtp or self._caller).make_decode(numbers)

    def accept(self, sampled: SampledRows, rows: Mapping[str, RunningRow]) -> None:
        """Drop the rejected tokens of the last forward, which has been sampled. Waits for it."""
        assert sampled.drafted is not None and self.sampler is not None
        batch = cast("PagedDecodeBatch", self.batch)
        tokens: list[int] = sampled.batch.tokens.tolist()
        counts, kept = sampled.drafted.counts, sampled.drafted.count_accepted(tokens)
        held = dict(zip(batch.ids, batch.lengths, strict=True))
        parts = zip(sampled.ids, counts, kept, strict=True)
        batch.accept({rid: held[rid] - count + size for rid, count, size in parts})
        firsts = itertools.accumulate(counts, initial=0)
        newest = [tokens[first + size - 1] for first, size in zip(firsts, kept, strict=False)]
        self.newest_tokens = mx.array(newest, sampled.batch.tokens.dtype)
        for rid, forks, size in zip(sampled.ids, sampled.drafted.forks, kept, strict=True):
            if rid in rows:
                rows[rid].sampling.follow(forks[size - 1])
        if self._mtp is not None and sampled.hidden is not None:
            self._mtp.read_step(sampled.ids, sampled.hidden, sampled.batch.tokens, counts, kept)
        if self.sampler.list_arrays():  # it has counted other tokens
            self.sampler = Sampler(self.sampler.rows, self._vocab)

    def _reorder(self, rows: Mapping[str, RunningRow]) -> None:
        """Bring newest tokens and sampler into the batch's order after rows joined, left or moved."""
        order = self.batch.ids
        if order == self.order and self.newest_tokens is not None:
            return
        index = {rid: i for i, rid in enumerate(self.order)}
        joined = [rid for rid in order if rid not in index]
        index |= {rid: len(self.order) + i for i, rid in enumerate(joined)}
        present = [] if self.newest_tokens is None else [self.newest_tokens]
        tokens = mx.concatenate([*present, *(rows[rid].newest_token for rid in joined)])
        self.newest_tokens = tokens[mx.array([index[rid] for rid in order])]
        self.sampler = Sampler([rows[rid].sampling for rid in order], self._vocab)
        self.order = order

    def list_arrays(self) -> list[mx.array]:
        """The state to evaluate in each step. No logits consume it, so its graph would grow."""
        sampling = [] if self.sampler is None else self.sampler.list_arrays()
        return sampling + self.batch.list_state_arrays()


def make_joining(rid: str, row: RunningRow) -> JoiningRow:
    """`together` holds what the row has only until it computes more."""
    together = row.together if row.together is not None and row.together.length == row.cached else None
    return JoiningRow(rid, row.cached, row.cache, row.page_keys, together)
