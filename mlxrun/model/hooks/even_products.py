"""Layers with plain weights that multiply rows of decode steps by the kernel of skinny_gemm.py, on CUDA.

There a row has the same bits in any company. So in reproducible mode all rows are multiplied so, and steps
need not be padded to one width. In the usual mode a table has the numbers of rows for which the kernel takes
less time than the library (weight_form.py). Chunks of prompts are the library's. What follows a product can
be made with it, also where the weights are quantized (quantized_layers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.model.hooks.derived_layers import TransposedLinear
from mlxrun.model.hooks.quantized_layers import MethodTable, is_packed, is_routed_linear
from mlxrun.model.hooks.skinny_gemm import MOST_ROWS, can_multiply_plain, count_inputs, multiply_evenly

EVERY_ROW = MethodTable(((MOST_ROWS, "packed"),))  # has no limit, as it is the last entry
LIBRARY = MethodTable()


class _EvenLinear(TransposedLinear):
    """`table`: the kernel's numbers of rows are those of its method `packed`. See `takes_heads`."""

    table: MethodTable

    def __call__(self, x: mx.array) -> mx.array:
        if not is_multiplied_evenly(self, x):
            inputs = self["weight"].shape[-1]
            return super().__call__(x if x.shape[-1] == inputs else x.reshape(x.shape[0], 1, inputs))
        y = multiply_evenly(self, x)
        return y + self["bias"] if "bias" in self else y


class _EvenEmbedding(nn.Embedding):
    table: MethodTable

    def as_linear(self, x: mx.array) -> mx.array:
        if not is_multiplied_evenly(self, x):
            library: mx.array = super().as_linear(x)
            return library
        return multiply_evenly(self, x)


_EVEN: dict[type, type] = {nn.Linear: _EvenLinear, nn.Embedding: _EvenEmbedding}


def is_multiplied_evenly(layer: Any, x: mx.array) -> bool:
    """Whether a layer with a table multiplies this input by the kernel: rows of a decode step, as many as the
    table has for it."""
    if x.ndim < 2 or x.shape[-2] != 1:
        return False
    rows = x.size // count_inputs(layer)
    if "scales" in layer:
        return is_packed(layer, rows, x.dtype)
    return can_multiply_plain(layer, x.dtype) and layer.table.choose(rows) == "packed"


def takes_heads(layer: Any) -> bool:
    """Whether the layer takes attention's result [rows, heads, 1, size], and returns [rows, 1, N]."""
    return isinstance(layer, _EvenLinear)


def has_epilogues(layer: Any, dtype: mx.Dtype) -> bool:
    """Whether the kernel may compute what follows the layer's product: silu(gate) * up, or a sum."""
    if "bias" in layer:
        return False
    if isinstance(layer, _EvenLinear):
        return layer.table != LIBRARY and can_multiply_plain(layer, dtype)
    return is_routed_linear(layer) and is_packed(layer, 1, dtype)


def multiply_and_add(layer: Any, x: mx.array, added: mx.array) -> mx.array | None:
    """`added` [rows, 1, N] + the layer's product, which is rounded first. None if the kernel does not
    multiply these rows."""
    own = has_epilogues(layer, x.dtype) and is_multiplied_evenly(layer, x)
    return multiply_evenly(layer, x, added=added) if own else None


def hook_even_products(
    model: nn.Module, dtype: mx.Dtype, table: MethodTable = EVERY_ROW, *, whole: bool = True
) -> int:
    """Make layers with plain weights multiply rows of decode steps by the kernel, as many as the table says.
    These are linear layers, and embeddings that serve as output layers. Returns how many there are. `whole`:
    all layers with matrices, or none."""
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in _EVEN]
    able = [layer for layer in layers if can_multiply_plain(layer, dtype)]
    if whole and (len(able) < len(layers) or _has_other_matrices(model, layers)):
        return 0
    for layer in able:
        layer.__class__ = _EVEN[type(layer)]
        layer.table = table
        if isinstance(layer, _EvenLinear):
            layer["_source"] = None
    return len(able)


def _has_other_matrices(model: nn.Module, layers: Iterable[Any]) -> bool:
    ours = {id(value) for layer in layers for value in layer.values()}
    return any(array.ndim > 1 and id(array) not in ours for _, array in tree_flatten(model.parameters()))


def list_even(model: nn.Module) -> list[Any]:
    """The layers that multiply some numbers of rows by the kernel."""
    return [layer for layer in model.modules() if type(layer) in _EVEN.values() and layer.table != LIBRARY]


def use_table(layers: Iterable[Any], table: MethodTable) -> None:
    """Make layers of `list_even` multiply by this table from now on."""
    for layer in layers:
        layer.table = table


def forget_even_products(model: nn.Module) -> None:
    """Multiply as the library does from now on."""
    use_table(list_even(model), LIBRARY)


def is_plain_linear(layer: Any) -> bool:
    """Whether the layer is the library's linear layer, with or without a product of ours, and nothing
    more."""
    return type(layer) in (nn.Linear, TransposedLinear, _EvenLinear)
