"""A small model that drafts for a larger one, a few tokens ahead.

Rows that draft have their own decode batch here, from which rejected tokens are removed. Each token is
sampled with the row's own settings and the noise of its position, like the verified token. So with a
temperature, drafts agree as often as without, where both models agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxrun.core.draft_source import KnownRow
from mlxrun.core.request import Request
from mlxrun.model.hooks.adapted_layers import BASE
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays, reserve_capacity
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prefill import LAYERS_PER_LAUNCH
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.sampler import RowSampling, Sampler

MAX_READ = 512  # tokens of prompts that are read in one step
# Known tokens of a row that one forward of the batch takes in. Windows keep the keys of so many tokens more,
# together with those of the longest draft (page_table.SLACK).
MAX_BEHIND = 32


@dataclass(slots=True)
class DraftingRow:
    """The draft model's state of a row: its first `known` tokens, and after them the `drafted` ones that it
    took in. `cache`: its own, until it has `joined` the batch. `sampling`: its settings and penalties, over
    the first `counted` tokens."""

    cache: list[Any]
    joined: bool = False
    known: int = 0
    drafted: list[int] = field(default_factory=list)
    sampling: RowSampling | None = None
    counted: int = 0


class DraftModel:
    """A DraftSource (core/draft_source.py) by a draft model.

    `vocab`: width of the target's logits. `batch`: an empty decode batch. `cost`: see DraftSource. `context`:
    the most tokens that it can read. `launch_first`: launch a forward before the next one is built, and every
    few layers of a prompt, on devices where launching takes the time.
    """

    name = "draft"

    def __init__(
        self,
        caller: ModelCaller,
        vocab: int,
        batch: PagedDecodeBatch,
        *,
        cost: float,
        context: int,
        max_tokens: int,
        launch_first: bool = False,
    ) -> None:
        self._caller = caller
        self._vocab = vocab
        self._batch = batch
        self.cost, self.max_tokens = cost, max_tokens
        self._context = context
        self._launch_first = launch_first
        self._rows: dict[str, DraftingRow] = {}

    def takes(self, request: Request) -> bool:
        """Whether the request has no images, which the model does not see."""
        return request.media is None and not request.image_spans

    def advance(self, rows: Sequence[KnownRow]) -> None:
        left = MAX_READ
        joining: list[JoiningRow] = []
        late: dict[str, list[int]] = {}
        for row in filter(self._fits_context, rows):
            if row.id not in self._rows:
                cache = reserve_capacity(self._caller.make_cache(), row.num_tokens)
                self._rows[row.id] = DraftingRow(cache)
            own = self._rows[row.id]
            if not own.joined:
                left -= self._read(row, own, left)
                if own.known and self._count_behind(row) <= MAX_BEHIND:
                    joining.append(JoiningRow(row.id, own.known, own.cache))
                    own.joined, own.cache = True, []
            elif self._count_behind(row) > MAX_BEHIND // 2 and left:
                late[row.id] = self.take_back(row)[:-1][: min(MAX_BEHIND, left)]
                left -= len(late[row.id])
        if joining:
            self._batch.update(set(self._batch.ids), joining)
        if any(late.values()):
            mx.async_eval(self.run_forward(late))
            for rid, tokens in late.items():
                self._rows[rid].known += len(tokens)

    def is_ready(self, row: KnownRow) -> bool:
        own = self._rows.get(row.id)
        is_late = own is None or not own.joined or self._count_behind(row) > MAX_BEHIND
        return not is_late and self._fits_context(row)

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        by_id = {row.id: row for row in rows}
        order = [by_id[rid] for rid in self._batch.ids if rid in by_id]
        logits = self.run_forward({row.id: self.take_back(row) for row in order})
        sampler = Sampler([self._follow(row) for row in order], self._vocab)
        chain: list[mx.array] = []
        for depth in range(max(limits)):
            if depth:
                logits = self.run_forward({row.id: 1 for row in order}, chain[-1])
            positions = [row.num_tokens + depth for row in order]
            chain.append(sampler(fit_width(logits, self._vocab), positions).tokens)
            if self._launch_first:
                mx.async_eval(chain[-1])
        found: list[list[int]] = mx.stack(chain, axis=1).tolist()
        drafts = {row.id: draft for row, draft in zip(order, found, strict=True)}
        for row in order:
            self._rows[row.id].known, self._rows[row.id].drafted = row.num_tokens, drafts[row.id][:-1]
        return [tuple(drafts[row.id][:limit]) for row, limit in zip(rows, limits, strict=True)]

    def forget(self, request_id: str) -> None:
        own = self._rows.pop(request_id, None)
        if own is not None and own.joined:
            self._batch.update(set(self._batch.ids) - {request_id}, ())

    def close(self) -> None:
        self._rows = {}
        del self._batch, self._caller

    def _fits_context(self, row: KnownRow) -> bool:
        return row.num_tokens + self.max_tokens < self._context

    def _count_behind(self, row: KnownRow) -> int:
        """The row's tokens that are known and were never taken in, at least the newest."""
        return row.num_tokens - self._rows[row.id].known

    def _read(self, row: KnownRow, own: DraftingRow, limit: int) -> int:
        """Take in at most `limit` tokens more of a row that has not joined, but not the newest one. Returns
        how many."""
        tokens = row.list_tokens(own.known, min(row.num_tokens - 1, own.known + limit))
        if tokens:
            with self._caller.use_attention(LAYERS_PER_LAUNCH if self._launch_first else 0):
                self._caller.prefill(mx.array([tokens]), own.cache, own.known, TEXT_ONLY)
            mx.async_eval(list_all_arrays(own.cache))
            own.known += len(tokens)
        return len(tokens)

    def take_back(self, row: KnownRow) -> list[int]:
        """Let go of drafted tokens that were not accepted. Returns the known tokens that follow."""
        own = self._rows[row.id]
        new = row.list_tokens(own.known)
        pairs = zip(new[:-1], own.drafted, strict=False)  # the newest one is taken in, whatever was drafted
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if accepted < len(own.drafted):
            self._batch.accept({row.id: own.known + accepted})
        own.known, own.drafted = own.known + accepted, []
        return new[accepted:]

    def _follow(self, row: KnownRow) -> RowSampling:
        """The settings of a row for its next tokens."""
        own, request = self._rows[row.id], row.request
        if own.sampling is None:
            params = replace(request.params, logprobs=None)
            vocab, left_out = self._vocab, request.left_out
            own.sampling = RowSampling.start(params, request.prompt, row.output, vocab, left_out)
        else:
            own.sampling = own.sampling.fork(row.list_tokens(own.counted))
        own.counted = row.num_tokens
        return own.sampling.fork(())  # which counts what is drafted

    def run_forward(self, tokens: Mapping[str, Sequence[int] | int], ids: mx.array | None = None) -> mx.array:
        """Logits [rows, V] behind the last one of each row's new tokens; `ids`: where only the device knows
        them."""
        batch = self._batch
        counts: list[int] = []
        positions: list[int] = []
        flat: list[int] = []
        for rid, length in zip(batch.ids, batch.lengths, strict=True):
            new = tokens.get(rid, 0)
            counts.append(new if isinstance(new, int) else len(new))
            flat += [] if isinstance(new, int) else new
            positions += range(length, length + counts[-1])
        decode = self._caller.make_decode([BASE] * len(positions))
        given = mx.array(flat, mx.uint32) if ids is None else ids
        with self._caller.use_attention():
            logits = batch.forward(decode, given, positions, counts)
        lasts = [end - 1 for end, count in zip(itertools.accumulate(counts), counts, strict=True) if count]
        return logits if len(lasts) == len(positions) else logits[mx.array(lasts)]


def fit_width(logits: mx.array, vocab: int) -> mx.array:
    """Logits as wide as the target's; both are padded beyond the tokenizer's tokens."""
    width = logits.shape[-1]
    if width >= vocab:
        return logits[:, :vocab]
    return mx.pad(logits, ((0, 0), (0, vocab - width)), constant_values=-float("inf"))
