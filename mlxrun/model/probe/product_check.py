"""Compares the methods by which quantized layers multiply with products of dequantized float32 weights.

While the other checks run, half precision multiplies as the library does; so what serving multiplies by is
compared here, one layer of each shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.quantized_layers import (
    MethodTable,
    dequantize_weight,
    is_expert,
    list_routed,
    multiply_routed,
)
from mlxrun.model.machine.device import may_shorten_float32
from mlxrun.model.probe.attention_check import measure_rms
from mlxrun.model.probe.report import ProbeCheck

NAME = "products of quantized weights"
INSTEAD = "the library's products"
# Root mean square of differences, in units of that of the product.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1e-2}
SHORTENED = 2e-3  # of float32, where the GPU multiplies it with the mantissa of float16


def check_products(model: nn.Module) -> tuple[ProbeCheck, ...]:
    """The check of all methods that are not the library's; none if there are none. What differs is set back
    to the library's."""
    routed = [layer for layer in list_routed(model) if layer.table != MethodTable()]
    kinds = {_describe_kind(layer): layer for layer in reversed(routed)}
    compared = [ratio for layer in kinds.values() for ratio in _compare_layer(layer)]
    if not compared:
        return ()
    difference, limit = max(compared, key=lambda pair: pair[0] / pair[1])
    passed = difference <= limit
    if not passed:
        for layer in routed:
            layer.table = MethodTable()
    return (ProbeCheck(NAME, passed, difference, limit=limit, instead="" if passed else INSTEAD),)


def _describe_kind(layer: Any) -> tuple[Any, ...]:
    shape = (tuple(layer["weight"].shape), layer.bits, layer.group_size, layer.mode, layer["scales"].dtype)
    return (*shape, type(layer).__name__, tuple(layer.table.entries))


def _compare_layer(layer: Any) -> Iterator[tuple[float, float]]:
    """By method: the difference, and its limit."""
    least = 1
    for most, method in layer.table.entries:
        if method != "library":
            yield _compare_rows(layer, least)
        least = most + 1


def _compare_rows(layer: Any, rows: int) -> tuple[float, float]:
    """`rows`: of a linear layer; of an expert layer, the tokens of each expert."""
    scales = layer["scales"].dtype
    dtype = scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16
    weight = dequantize_weight(layer, mx.float32)
    count = rows * weight.shape[0] if is_expert(layer) else rows
    x = mx.random.normal((count, 1, weight.shape[-1]), key=mx.random.key(rows)).astype(dtype)
    wide = x.astype(mx.float32)
    if is_expert(layer):
        experts = mx.repeat(mx.arange(weight.shape[0]), rows)
        exact = wide @ mx.repeat(weight, rows, axis=0).swapaxes(-1, -2)
        found = multiply_routed(layer, x, experts)
    else:
        exact, found = wide @ weight.T, multiply_routed(layer, x)
    difference = measure_rms(found, exact, slice(None))
    shortened = dtype == mx.float32 and may_shorten_float32()
    return difference, SHORTENED if shortened else TOLERANCE[dtype]
