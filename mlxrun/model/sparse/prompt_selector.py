"""Weighs the tokens of prompts with a draft model, a small one that reads the whole prompt first.

A draft model chooses for a larger one, as in "Speculative Prefill" (arXiv:2502.02789). It chooses what the
prompt's last tokens attend to, as in "SnapKV" (arXiv:2404.14469), since they ask the question. That takes one
forward, while an answer of the draft model takes one for each token. Its caches are dropped once a prompt is
weighed.

A WatchedCache replaces a layer's cache. The model's attention calls `attend` of its keys
(hooks/attention.py), so the model's own queries are seen without a change of the model. Whole blocks of
tokens are kept, and always the prompt's beginning and end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks.attention import NotRaggedError, RowKeys
from mlxrun.model.kv.ragged.layer_caches import (
    LayerKind,
    flatten_caches,
    get_kind,
    list_all_arrays,
    reserve_capacity,
    unflatten_caches,
)
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

WINDOW = 32  # last tokens of a prompt, whose attention is weighed
BLOCK = 32  # tokens that are kept or left out together: words around an important one belong to it
FIRST = 32  # tokens that are always kept: attention rests on the first ones
LAST = 128  # tokens that are always kept: what the prompt asks for
SMOOTHED = 13  # tokens: a token's weight is the highest in this neighbourhood

Weights = np.ndarray[Any, np.dtype[np.float32]]


class PromptSelector:
    """Chooses the tokens of prompts.

    `caller`: the draft model, whose layers keep all keys, or recurrent states. `keep`: share of the tokens
    that are kept. `max_tokens`: of the longest prompt that it can read. `layers_per_launch`: see
    use_engine_attention.
    """

    def __init__(self, caller: ModelCaller, keep: float, max_tokens: int, layers_per_launch: int = 0) -> None:
        self._caller = caller
        self._keep = keep
        self._layers = layers_per_launch
        self.max_tokens = max_tokens
        self._tokens: Sequence[int] = ()
        self._known = self._computed = 0
        self._cache: list[Any] = []

    def start(self, tokens: Sequence[int], known: int = 0) -> None:
        """Begin with another prompt, of at least two tokens. Its first `known` ones are kept anyway."""
        self._tokens, self._known, self._computed = tokens, known, 0
        self._cache = reserve_capacity(self._caller.make_cache(), len(tokens))

    def advance(self, limit: int) -> tuple[int, ...] | None:
        """Read `limit` more tokens of the prompt. Once only the tokens are left whose attention is weighed,
        weigh the prompt and return the positions of the kept ones."""
        if self._read(limit):
            return None
        weights = self._weigh()
        self.drop()
        return choose_tokens(weights, self._keep, self._known)

    def weigh(self, tokens: Sequence[int], limit: int) -> Weights:
        """All weights of a prompt, read in slices of `limit` tokens."""
        self.start(tokens)
        while self._read(limit):
            pass
        weights = self._weigh()
        self.drop()
        return weights

    def _read(self, limit: int) -> bool:
        """Compute a slice; False if nothing is left to be read."""
        start, end = self._computed, max(len(self._tokens) - WINDOW, 0)
        if start == end:
            return False
        stop = min(start + limit, end)
        with self._caller.use_attention(self._layers):
            self._caller.prefill(mx.array([self._tokens[start:stop]]), self._cache, start, TEXT_ONLY)
        mx.eval(list_all_arrays(self._cache))
        self._computed = stop
        return True

    def _weigh(self) -> Weights:
        """Compute the last tokens."""
        weights = AttentionSums(len(self._tokens))
        layers = [
            WatchedCache(layer, weights) if get_kind(layer) is LayerKind.KV else layer
            for layer in flatten_caches(self._cache)
        ]
        caches = unflatten_caches(self._cache, layers)
        ids = mx.array([self._tokens[self._computed :]])
        self._caller.prefill(ids, caches, self._computed, TEXT_ONLY)
        return np.array(weights.total)

    def drop(self) -> None:
        """Forget the prompt and its caches."""
        self._cache, self._tokens = [], ()

    def close(self) -> None:
        """Drop all arrays."""
        self.drop()
        del self._caller


class AttentionSums:
    """The weights of tokens, float32 [size]: the mean fourth power of attention over heads and new tokens,
    summed over layers. Lazy.

    Few heads look for needed tokens, and attend to little else. Most heads attend a little to tokens that are
    not needed. So a power tells more than the mean.
    """

    def __init__(self, size: int) -> None:
        self.total = mx.zeros(size)

    def add(self, weights: mx.array) -> None:
        """Add attention weights [1, H, queries, size]."""
        self.total = self.total + weights.astype(mx.float32).square().square().mean((0, 1, 2))


class WatchedKeys(RowKeys):
    """The keys and values of one row, whose attention is weighed."""

    def __init__(self, keys: mx.array, values: mx.array, weights: AttentionSums) -> None:
        self._keys, self._values, self._sums = keys, values, weights

    @property
    def shape(self) -> tuple[int, ...]:
        return self._keys.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._keys.dtype

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None = None, cap: float = 0.0
    ) -> mx.array:
        """Causal attention of the newest tokens, `queries` [1, Hq, new, D]. The attention weights are
        computed once, for the sums and for the result. NotRaggedError for other masks, sinks or caps."""
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
        self._sums.add(weights)
        return (weights @ self._values).reshape(queries.shape[:3] + self._values.shape[3:])


class WatchedCache:
    """One KV layer of one row while it computes new tokens. `cache`: the library's, which is filled."""

    def __init__(self, cache: Any, weights: AttentionSums) -> None:
        self._cache, self._sums = cache, weights

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[WatchedKeys, WatchedKeys]:
        keys, values = self._cache.update_and_fetch(keys, values)
        found = WatchedKeys(keys, values, self._sums)
        return found, found

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        if return_array or window_size is not None:
            raise NotRaggedError("weights are of tokens that see all before them")
        return None if N == 1 else "causal"


def choose_tokens(weights: Weights, keep: float, known: int = 0) -> tuple[int, ...]:
    """Ascending positions of the kept tokens of a prompt with `weights.size` tokens. They are the first
    `known` ones, a share `keep` of the others, and at least the first and last ones. ValueError if a weight
    is not finite."""
    if not np.isfinite(weights).all():
        raise ValueError("the draft model computes NaN")
    size = weights.size
    blocks = math.ceil(size / BLOCK)
    edge = SMOOTHED // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(weights, edge, constant_values=0.0), SMOOTHED)
    smoothed = np.pad(windows.max(axis=1), (0, blocks * BLOCK - size), constant_values=np.nan)
    worth = np.nanmean(smoothed.reshape(blocks, BLOCK), axis=1)
    starts = np.arange(blocks) * BLOCK
    is_known = starts + BLOCK <= known
    always = (starts < max(FIRST, known)) | (starts + BLOCK > size - LAST)
    order = np.lexsort((starts, -worth, ~always))  # of equal ones the earlier
    wanted = int(is_known.sum()) + math.ceil(keep * (size - known) / BLOCK)
    chosen = np.sort(order[: max(wanted, int(always.sum()))])
    kept = (chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return tuple(kept[kept < size].tolist())
