"""Attention with a soft cap (Gemma 2), which the libraries' layers compute by hand, over RowKeys.

`route_softcaps` lets such layers attend to RowKeys through the seam of attention.py while rows decode; over
plain arrays they compute as before.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.attention import RowKeysCache

_MODULES = ("mlx_lm.models.gemma2", "mlx_vlm.models.gemma2.language")  # whose class `Attention` has a cap


def route_softcaps(model: nn.Module) -> int:
    """Let the model's layers with a soft cap attend to RowKeys; returns how many there are. Idempotent."""
    layers = [layer for layer in model.modules() if _has_cap(type(layer))]
    routed = {kind: _make_routed(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = routed[type(layer)]
    return len(layers)


def _has_cap(kind: type) -> bool:
    return kind.__module__ in _MODULES and kind.__name__ == "Attention"


def _make_routed(kind: Any) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, RowKeysCache):
            return _attend(self, x, mask, cache)
        attended: mx.array = kind.__call__(self, x, mask, cache)
        return attended

    return type("RoutedAttention", (kind,), {"__call__": call, "__module__": kind.__module__})


def _attend(layer: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
    rows, length, _ = x.shape
    parts = (
        (layer.q_proj, layer.n_heads),
        (layer.k_proj, layer.n_kv_heads),
        (layer.v_proj, layer.n_kv_heads),
    )
    queries, keys, values = (f(x).reshape(rows, length, n, -1).swapaxes(1, 2) for f, n in parts)
    fetched, _ = cache.update_and_fetch(layer.rope(keys, offset=cache.offset), values)
    queries = layer.rope(queries, offset=cache.offset)
    attended = fetched.attend(queries, layer.scale, mask, cap=layer.attn_logit_softcapping)
    output: mx.array = layer.o_proj(attended.swapaxes(1, 2).reshape(rows, length, -1))
    return output
