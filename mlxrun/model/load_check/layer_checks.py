"""Compares the kernels of fused layers with the library's operations, on random arrays.

In logits, a fault of some percent may disappear amid the rounding of half precision. So each operation is
compared by itself, once for each form that the model's layers have. A row must give the same bits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.fused.fused_blocks import FusedLayer, list_fused
from mlxrun.model.fused.joined_layers import describe_form
from mlxrun.model.fused.operations import (
    ARRAYS,
    HeadRule,
    LayerOperations,
    NormRule,
    choose_operations,
)
from mlxrun.model.hooks.even_products import has_epilogues
from mlxrun.model.hooks.quantized_layers import dequantize_weight
from mlxrun.model.hooks.skinny_gemm import multiply_evenly
from mlxrun.model.load_check.attention_checks import FACTOR, LEAST, find_limit, measure_rms
from mlxrun.model.load_check.report import LoadCheck, run_check
from mlxrun.model.load_check.rounding import LogitDifference, widen

LIBRARY_LAYERS = "layers as the library computes them"
OFFSETS = (0, 1, 17, 4095, 40000)  # positions of the rows
ALONE = 3  # the row that is computed by itself too
Compute = Callable[[LayerOperations, Sequence[mx.array]], Sequence[mx.array]]
Operation = tuple[Compute, Sequence[tuple[int, ...]]]  # and the shapes of a row's arrays


class LayerError(RuntimeError):
    """A kernel's result for a row depends on the rows beside it."""


def check_layers(model: nn.Module) -> LoadCheck:
    """The check of all operations of a model with fused layers."""

    def compare() -> LogitDifference:
        operations = choose_operations()
        kinds = {_describe_kind(layer): layer for layer in list_fused(model)}
        found = (
            difference
            for layer in kinds.values()
            for operation in _list_operations(layer)
            for difference in _compare(operations, operation, layer.second.weight.dtype)
        )
        return max(found, key=lambda difference: difference.ratio)

    return run_check("kernels of layers", compare, max(LEAST.values()), LIBRARY_LAYERS)


def _describe_kind(layer: FusedLayer) -> tuple[object, ...]:
    """What decides the kernels of a layer, besides the weights of its norms."""
    heads, gated = layer.heads, layer.gated
    norms = heads.norms and tuple(norm.eps for norm in heads.norms)
    rotary = heads.rotary and replace(heads.rotary, frequencies=None)
    form = (heads.heads, heads.kv_heads, heads.size, norms, rotary, layer.second.weight.dtype)
    products = (
        gated and describe_form(gated.layer),
        describe_form(layer.output),
        describe_form(layer.middle),
    )
    return (*form, layer.second.weight.size, layer.second.eps, gated and gated.outputs, *products)


def _list_operations(layer: FusedLayer) -> Iterator[Operation]:
    size = layer.second.weight.size
    yield partial(_add_norm, layer.second), ((1, size), (1, size))
    heads = layer.heads
    yield partial(_make_heads, heads), ((1, (heads.heads + 2 * heads.kv_heads) * heads.size),)
    if layer.gated is not None:
        yield lambda operations, given: [operations.gate(given[0])], ((1, layer.gated.outputs),)
        if has_epilogues(layer.gated.layer, layer.second.weight.dtype):
            yield partial(_multiply_gated, layer.gated.layer), ((1, size),)
    products: list[tuple[Any, tuple[int, ...]]] = [(layer.output, (heads.heads, 1, heads.size))]
    if layer.gated is not None:
        products.append((layer.middle, (1, layer.gated.outputs // 2)))
    for product, shape in products:
        if has_epilogues(product, layer.second.weight.dtype):
            yield partial(_multiply_and_add, product), (shape, (1, size))


def _add_norm(norm: NormRule, operations: LayerOperations, given: Sequence[mx.array]) -> Sequence[mx.array]:
    is_wide = given[0].dtype == mx.float32
    return operations.add_norm(given[0], given[1], _widen_norm(norm) if is_wide else norm)


def _make_heads(rule: HeadRule, operations: LayerOperations, given: Sequence[mx.array]) -> Sequence[mx.array]:
    product, offsets = given
    if product.dtype == mx.float32 and rule.norms is not None:
        query, key = map(_widen_norm, rule.norms)
        rule = replace(rule, norms=(query, key))
    queries, written = operations.make_heads(product, rule, offsets)
    rows = product.shape[0]
    return queries, written[:rows], written[rows:]


def _multiply_gated(layer: Any, operations: LayerOperations, given: Sequence[mx.array]) -> Sequence[mx.array]:
    x = given[0]
    if operations is ARRAYS:
        return [operations.gate(x @ _read_weight(layer, x.dtype).T)]
    return [multiply_evenly(layer, x, gated=True)]


def _multiply_and_add(
    layer: Any, operations: LayerOperations, given: Sequence[mx.array]
) -> Sequence[mx.array]:
    x, added = given
    if operations is ARRAYS:
        return [added + x.reshape(len(x), 1, -1) @ _read_weight(layer, x.dtype).T]
    return [multiply_evenly(layer, x, added=added)]


def _read_weight(layer: Any, dtype: mx.Dtype) -> mx.array:
    """The layer's weight, which is dequantized to its own type first."""
    weight = dequantize_weight(layer, layer["scales"].dtype) if "scales" in layer else layer["weight"]
    return weight.astype(dtype)


def _widen_norm(norm: NormRule) -> NormRule:
    return replace(norm, weight=widen(norm.weight))


def _compare(operations: LayerOperations, operation: Operation, dtype: mx.Dtype) -> Iterator[LogitDifference]:
    """The differences of an operation's results. LayerError if those of a row depend on the rows beside
    it."""
    compute, shapes = operation
    keys = mx.random.split(mx.random.key(11), len(shapes))
    given = [
        2 * mx.random.normal((len(OFFSETS), *shape), key=key) for shape, key in zip(shapes, keys, strict=True)
    ]
    given = [array.astype(dtype) for array in given]
    if len(given) == 1:
        given.append(mx.array(OFFSETS, dtype=mx.int32))
    found, own = compute(operations, given), compute(ARRAYS, given)
    exact = compute(ARRAYS, [widen(array) for array in given])
    for result, library, wide in zip(found, own, exact, strict=True):
        limit = max(FACTOR * measure_rms(library, wide), find_limit(dtype, LEAST) or 0.0)
        yield LogitDifference(measure_rms(result, wide), limit)
    alone = compute(operations, [array[ALONE : ALONE + 1] for array in given])
    if not all(mx.array_equal(one[0], many[ALONE]).item() for one, many in zip(alone, found, strict=True)):
        raise LayerError("a row's result depends on the rows beside it")
