"""A row of many tokens, which crosses the model's own sliding windows, and a short one beside it.

Computing thousands of tokens at each load would take too long. So the keys and values of a few tokens are
repeated. They are weighted so that the tokens at both ends of each window stand out. The library and each
method continue from the same caches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks.engine_attention import AttentionCall
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.load_check.reference import STEPS, Reference, copy_cache, list_windows
from mlxrun.model.load_check.rounding import TOLERANCE
from mlxrun.model.machine.device import may_shorten_float32
from mlxrun.model.run.model_caller import ModelCaller

log = logging.getLogger(__name__)

LONGEST_WINDOW = 4096  # tokens: larger windows are crossed reduced only
PLAIN_TOKENS = 509  # of models without windows: the chunk crosses the end of a page and of a buffer
MAX_BYTES = 1 << 30  # of a row's keys and values
STATE_TOKENS = 22  # of models that keep no keys: a recurrent state has no length
COMPANY = 3  # tokens of the short row beside it
BEFORE, CHUNK = 4, 8  # tokens of the row before it fills its window; tokens that are computed
NEW = CHUNK + 1 + STEPS  # tokens behind those that are filled in
MARKED = 4  # tokens around each end of a window that stand out
MARK = 6.0  # times which their keys and values are as large as those of others


class LongReference(Reference):
    """`source`: caches of a few tokens. `tokens`: of the long row before its chunk. Row 0 is the long one,
    whose logits are compared. Row 1 is its company in batches."""

    steps = 1
    compared = (0,)

    def __init__(
        self, caller: ModelCaller, vocab: int, source: Sequence[Any], tokens: int, check: AttentionCall | None
    ) -> None:
        self.suffix = f" at {tokens + CHUNK + 1} tokens"
        self._held = (tokens, COMPANY - 1)
        self._starts = [repeat_tokens(source, caller.make_cache(), held) for held in self._held]
        mx.eval([array for cache in self._starts for array in layer_caches.list_all_arrays(cache)])
        super().__init__(caller, vocab, (tokens + CHUNK + 1, COMPANY), False, check)

    def copy_start(self, index: int) -> tuple[list[Any], int]:
        copied = copy_cache(self._starts[index])
        assert copied is not None  # `choose_length` refuses such caches
        return copied, self._held[index]

    def _choose_limits(self, dtype: mx.Dtype) -> None:
        super()._choose_limits(dtype)
        # Large keys add to what is shortened, and the library's two ways show little of it.
        if dtype == mx.float32 and may_shorten_float32():
            self.tolerance = TOLERANCE[mx.float16]

    def _prefill(self, index: int, wide: bool = False) -> list[Any]:
        return super()._prefill(index, wide) if index in self.compared else self.copy_start(index)[0]


def make_long_reference(short: Reference, vocab: int, context: int | None) -> LongReference | str:
    """The reference, or why there is none. `short`: the reference of the same model, whose longest prompt is
    the source. `context`: the most tokens of the model, None if unknown."""
    source = short.copy_filled(max(range(len(short.prompts)), key=lambda i: len(short.prompts[i])))
    try:
        tokens = choose_length(short.caller.make_cache(), source, context)
        made = LongReference(short.caller, vocab, source, tokens, short.attention_check)
        if any(mx.any(mx.isnan(row)).item() for row in made.logits.values()):
            raise ValueError("the library computes NaN from keys and values that were filled in")
    except Exception as error:  # a library may raise anything for caches that it did not fill itself
        log.debug("load check: no long row", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return made


def choose_length(empty: Sequence[Any], source: Sequence[Any], context: int | None) -> int:
    """How many tokens the long row begins with: nearly as many as the largest window that is crossed.
    ValueError if the model's caches cannot be filled, or a row takes too much memory."""
    layers = layer_caches.flatten_caches(source)
    kinds = {layer_caches.get_kind(layer) for layer in layers}
    if LayerKind.OTHER in kinds:
        raise ValueError("the model has caches that only the library can fill")
    if kinds <= {LayerKind.STATE}:
        return STATE_TOKENS
    kept = [layer for layer in layers if layer_caches.get_kind(layer) is not LayerKind.STATE]
    pairs = [(layer.keys, layer.values) for layer in kept if layer.keys is not None]
    row_bytes = sum(a[:, :, :1].nbytes for pair in pairs for a in pair)
    crossed = [window - BEFORE for window in list_windows(empty) if BEFORE < window <= LONGEST_WINDOW]
    most = LONGEST_WINDOW if context is None else context - NEW
    tokens = max((tokens for tokens in crossed if tokens <= most), default=min(PLAIN_TOKENS, most))
    if tokens < 1:
        raise ValueError(f"the model takes {context} tokens")
    if tokens * row_bytes > MAX_BYTES:
        raise ValueError(f"a row of {tokens} tokens takes {tokens * row_bytes} bytes")
    return tokens


def repeat_tokens(source: Sequence[Any], empty: Sequence[Any], tokens: int) -> list[Any]:
    """Fill the `empty` caches with this many tokens, repeated from `source`. Recurrent states are copied."""
    weights = _weigh_tokens(tokens, list_windows(empty))
    layers = []
    for old, new in zip(layer_caches.flatten_caches(source), layer_caches.flatten_caches(empty), strict=True):
        if layer_caches.get_kind(old) is LayerKind.STATE:
            new.cache = list(old.cache)
        elif old.keys is not None:
            row = layer_caches.read_keys_values(old)
            at = mx.arange(tokens) % row.length
            keys, values = (a[:, :, at] * weights.astype(a.dtype) for a in (row.keys, row.values))
            new.update_and_fetch(keys, values)
        layers.append(new)
    return layer_caches.unflatten_caches(empty, layers)


def _weigh_tokens(tokens: int, windows: Sequence[int]) -> mx.array:
    """Factors [tokens, 1] of keys and values: no two neighbours alike, and the ends of windows stand out."""
    at, last = np.arange(tokens), tokens + NEW - 1
    ends = [last - window for window in windows] or [0, tokens]
    marked = np.abs(at[:, None] - np.array(ends)).min(axis=1) <= MARKED
    weights = (1 + 0.3 * np.sin(at)) * np.where(marked, MARK, 1.0)
    return mx.array(weights[:, None], dtype=mx.float32)
