"""Linear layers of one input whose weights are joined: one product computes all of them.

The weights are held once. The layers themselves keep views of the joined ones, for prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.even_products import has_epilogues, is_multiplied_evenly, is_plain_linear
from mlxrun.model.hooks.quantized_layers import is_quantized_linear
from mlxrun.model.hooks.skinny_gemm import multiply_evenly

_ARRAYS = ("weight", "scales", "biases", "bias")  # all have the outputs on their first axis


def can_join(layers: Sequence[Any]) -> bool:
    """Whether these are linear layers of one form, plain or quantized."""
    known = all(is_plain_linear(layer) or is_quantized_linear(layer) for layer in layers)
    return known and len({describe_form(layer) for layer in layers}) == 1


def describe_form(layer: Any) -> tuple[Any, ...]:
    """What layers must have in common to be joined. Those of other kinds differ by their classes."""
    arrays = [(name, layer[name].dtype, layer[name].shape[1:]) for name in _ARRAYS if name in layer]
    others = tuple(getattr(layer, name, None) for name in ("bits", "group_size", "mode"))
    return (type(layer), repr(arrays), *others)


class JoinedProduct:
    """The outputs of several linear layers, one after the other, by one product."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Join the weights, lazily. The layers have views of them afterwards."""
        self._first = layers[0]
        self._joined = layers[0] if len(layers) == 1 else _join(layers)

    @property
    def outputs(self) -> int:
        """Numbers of the product."""
        return int(self._joined["weight"].shape[0])

    def __call__(self, x: mx.array) -> mx.array:
        """[..., all outputs] of x [..., D]."""
        product: mx.array = self.layer(x)
        return product

    @property
    def layer(self) -> Any:
        """The joined layer, which multiplies by the methods that the layers have now."""
        if hasattr(self._first, "table"):
            self._joined.table = self._first.table
        return self._joined

    def gate(self, x: mx.array, gate: Callable[[mx.array], mx.array]) -> mx.array:
        """silu(gate) * up of the product of gate and up, by `gate` where the product's kernel does not."""
        layer = self.layer
        own = has_epilogues(layer, x.dtype) and is_multiplied_evenly(layer, x)
        return multiply_evenly(layer, x, gated=True) if own else gate(layer(x))


def _join(layers: Sequence[Any]) -> nn.Module:
    joined = copy.copy(layers[0])
    for name in _ARRAYS:
        if name in joined:
            joined[name] = whole = mx.concatenate([layer[name] for layer in layers])
            start = 0
            for layer in layers:
                stop = start + layer[name].shape[0]
                layer[name], start = whole[start:stop], stop
    return joined
