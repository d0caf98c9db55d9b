"""Attention with a soft cap (Gemma 2), which the libraries' layers compute by hand.

While rows decode, they attend to RowKeys through attention.py; over plain arrays they compute as before.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.attention import RowKeysCache
from mlxrun.model.hooks.derived_layers import mix_in

_CAPPED = ("mlx_lm.models.gemma2", "mlx_vlm.models.gemma2.language")  # whose class `Attention` has a cap


class _CappedAttention(nn.Module):
    """Mixed into the libraries' classes."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        is_plain = not isinstance(cache, RowKeysCache)
        if is_plain:
            attended: mx.array = super().__call__(x, mask, cache)
            return attended
        rows, length, _ = x.shape
        heads, kv_heads = self.n_heads, self.n_kv_heads
        parts = (self.q_proj, heads), (self.k_proj, kv_heads), (self.v_proj, kv_heads)
        queries, keys, values = (f(x).reshape(rows, length, n, -1).swapaxes(1, 2) for f, n in parts)
        fetched, _ = cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)
        queries = self.rope(queries, offset=cache.offset)
        attended = fetched.attend(queries, self.scale, mask, cap=self.attn_logit_softcapping)
        output: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(rows, length, -1))
        return output


def hook_softcaps(model: nn.Module) -> int:
    """Make the model's layers with a soft cap attend to RowKeys. Returns how many there are. Idempotent."""
    layers = [m for m in model.modules() if type(m).__module__ in _CAPPED and type(m).__name__ == "Attention"]
    for layer in layers:
        mix_in(layer, _CappedAttention, "Routed")
    return len(layers)
