"""How much attention the newest tokens pay to each token of a prompt, while a model computes them.

A ScoringCache takes the place of a layer's cache. Its keys are an object on which the model's attention calls
`attend` (hooks/attention.py), so the model's own queries are seen without a change of the model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxrun.model.hooks.attention import NotRaggedError, RowKeys


class AttentionScores:
    """float32 [size]: of each token, the mean fourth power of attention over heads and new tokens, summed
    over layers. Lazy.

    Few heads look for what is needed, and attend to little else; to what most heads attend a little is not
    needed. So a power tells more than the mean does.
    """

    def __init__(self, size: int) -> None:
        self.total = mx.zeros(size)

    def add(self, weights: mx.array) -> None:
        """Add attention weights [1, H, queries, size]."""
        self.total = self.total + weights.astype(mx.float32).square().square().mean((0, 1, 2))


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

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None = None, cap: float = 0.0
    ) -> mx.array:
        """Causal attention of the newest tokens, `queries` [1, Hq, new, D]. The weights are computed once,
        for the scores and for the result."""
        if not (mask is None or (isinstance(mask, str) and mask == "causal")) or sinks is not None or cap:
            raise NotRaggedError("attention with a mask of its own, or with more than queries and keys")
        _, heads, size, width = self._keys.shape
        new = queries.shape[2]
        logits = (queries * scale).reshape(1, heads, -1, width) @ self._keys.swapaxes(2, 3)
        if new > 1:
            hidden = mx.arange(size) > mx.arange(size - new, size)[:, None]
            logits = mx.where(hidden, -mx.inf, logits.reshape(1, heads, -1, new, size))
            logits = logits.reshape(1, heads, -1, size)
        weights = mx.softmax(logits, axis=-1, precise=True)
        self._scores.add(weights)
        return (weights @ self._values).reshape(queries.shape[:3] + self._values.shape[3:])


class ScoringCache:
    """One KV layer of one row while it computes new tokens; `cache` is the library's, which is filled."""

    def __init__(self, cache: Any, scores: AttentionScores) -> None:
        self._cache, self._scores = cache, scores

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[ScoredKeys, ScoredKeys]:
        keys, values = self._cache.update_and_fetch(keys, values)
        found = ScoredKeys(keys, values, self._scores)
        return found, found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        if return_array or window_size is not None:
            raise NotRaggedError("scores are of tokens that see all before them")
        return None if N == 1 else "causal"
