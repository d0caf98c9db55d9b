"""Quantized layers that multiply by the fastest method for their number of rows.

`hook_products` replaces the call of quantized linear layers and of embeddings that serve as output layers;
`hook_experts` that of expert layers. A call's shapes alone decide the method, so that forwards may be
compiled. All methods give the library's result within rounding.

A GPU computes later than the host launches, and each waiting product has its dequantized weight in memory
already. So in a block of `bound_transients`, products are launched after a number of such weights, and the
host waits for earlier ones.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.hooks.skinny_gemm import MOST_ROWS, can_multiply_packed, multiply_few_rows
from mlxrun.model.machine.device import StreamSpread

ProductMethod = Literal["library", "flat", "packed", "dequantized"]

MIN_MATRIX_ROWS = 8  # from so many rows MLX's CUDA backend multiplies a matrix; below, each row by itself
FLAT_ROWS = 4  # from so many rows, one matrix takes it less time than each row by itself
MAX_TRANSIENT = 1 << 27  # numbers of a weight that may be dequantized for one call
MAX_EXPERT_TRANSIENT = 1 << 28  # the same of all experts of a layer together
LAUNCHED = 1 << 27  # numbers of dequantized weights that are launched together
MOST_LAUNCHES = 2  # that are not computed yet


@dataclass(frozen=True, slots=True)
class MethodTable:
    """The method for each number of rows, as (most rows, method), ascending. The last one has no limit.

    `library`: the library's call; MLX on CUDA multiplies `[rows, 1, D]` row by row. `flat`: as one matrix
    `[rows, D]`, padded to MIN_MATRIX_ROWS. `packed`: by the kernel of skinny_gemm.py, or where it does not
    cover the layer, by the faster of these two. `dequantized`: with the weight dequantized for this call.
    """

    entries: tuple[tuple[int, ProductMethod], ...] = ((1, "library"),)

    def choose(self, rows: int) -> ProductMethod:
        """The method for this number of rows."""
        return next((method for most, method in self.entries if rows <= most), self.entries[-1][1])

    def describe(self, unit: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
        """The table as text, for logs. `unit`: what its numbers count; `names`: of methods, if they have
        others."""
        named = [(most, names.get(method, method)) for most, method in self.entries]
        steps = [f"{method} up to {most} {unit}" for most, method in named[:-1]]
        last = named[-1][1]
        return ", ".join([*steps, f"{last} beyond" if steps else last])


class _RoutedLinear(nn.QuantizedLinear):
    table: MethodTable

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(self, x, self.table.choose(x.size // x.shape[-1]))
        return y + self["bias"] if "bias" in self else y


class _RoutedEmbedding(nn.QuantizedEmbedding):
    table: MethodTable

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(self, x, self.table.choose(x.size // x.shape[-1]))


class _RoutedExperts(nn.Module):
    """Mixed into the libraries' classes of expert layers. The table's numbers are the tokens that each expert
    has on average. Indices that are not sorted are the library's: `gather_mm` then reads an expert again for
    each token. So are those of decode steps, whose weights would all be in memory at once."""

    table: MethodTable

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        method = self.table.choose(indices.size // self["weight"].shape[0])
        fits = are_bounded() and count_weights(self) <= MAX_EXPERT_TRANSIENT
        if not (sorted_indices and fits and method == "dequantized"):
            library: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return library
        weight = dequantize_weight(self, x.dtype).swapaxes(-1, -2)
        y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=True)
        record_product(y, count_weights(self))
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


_ROUTED: dict[type, type] = {nn.QuantizedLinear: _RoutedLinear, nn.QuantizedEmbedding: _RoutedEmbedding}
# Layers of the libraries that can be held dequantized; each has a plain twin beside it, without "Quantized".
_HELD = ("QuantizedLinear", "QuantizedEmbedding", "QuantizedSwitchLinear", "QuantizedMultiLinear")


def list_quantized(model: nn.Module) -> list[nn.Module]:
    """All layers with quantized weights that can be held dequantized."""
    return [module for module in list_modules(model) if _find_plain_class(module) is not None]


def is_quantized_linear(layer: Any) -> bool:
    """Whether the layer is the library's quantized linear layer, with or without a method of its own, and
    nothing more."""
    return type(layer) in (nn.QuantizedLinear, _RoutedLinear)


def is_routed_linear(layer: Any) -> bool:
    """Whether the layer is such a linear layer with a method of its own."""
    return type(layer) is _RoutedLinear


def is_expert(layer: nn.Module) -> bool:
    """Whether the layer has the weights of several experts."""
    return type(layer).__name__.removeprefix("_Routed") == "QuantizedSwitchLinear"


def list_products(model: nn.Module) -> list[nn.Module]:
    """The quantized layers whose products `hook_products` can compute in several ways."""
    return [module for module in list_modules(model) if type(module) in _ROUTED]


def list_modules(model: nn.Module) -> list[nn.Module]:
    """All modules, each once: a model may use one layer in several places."""
    return list({id(module): module for module in model.modules()}.values())


def hook_products(model: nn.Module, table: MethodTable) -> None:
    """Make quantized linear layers, and embeddings used as such, multiply by the table's methods."""
    for module in list_products(model):
        module.__class__ = _ROUTED[type(module)]
        module.table = table


def list_experts(model: nn.Module) -> list[nn.Module]:
    """The quantized layers with the weights of several experts, which `hook_experts` takes."""
    return [layer for layer in list_quantized(model) if is_expert(layer)]


def hook_experts(layers: Iterable[nn.Module], table: MethodTable) -> None:
    """Make these expert layers multiply by the table's methods. The mean number of tokens of an expert
    chooses."""
    for layer in layers:
        mix_in(layer, _RoutedExperts, "_Routed")
        layer.table = table


def list_routed(model: nn.Module) -> list[Any]:
    """The layers that multiply by the methods of their `table`."""
    kinds = _RoutedLinear | _RoutedEmbedding | _RoutedExperts
    return [module for module in list_modules(model) if isinstance(module, kinds)]


def multiply_routed(layer: Any, x: mx.array, experts: mx.array | None = None) -> mx.array:
    """The product of a layer of `list_routed` by its table's method, without bias. `experts`: sorted indices
    [n] of the expert of each token of x [n, 1, D]; None for linear layers."""
    if experts is None:
        return multiply(layer, x, layer.table.choose(x.size // x.shape[-1]))
    with bound_transients():
        y: mx.array = layer(x, experts, sorted_indices=True)
        mx.eval(y)
    return y - mx.expand_dims(layer["bias"][experts], -2) if "bias" in layer else y


def forget_methods(model: nn.Module) -> None:
    """Multiply as the library does from now on."""
    for module in list_routed(model):
        module.table = MethodTable()


@contextmanager
def use_row_products(model: nn.Module) -> Iterator[None]:
    """Within the block, no row of a decode step changes the rounding of another. Layers multiply by the
    kernel of skinny_gemm.py if it serves them, else as the library does."""
    with keep_methods(model):
        for module in list_routed(model):
            if not is_packed(module, 1, module["scales"].dtype):
                module.table = MethodTable()
        yield


@contextmanager
def keep_methods(model: nn.Module) -> Iterator[None]:
    """After the block, layers multiply as before it, those with plain weights too."""
    modules: list[Any] = [
        module for module in list_modules(model) if isinstance(getattr(module, "table", None), MethodTable)
    ]
    tables = [module.table for module in modules]
    try:
        yield
    finally:
        for module, table in zip(modules, tables, strict=True):
            module.table = table


def is_packed(layer: Any, rows: int, dtype: mx.Dtype) -> bool:
    """Whether a layer with a table multiplies so many rows of this type by the kernel of skinny_gemm.py."""
    return layer.table.choose(rows) == "packed" and _fits_kernel(layer, rows, dtype)


def _fits_kernel(layer: Any, rows: int, dtype: mx.Dtype) -> bool:
    return rows <= MOST_ROWS and can_multiply_packed(layer, dtype)


def multiply(layer: Any, x: mx.array, method: ProductMethod) -> mx.array:
    """x [..., D] times the layer's quantized weight [N, D], as [..., N], without bias."""
    rows = x.size // x.shape[-1]
    if method == "dequantized" and count_weights(layer) <= MAX_TRANSIENT:
        weight = dequantize_weight(layer, x.dtype)
        return record_product(x @ weight.T, count_weights(layer))
    if method == "packed":
        if _fits_kernel(layer, rows, x.dtype):
            return multiply_few_rows(layer, x)
        method = "library" if rows < FLAT_ROWS else "flat"
    if method == "library":
        return _multiply_quantized(layer, x)
    flat = x.reshape(rows, x.shape[-1])
    if 1 < rows < MIN_MATRIX_ROWS:
        flat = mx.pad(flat, [(0, MIN_MATRIX_ROWS - rows), (0, 0)])
    y = _multiply_quantized(layer, flat)
    return y[:rows].reshape(*x.shape[:-1], y.shape[-1])


def _multiply_quantized(layer: Any, x: mx.array) -> mx.array:
    options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **options)


def dequantize_weight(layer: Any, dtype: mx.Dtype) -> mx.array:
    """The layer's weight as plain numbers, lazy."""
    options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer["weight"], layer["scales"], layer.get("biases"), dtype=dtype, **options)


def count_weights(layer: Any) -> int:
    """How many numbers the layer's dequantized weight has."""
    return int(layer["weight"].size) * 32 // int(layer.bits)


def hold_dequantized(layers: Iterable[nn.Module], dtype: mx.Dtype, *, lazy: bool = False) -> None:
    """Replace quantized weights by plain ones of this type, few at a time, so that memory is bounded.
    `lazy`: compute none, so that only shapes are known."""
    layers = list(layers)
    spread = StreamSpread(0 if lazy else sum(map(count_weights, layers)) * dtype.size)
    for module in layers:
        plain = _find_plain_class(module)
        assert plain is not None
        stream = spread.choose(count_weights(module))
        with mx.stream(stream):
            weight = dequantize_weight(module, dtype)
        if not lazy:
            spread.launch(weight, stream)
        for name in ("scales", "biases"):
            module.pop(name, None)
        module.weight = weight
        module.__class__ = plain
    spread.wait()


def _find_plain_class(module: nn.Module) -> type | None:
    """The class of the layer with plain weights; None for layers that have none."""
    kind = type(module)
    if kind.__name__ not in _HELD or getattr(module, "global_scale", None) is not None:
        return None
    namespace = nn if kind.__module__.startswith("mlx.nn") else sys.modules[kind.__module__]
    return getattr(namespace, kind.__name__.removeprefix("Quantized"), None)


def describe_quantization(model: nn.Module) -> Iterator[str]:
    """The kinds of quantized weights, such as `affine 4 bit`, most numbers first."""
    totals: dict[str, int] = {}
    for module in list_quantized(model):
        layer: Any = module
        name = f"{layer.mode} {layer.bits} bit"
        totals[name] = totals.get(name, 0) + count_weights(layer)
    yield from sorted(totals, key=lambda name: -totals[name])


class _Transients(threading.local):
    """Those of this thread; each engine of a process has one. `numbers`: of weights whose products are not
    launched."""

    bounded = False
    numbers = 0

    def __init__(self) -> None:
        self.launched: deque[mx.array] = deque()


_TRANSIENTS = _Transients()


@contextmanager
def bound_transients() -> Iterator[None]:
    """Within the block, bound the memory of the weights of `record_product`. The block must not be
    compiled."""
    before = _TRANSIENTS.bounded
    _TRANSIENTS.bounded = True
    try:
        yield
    finally:
        _TRANSIENTS.bounded, _TRANSIENTS.numbers = before, 0
        _TRANSIENTS.launched.clear()


def are_bounded() -> bool:
    """Whether a block of `bound_transients` is active."""
    return _TRANSIENTS.bounded


def record_product(product: mx.array, numbers: int) -> mx.array:
    """Return a product whose weight, of `numbers` numbers, is dequantized for it alone. May launch it, and
    wait for earlier ones."""
    if _TRANSIENTS.bounded:
        _TRANSIENTS.numbers += numbers
        if _TRANSIENTS.numbers >= LAUNCHED:
            _TRANSIENTS.numbers = 0
            mx.async_eval(product)
            _TRANSIENTS.launched.append(product)
            if len(_TRANSIENTS.launched) > MOST_LAUNCHES:
                mx.eval(_TRANSIENTS.launched.popleft())
    return product
