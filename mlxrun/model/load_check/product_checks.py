"""Compares the products of serving with float32, for one layer of each shape and form of weights.

While the other checks run, half precision multiplies as the library does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.even_products import forget_even_products, list_even
from mlxrun.model.hooks.quantized_layers import (
    MethodTable,
    dequantize_weight,
    forget_methods,
    is_expert,
    list_routed,
    multiply_routed,
)
from mlxrun.model.hooks.skinny_gemm import KERNELS, multiply_evenly
from mlxrun.model.load_check.attention_checks import find_limit, measure_rms
from mlxrun.model.load_check.report import LoadCheck

PRODUCTS = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1e-2}  # the limits of differences
PRODUCTS_CHECK = "products of quantized weights"


def check_products(model: nn.Module) -> tuple[LoadCheck, ...]:
    """The check of all methods that are not the library's, empty if there are none. Layers that differ return
    to the library's."""
    routed = [layer for layer in list_routed(model) if layer.table != MethodTable()]
    layers = [*routed, *list_even(model)]
    kinds = {_describe_kind(layer): layer for layer in reversed(layers)}  # the first of each
    compared = [ratio for layer in kinds.values() for ratio in _compare_layer(layer)]
    if not compared:
        return ()
    difference, limit = max(compared, key=lambda pair: pair[0] / pair[1])
    passed = difference <= limit
    if not passed:
        forget_products(model)
    instead = "" if passed else "the library's products"
    return (LoadCheck(PRODUCTS_CHECK, passed, difference, limit=limit, instead=instead),)


def forget_products(model: nn.Module) -> None:
    """Multiply as the library does from now on."""
    forget_methods(model)
    forget_even_products(model)


def _describe_kind(layer: Any) -> tuple[Any, ...]:
    shape, name = tuple(layer["weight"].shape), type(layer).__name__
    if "scales" not in layer:
        form: tuple[Any, ...] = (layer["weight"].dtype,)
    else:
        form = (layer.bits, layer.group_size, layer.mode, layer["scales"].dtype)
    return (shape, *form, name, tuple(layer.table.entries))


def _compare_layer(layer: Any) -> Iterator[tuple[float, float]]:
    """By method: the difference, and its limit."""
    least = 1
    for most, method in layer.table.entries:
        # Each kernel of the skinny GEMM is other code.
        for rows in (
            (least, *(rows + 1 for rows in KERNELS if rows < most)) if method == "packed" else (least,)
        ):
            if method != "library":
                yield _compare_rows(layer, rows)
        least = most + 1


def _compare_rows(layer: Any, rows: int) -> tuple[float, float]:
    """`rows`: of a linear layer; of an expert layer, the tokens of each expert."""
    plain = "scales" not in layer
    dtype = layer["weight" if plain else "scales"].dtype
    dtype = dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16
    weight = layer["weight"].astype(mx.float32) if plain else dequantize_weight(layer, mx.float32)
    count = rows * weight.shape[0] if is_expert(layer) else rows
    x = mx.random.normal((count, 1, weight.shape[-1]), key=mx.random.key(rows)).astype(dtype)
    wide = x.astype(mx.float32)
    if is_expert(layer):
        experts = mx.repeat(mx.arange(weight.shape[0]), rows)
        exact = wide @ mx.repeat(weight, rows, axis=0).swapaxes(-1, -2)
        found = multiply_routed(layer, x, experts)
    else:
        exact, found = wide @ weight.T, multiply_evenly(layer, x) if plain else multiply_routed(layer, x)
    return measure_rms(found, exact), find_limit(dtype, PRODUCTS) or 0.0
