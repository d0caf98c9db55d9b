"""Decode steps: the decode batch, and what its rows need besides caches, in the batch's order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import mlx.core as mx

from mlxrun.model.adapter import Adapter
from mlxrun.model.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.decode_batch import JoiningRow
from mlxrun.model.sampler import Sampler
from mlxrun.model.step_output import LogitsBatch, RowState


class DecodeRunner:
    """`sampler` and `newest_tokens` [rows], the output of the last decode step, follow `order`."""

    def __init__(self, adapter: Adapter, vocab: int, methods: ComputeMethods) -> None:
        self._adapter = adapter
        self._vocab = vocab
        self.batch = make_decode_batch(adapter.make_cache(), methods)
        self.order: list[str] = []
        self.sampler: Sampler | None = None
        self.newest_tokens: mx.array | None = None

    def remove(self, ids: Collection[str]) -> None:
        """Take rows out of the batch that were freed in this step and decode again from the prefix cache."""
        if ids:
            self.batch.update(set(self.batch.ids).difference(ids), ())
            self.order = ["" if rid in ids else rid for rid in self.order]

    def forward(self, ids: Sequence[str], rows: Mapping[str, RowState]) -> list[LogitsBatch]:
        """Logits of one token for each of these rows, in one batch; rows that are not named leave."""
        present = set(self.batch.ids)
        joining = {rid: rows[rid] for rid in ids if rid not in present}
        waiting = rows.keys() - present - joining.keys() if joining else ()
        prefilling = [rid for rid in waiting if not rows[rid].ends_unsampled]
        self.batch.update(
            set(ids),
            [JoiningRow(rid, row.cached, row.cache) for rid, row in joining.items()],
            [len(rows[rid].tokens) for rid in prefilling],
        )
        for row in joining.values():
            row.cache = []
        if not ids:
            self.order, self.sampler, self.newest_tokens = [], None, None
            return []
        self._reorder(rows)
        lengths = self.batch.lengths
        positions = [n + rows[rid].inputs.position_delta for rid, n in zip(self.order, lengths, strict=True)]
        assert self.newest_tokens is not None and self.sampler is not None
        with use_engine_attention():
            logits = self.batch.forward(self._make_decode(rows), self.newest_tokens, positions)
        return [LogitsBatch(tuple(self.order), logits, self.sampler, [n + 1 for n in lengths])]

    def _make_decode(
        self, rows: Mapping[str, RowState], counts: Sequence[int] | None = None
    ) -> Callable[..., mx.array]:
        """The model's decode with the adapter of each row. `counts`: tokens of each row, None: one each."""
        pairs = zip(self.order, counts or [1] * len(self.order), strict=True)
        return self._adapter.make_decode([rows[rid].adapter for rid, count in pairs for _ in range(count)])

    def _reorder(self, rows: Mapping[str, RowState]) -> None:
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
        """State to evaluate in each step: no logits consume it, so its graph would grow."""
        sampling = [] if self.sampler is None else self.sampler.list_arrays()
        return sampling + self.batch.list_state_arrays()
