"""Times the products of quantized layers by each method, and with dequantized weights.

Those of layers with plain weights are timed by the library and by the kernel of skinny_gemm.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.hooks.quantized_layers import MethodTable, ProductMethod, dequantize_weight, multiply
from mlxrun.model.machine.device import get_backend, warm_device

log = logging.getLogger(__name__)

WIDTHS = (1, 32, 256, 8, 4, 2, 64)  # rows of the timed products, the most telling first
PACKED_WIDTHS = (1, 8, 32)  # rows of decode steps, for which the kernel and dequantized weights are timed
PLAIN_WIDTHS = (1, 8, 32, 64)  # the same for plain weights: the most rows of each kernel, or so
PLAIN_METHODS: tuple[ProductMethod, ...] = ("library", "packed")
ProductTimes = Mapping[str, Mapping[int, float]]  # seconds by method, and by rows
HELD = "held"  # the name of dequantized weights among the timed methods
# On CUDA, quantized products of one row take at most this share of the time of dequantized ones, or weights
# are held: more rows gain less, since one row waits for nothing but weights. Small products take the time of
# their launch in either form; at full speed, weights of 4 and 8 bit take 0.28 and 0.53 of it.
CLEARLY_FASTER = 0.75
HOPELESS = 4.0  # a method that takes so many times the best one's time is not timed
SECONDS = 0.6  # after which nothing is timed with more rows
PLAIN_TURNS = 3  # of the methods for plain weights: the host of a GPU is fast at times and slow at others
GRAPHS, GRAPH_SECONDS, MAX_REPEATS = 3, 0.004, 16  # timed graphs, their length, and products in each
SLOW_SECONDS = 0.3  # after which no graph is timed again
CPU_OUTPUTS = 512  # columns of a product that is timed on a CPU


def time_products(
    layers: Sequence[Any], default: MethodTable, dtype: mx.Dtype, may_hold: bool = True
) -> dict[str, dict[int, float]]:
    """Seconds of the products of these layers together, by method and number of rows. `default`: the methods
    where nothing is timed. `may_hold`: also time dequantized weights, which take their memory meanwhile.

    They are computed one after the other, as in a step, on CUDA by a compiled function as there. A method is
    not timed with many rows if it was far slower with fewer rows than the best one is with many.
    On CUDA, more rows have kernels to compile. So they are timed only if quantized weights are faster with
    one row.
    """
    backend = get_backend()
    is_cpu, is_packed = backend == "cpu", default.choose(1) == "packed"
    layers = [_cut(layer) if is_cpu else layer for layer in layers]
    held = [dequantize_weight(layer, dtype) for layer in layers] if may_hold else []
    # A compiled function would read lazy weights again in each call.
    mx.eval(held, [layer.parameters() for layer in layers])
    warm_device()
    found: dict[str, dict[int, float]] = {name: {} for name in _list_methods(may_hold)}
    spent = 0.0
    for rows in (PACKED_WIDTHS if is_packed else WIDTHS) if layers else ():
        inputs = [_make_rows(layer, rows, dtype) for layer in layers]
        best = math.inf
        # A device that slept is slow for what comes first.
        turns = 2 if rows == 1 and backend == "cuda" else 1
        for name, times in [*found.items()] * turns:
            least = max((value for r, value in times.items() if r < rows), default=0.0)
            if least > HOPELESS * best or not _is_candidate(name, rows, default):
                continue
            compute: Any = partial(_multiply_all, layers, held, name=name)
            lasted, elapsed = time_graph(
                partial(mx.compile(compute) if backend == "cuda" else compute, inputs)
            )
            times[rows] = min(lasted, times.get(rows, math.inf))
            best, spent = min(best, lasted), spent + elapsed
        if spent > SECONDS:
            break
        if rows == 1 and backend == "cuda" and not is_packed:
            if not is_one_row_faster(found):
                break
            log.info("weights: timing more rows; MLX compiles for a minute what it has not kept of kernels")
    timed = {name: dict(sorted(times.items())) for name, times in found.items() if times}
    return {name: bound_by_more_rows(times) for name, times in timed.items()} if is_cpu else timed


@dataclass(frozen=True, slots=True)
class StepProduct:
    """A product of a decode step. `shape`: of the input that `compute` takes, without the rows."""

    compute: Callable[[mx.array], mx.array]
    shape: tuple[int, ...]


def time_plain_products(
    products: Sequence[StepProduct], use_method: Callable[[ProductMethod], None], dtype: mx.Dtype
) -> dict[str, dict[int, float]]:
    """Seconds of these products together, by method and number of rows. `use_method`: makes their layers
    multiply by a method.

    They are launched one after the other by a compiled function, as those of a step. Small ones wait for the
    host, whose time is most of what is measured then.
    """
    warm_device()
    found: dict[str, dict[int, float]] = {name: {} for name in PLAIN_METHODS}
    computes = [product.compute for product in products]
    # Weights are read here, as in `time_products`.
    mx.eval(_compute_in_turn(computes, _make_inputs(products, 1, dtype)))
    for rows in PLAIN_WIDTHS:
        inputs = _make_inputs(products, rows, dtype)
        mx.eval(inputs)
        compiled = {name: mx.compile(partial(_compute_in_turn, computes)) for name in PLAIN_METHODS}
        for name in PLAIN_METHODS * PLAIN_TURNS:
            use_method(name)  # by which the first call is traced
            lasted, _ = time_graph(partial(compiled[name], inputs))
            found[name][rows] = min(lasted, found[name].get(rows, math.inf))
    return found


def _make_inputs(products: Sequence[StepProduct], rows: int, dtype: mx.Dtype) -> list[mx.array]:
    return [mx.ones((rows, *product.shape), dtype) for product in products]


def _compute_in_turn(
    computes: Sequence[Callable[[mx.array], mx.array]], inputs: Sequence[mx.array]
) -> list[mx.array]:
    """Each of these products waits for the one before."""
    found: list[mx.array] = []
    for compute, x in zip(computes, inputs, strict=True):
        found.append(compute(x + found[-1][0, 0, :1] if found else x))
    return found


def bound_by_more_rows(times: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows, none of them more than with more rows. On a CPU, such a difference comes from other
    processes."""
    rows = sorted(times, reverse=True)
    least = itertools.accumulate((times[n] for n in rows), min)
    return dict(reversed(list(zip(rows, least, strict=True))))


def _multiply_all(
    layers: Sequence[Any], held: Sequence[mx.array], inputs: Sequence[mx.array], name: Any
) -> list[mx.array]:
    computes: Sequence[Callable[[mx.array], mx.array]]
    if name == HELD:
        computes = [partial(_multiply_held, weight) for weight in held]
    else:
        computes = [partial(multiply, layer, method=name) for layer in layers]
    return _compute_in_turn(computes, inputs)


def _multiply_held(weight: mx.array, x: mx.array) -> mx.array:
    return x @ weight.T


def _is_candidate(name: str, rows: int, default: MethodTable) -> bool:
    """Whether to time a method with so many rows. On CUDA each one has kernels to compile, some for a minute;
    the default table holds for that backend, and only dequantized weights are compared with it."""
    return name == HELD or get_backend() != "cuda" or name == default.choose(rows)


def _list_methods(may_hold: bool) -> list[str]:
    """What may be of use on this device: on a CPU, rows gain nothing by being one matrix."""
    useless = {"cpu": ("flat", "packed"), "metal": ("packed",)}.get(get_backend(), ())
    methods = [method for method in get_args(ProductMethod) if method not in useless]
    return [HELD, *methods] if may_hold else methods


def _cut(layer: Any) -> Any:
    """The layer with its first outputs only. On a CPU, whole products of large layers take long."""
    cut: Any = nn.Module()
    cut.bits, cut.mode, cut.group_size = layer.bits, layer.mode, layer.group_size
    for name in ("weight", "scales", "biases"):
        if layer.get(name) is not None:
            cut[name] = layer[name][:CPU_OUTPUTS]
    mx.eval(cut.parameters())
    return cut


def _make_rows(layer: Any, rows: int, dtype: mx.Dtype) -> mx.array:
    """Activations in the shape of a decode step."""
    size = layer["weight"].shape[1] * 32 // layer.bits
    made = mx.ones((rows, 1, size), dtype)
    mx.eval(made)
    return made


def time_graph(compute: Callable[[], list[mx.array]]) -> tuple[float, float]:
    """Seconds of one graph, the best of several, and the seconds that timing it took without compiling."""
    mx.eval(compute())  # compiles, and allocates
    start = time.perf_counter()
    mx.eval(compute())
    best = time.perf_counter() - start
    repeats = max(min(MAX_REPEATS, int(GRAPH_SECONDS / best)), 1)
    for _ in range(GRAPHS):  # other processes may have had the processor meanwhile
        begin = time.perf_counter()
        if begin - start > SLOW_SECONDS:
            break
        mx.eval([compute() for _ in range(repeats)])
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best, time.perf_counter() - start


def is_one_row_faster(seconds: Mapping[str, Mapping[int, float]]) -> bool:
    """Whether the library's call of one row is clearly faster than with dequantized weights, or was not
    timed."""
    library, held = (seconds.get(name, {}).get(1, math.inf) for name in ("library", HELD))
    return library <= CLEARLY_FASTER * held
