"""How much attention new tokens pay to each token of a prompt, summed while a model decodes them.

A ScoringCache takes the place of a layer's cache. Its keys are an object on which the model's attention calls
`attend` (ragged/attention.py), so the model's own queries are seen without a change of the model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxrun.model.ragged.attention import NotRaggedError, RowKeys


class AttentionScores:
    """float32 [size]: of the prompt's tokens, summed over layers, heads and new tokens. Lazy."""

    def __init__(self, size: int) -> None:
        self.total = mx.zeros(size)

    def add(self, queries: mx.array, keys: mx.array, scale: float) -> None:
        """Add the attention of `queries` [1, Hq, 1, D] to `keys` [1, H, n, D], the prompt's first."""
        heads, width = keys.shape[1], queries.shape[-1]
        grouped = queries.reshape(1, heads, -1, width)
        weights = mx.softmax((grouped * scale) @ keys.swapaxes(2, 3), axis=-1, precise=True)
        self.total = self.total + weights.astype(mx.float32).mean((0, 1, 2))[: self.total.size]


class ScoredKeys(RowKeys):
    """The keys and values of one row, whose attention is scored."""

    def __init__(self, keys: mx.array, values: mx.array, scores: AttentionScores) -> None:
        self._keys, self._values, self._scores = keys, values, scores

    @property
    def shape(self) -> tuple[int, ...]:
        return self._keys.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._keys.dtype

    def attend(self, queries: mx.array, scale: float, mask: Any, **kwargs: Any) -> mx.array:
        if mask is not None or kwargs:
            raise NotRaggedError("attention with a mask of its own, or with more than queries and keys")
        self._scores.add(queries, self._keys, scale)
        return mx.fast.scaled_dot_product_attention(queries, self._keys, self._values, scale=scale)


class ScoringCache:
    """One KV layer of one row while it decodes; `cache` is the library's, which is filled."""

    def __init__(self, cache: Any, scores: AttentionScores) -> None:
        self._cache, self._scores = cache, scores

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[ScoredKeys, ScoredKeys]:
        keys, values = self._cache.update_and_fetch(keys, values)
        found = ScoredKeys(keys, values, self._scores)
        return found, found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        if N != 1 or return_array or window_size is not None:
            raise NotRaggedError("scores are of one new token that sees all")
