"""Plain linear layers that multiply by a transposed view of their weight which is made once.

The library's layer makes one in each call. There is nothing to compute, but it is one more node in the graph
of every forward: the host makes it, copies it from a compiled forward, and looks at it at the launch. The
host is what a decode step of few rows waits for.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class _TransposedLinear(nn.Linear):
    _source: mx.array | None  # the weight of which `_transposed` is a view
    _transposed: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if self._source is not weight:
            self._source, self._transposed = weight, weight.T
            mx.eval(self._transposed)
        return mx.addmm(self["bias"], x, self._transposed) if "bias" in self else x @ self._transposed


def forget_view(layer: nn.Module) -> None:
    """Drop the view of a linear layer, which keeps its source in memory. The next call makes it again."""
    if isinstance(layer, _TransposedLinear):
        layer._source = None
        layer.pop("_transposed", None)


def transpose_weights(model: nn.Module) -> int:
    """Let linear layers, but those of derived classes, use such views; returns how many do. Views take no
    memory, and follow a weight that is replaced; results are the library's bit by bit."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer._source = None
        layer.__class__ = _TransposedLinear
    return len(layers)
