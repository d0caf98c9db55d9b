"""Layers with plain weights whose class is replaced by a derived one.

The library's linear layer makes a transposed view of its weight in each call. A view computes nothing, but it
is a node in the graph of every forward, and costs time of the host. A decode step of few rows waits for the
host. Here the view is made once.

In reproducible mode on CUDA, the layers of a model with plain weights multiply the rows of decode steps by
the kernel of skinny_gemm.py. There a row has the same bits in any company, so that steps need not be
padded to one width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.model.hooks.skinny_gemm import can_multiply_plain, multiply_evenly
from mlxrun.model.machine.device import uses_gpu


def mix_in(layer: Any, mixin: type, prefix: str) -> None:
    """Put the methods of `mixin` before those of the layer's own class."""
    kind = type(layer)
    layer.__class__ = type(f"{prefix}{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})


class _TransposedLinear(nn.Linear):
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


class _EvenLinear(nn.Linear):
    """Chunks of prompts are multiplied as by the library, here and below. See `takes_heads`."""

    def __call__(self, x: mx.array) -> mx.array:
        if not is_multiplied_evenly(self, x):
            x = x if x.shape[-1] == self["weight"].shape[-1] else x.reshape(x.shape[0], 1, -1)
            library: mx.array = super().__call__(x)
            return library
        y = multiply_evenly(self, x)
        return y + self["bias"] if "bias" in self else y


class _EvenEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        if not is_multiplied_evenly(self, x):
            library: mx.array = super().as_linear(x)
            return library
        return multiply_evenly(self, x)


def is_multiplied_evenly(layer: Any, x: mx.array) -> bool:
    """Whether a layer of `hook_even_products` multiplies this input, rows of a decode step, by the kernel."""
    return x.shape[-2] == 1 and can_multiply_plain(layer, x.dtype)


def takes_heads(layer: Any) -> bool:
    """Whether the layer takes attention's result [rows, heads, 1, size], and returns [rows, 1, N]."""
    return isinstance(layer, _EvenLinear)


def can_gate(layer: Any, dtype: mx.Dtype) -> bool:
    """Whether `multiply_evenly` may make silu(gate) * up of the layer's outputs, if these are gate and up."""
    return isinstance(layer, _EvenLinear) and "bias" not in layer and can_multiply_plain(layer, dtype)


_EVEN: dict[type, type] = {nn.Linear: _EvenLinear, nn.Embedding: _EvenEmbedding}


def hook_even_products(model: nn.Module, dtype: mx.Dtype) -> int:
    """Make layers with plain weights multiply so that a row of a decode step has the same bits in any
    company. These are linear layers, and embeddings that serve as output layers. Returns how many there are:
    all layers with matrices, or none."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in _EVEN]
    if not all(can_multiply_plain(layer, dtype) for layer in layers):
        return 0
    ours = {id(value) for layer in layers for value in layer.values()}
    if any(array.ndim > 1 and id(array) not in ours for _, array in tree_flatten(model.parameters())):
        return 0
    for layer in layers:
        layer.__class__ = _EVEN[type(layer)]
    return len(layers)


def list_even(model: nn.Module) -> list[Any]:
    """The layers of `hook_even_products`."""
    return [layer for layer in model.modules() if type(layer) in _EVEN.values()]


def forget_even_products(model: nn.Module) -> None:
    """Multiply as the library does from now on."""
    for layer in list_even(model):
        layer.__class__ = next(plain for plain, even in _EVEN.items() if even is type(layer))


def is_plain_linear(layer: Any) -> bool:
    """Whether the layer is the library's linear layer, with or without a product of ours, and nothing
    more."""
    return type(layer) in (nn.Linear, _TransposedLinear, _EvenLinear)


def forget_view(layer: nn.Module) -> None:
    """Drop the view of a linear layer, which keeps its source in memory. The next call makes it again."""
    if isinstance(layer, _TransposedLinear):
        layer["_source"] = layer["_views"] = None


def transpose_weights(model: nn.Module) -> int:
    """Make plain linear layers, not derived ones, keep their transposed view. Returns how many do. Views take
    no memory and follow a replaced weight. Results equal the library's bit for bit."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer["_source"] = None
        layer.__class__ = _TransposedLinear
    return len(layers)
