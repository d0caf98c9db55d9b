"""How attention logits are made: windows, sinks, soft caps, and the latent form.

In the latent form (multi-head latent attention of DeepSeek-V2, arXiv:2405.04434) a layer's `keys` are latent
vectors, which serve as values too. Its `values` are their rotary parts. The product of these and `positions`
is added to the logits. Models compute it as `positions @ values.swapaxes(-1, -2)` and pass it as the mask.
Over RowKeys it becomes PositionLogits, which are computed later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How logits become weights.

    `window`: the newest tokens that a row attends to, None: all. `sinks` [Hq]: logits of no token. `cap`:
    logits become cap * tanh(logits / cap), 0: they stay. `positions` [rows, Hq, 1, D']: in the latent form,
    already scaled.
    """

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    cap: float = 0.0
    positions: mx.array | None = None


@dataclass(frozen=True, slots=True)
class PositionLogits:
    """Stands for the product of `positions` [rows, Hq, 1, D'] and the rotary parts of all rows."""

    positions: mx.array


class TurnedParts(mx.array):
    """Stands for the rotary parts of all rows, [rows, H, D', tokens]. It is an array because `array @ x` asks
    only a subclass first. It is empty so that any other use fails."""

    def __init__(self) -> None:
        super().__init__([])

    def __rmatmul__(self, positions: mx.array) -> PositionLogits:
        return PositionLogits(positions)


def attend_arrays(
    queries: mx.array,
    keys: Any,
    values: Any,
    mask: mx.array | None,
    rule: LogitRule,
    attend: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention,
) -> mx.array:
    """Attention of queries [B, Hq, 1, D] to arrays [B, H, N, D]. `attend`: takes the arguments of the
    library's function. `mask`: bool, broadcast to [B, Hq, 1, N], in place of a window. TypeError for
    quantized keys if the rule needs plain ones."""
    scale = rule.scale
    if (rule.positions is not None or rule.cap) and not isinstance(keys, mx.array):
        raise TypeError("latent attention and soft caps need keys that are not quantized")
    if rule.positions is not None:
        logits = rule.positions @ values.swapaxes(-1, -2)
        if mask is not None:
            logits = mx.where(mask, logits, mx.finfo(logits.dtype).min)
        return attend(queries, keys, keys, scale=scale, mask=logits)
    if rule.cap:
        return _attend_capped(queries * scale, keys, values, mask, rule.cap)
    extra = {} if rule.sinks is None else {"sinks": rule.sinks}
    return attend(queries, keys, values, scale=scale, mask=mask, **extra)


def _attend_capped(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, cap: float
) -> mx.array:
    rows, heads, length, _ = queries.shape
    folded = queries.reshape(rows, keys.shape[1], -1, queries.shape[-1])  # heads that share keys: one product
    logits = mx.tanh(folded @ keys.swapaxes(-1, -2) / cap) * cap
    if mask is not None:
        logits = mx.where(mask, logits, mx.finfo(logits.dtype).min)
    weights = mx.softmax(logits, axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, length, -1)
