"""Layers with plain weights whose class is replaced by a derived one.

The library's linear layer makes a transposed view of its weight in each call. A view computes nothing, but it
is a node in the graph of every forward, and costs time of the host. A decode step of few rows waits for the
host. Here the view is made once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.machine.device import uses_gpu


def mix_in(layer: Any, mixin: type, prefix: str) -> None:
    """Put the methods of `mixin` before those of the layer's own class."""
    kind = type(layer)
    layer.__class__ = type(f"{prefix}{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})


class TransposedLinear(nn.Linear):
    """`_views`: of the weight `_source`, [in, out], and for one row on a CPU [1, in, out]. A product of as
    many axes as the input has folds none. Several rows would each read the weight."""

    def __call__(self, x: mx.array) -> mx.array:
        if self["_source"] is not self["weight"]:
            view = self["weight"].T
            self["_source"], self["_views"] = self["weight"], (view, view if uses_gpu() else view[None])
            mx.eval(self["_views"])
        shape = x.shape
        view = self["_views"][len(shape) == 3 and shape[0] == 1]
        return mx.addmm(self["bias"], x, view) if "bias" in self else x @ view


def forget_view(layer: nn.Module) -> None:
    """Drop the view of a linear layer, which keeps its source in memory. The next call makes it again."""
    if isinstance(layer, TransposedLinear):
        layer["_source"] = layer["_views"] = None


def transpose_weights(model: nn.Module) -> int:
    """Make plain linear layers, not derived ones, keep their transposed view. Returns how many do. Views take
    no memory and follow a replaced weight. Results equal the library's bit for bit."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer["_source"] = None
        layer.__class__ = TransposedLinear
    return len(layers)
