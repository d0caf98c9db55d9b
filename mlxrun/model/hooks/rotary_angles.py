"""Rotary positions whose angles are made once a forward, and not in each layer for queries and for keys.

On a CPU, the library's rotary positions are some 30 nodes of the graph. Most of them are the same in all
layers with one rule.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.machine.device import uses_gpu


class StepPositions(mx.array):
    """The positions of a step's new tokens, int32 [rows]. No array of this class is changed in place, so what
    was made of it can be kept."""


class _Angles:
    """The cosines and sines of a forward's rotary positions, which all layers with one rule use."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._offset: Any = None  # the positions of these: kept, as another may get its address
        self._factors: dict[int, list[mx.array]] = {}  # by the number of heads

    def find(self, layer: Any, x: mx.array, offset: int | StepPositions) -> list[mx.array]:
        """Two factors, of heads x [rows, heads, tokens, D] and of x with its two parts exchanged. Both have
        the shape of x. `offset`: the position of the first token, or those of rows."""
        rows, heads, tokens, width = x.shape
        known = offset if isinstance(offset, int) else id(offset)
        key = type(offset), known, rows, tokens, width, x.dtype
        if key != self._known:
            self._known, self._offset, self._factors = key, offset, {}
            pairs: int = layer.dims // 2
            unit = mx.array([1.0] * pairs + [0.0] * (width - pairs), x.dtype)  # which the library turns
            shape = offset.size if isinstance(offset, StepPositions) else 1, 1, tokens, width
            turned = layer.rotate(mx.broadcast_to(unit, shape), offset)
            cos, sin, rest = mx.split(turned, [pairs, 2 * pairs], axis=-1)
            parts = (cos, cos, rest + 1), (-sin, sin, rest)
            self._factors[1] = [mx.concatenate(factor, axis=-1) for factor in parts]
        if heads not in self._factors:
            self._factors[heads] = [mx.broadcast_to(factor, x.shape) for factor in self._factors[1]]
        return self._factors[heads]


class _SharedAngles(nn.Module):
    """Mixed into the libraries' rotary positions."""

    _angles: _Angles

    def rotate(self, x: mx.array, offset: Any) -> mx.array:
        """What the library computes."""
        rotated: mx.array = super().__call__(x, offset=offset)
        return rotated

    def __call__(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        if x.ndim != 4 or not isinstance(offset, (int, StepPositions)):
            return self.rotate(x, offset)
        same, exchanged = self._angles.find(self, x, offset)
        pairs: int = self.dims // 2
        first, second, *rest = mx.split(x, 2 if 2 * pairs == x.shape[3] else [pairs, 2 * pairs], axis=-1)
        return x * same + mx.concatenate([second, first, *rest], axis=-1) * exchanged


def share_angles(model: nn.Module) -> int:
    """Make the library's rotary positions compute the angles of a forward once for all layers with one rule.
    Returns how many do. Results equal the library's bit for bit. GPUs have a kernel instead."""
    layers: list[Any] = [] if uses_gpu() else list(model.modules())
    layers = [m for m in layers if type(m) is nn.RoPE or type(m).__name__ == "Llama3RoPE"]
    layers = [layer for layer in layers if not layer.traditional]
    shared: dict[Any, _Angles] = {}
    for layer in layers:
        rule = layer["_freqs"].tolist() if "_freqs" in layer else (layer.base, layer.scale)
        mix_in(layer, _SharedAngles, "Shared")
        layer._angles = shared.setdefault((layer.dims, str(rule)), _Angles())
    return len(layers)
