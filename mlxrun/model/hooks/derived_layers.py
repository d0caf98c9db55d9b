"""Layers whose class is replaced by a derived one: layers with plain weights, and attention with a soft cap.

The library's linear layer makes a transposed view of its weight in each call. A view computes nothing, but it
is a node in the graph of every forward, and costs time of the host. A decode step of few rows waits for the
host. Here the view is made once.

In reproducible mode on CUDA, the layers of a model with plain weights multiply the rows of decode steps by
the kernel of skinny_gemm.py. There a row has the same bits in any company, so that steps need not be
padded to one width.

The libraries' layers compute attention with a soft cap (Gemma 2) by hand. While rows decode, they attend to
RowKeys through attention.py; over plain arrays they compute as before.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.model.hooks.attention import RowKeysCache
from mlxrun.model.hooks.skinny_gemm import can_multiply_plain, multiply_evenly

_CAPPED = ("mlx_lm.models.gemma2", "mlx_vlm.models.gemma2.language")  # whose class `Attention` has a cap


def mix_in(layer: Any, mixin: type, prefix: str) -> None:
    """Put the methods of `mixin` before those of the layer's own class."""
    kind = type(layer)
    layer.__class__ = type(f"{prefix}{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})


class _TransposedLinear(nn.Linear):
    _source: mx.array | None  # the weight of which `_transposed` is a view
    _transposed: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if self._source is not weight:
            self._source, self._transposed = weight, weight.T
            mx.eval(self._transposed)
        return mx.addmm(self["bias"], x, self._transposed) if "bias" in self else x @ self._transposed


class _EvenLinear(nn.Linear):
    """Chunks of prompts are multiplied as by the library, here and below."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[-2] != 1 or not can_multiply_plain(self, x.dtype):
            library: mx.array = super().__call__(x)
            return library
        y = multiply_evenly(self, x)
        return y + self["bias"] if "bias" in self else y


class _EvenEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        if x.shape[-2] != 1 or not can_multiply_plain(self, x.dtype):
            library: mx.array = super().as_linear(x)
            return library
        return multiply_evenly(self, x)


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
        layer._source = None
        layer.pop("_transposed", None)


def transpose_weights(model: nn.Module) -> int:
    """Make plain linear layers, not derived ones, keep their transposed view. Returns how many do. Views take
    no memory and follow a replaced weight. Results equal the library's bit for bit."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer._source = None
        layer.__class__ = _TransposedLinear
    return len(layers)


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
