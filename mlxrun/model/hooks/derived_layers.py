"""Layers whose class is replaced by a derived one: with plain weights, rotary positions, or a soft cap.

The library's linear layer makes a transposed view of its weight in each call. A view computes nothing, but it
is a node in the graph of every forward, and costs time of the host. A decode step of few rows waits for the
host. Here the view is made once. On a CPU, rotary positions are some 30 nodes. Most of them are made once a
forward there, and not in each layer for queries and for keys.

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

from mlxrun.model.hooks.attention import RowKeysCache, StepPositions
from mlxrun.model.hooks.skinny_gemm import can_multiply_plain, multiply_evenly
from mlxrun.model.machine.device import uses_gpu

_CAPPED = ("mlx_lm.models.gemma2", "mlx_vlm.models.gemma2.language")  # whose class `Attention` has a cap


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
        layer["_source"] = layer["_views"] = None


def transpose_weights(model: nn.Module) -> int:
    """Make plain linear layers, not derived ones, keep their transposed view. Returns how many do. Views take
    no memory and follow a replaced weight. Results equal the library's bit for bit."""
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer["_source"] = None
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
