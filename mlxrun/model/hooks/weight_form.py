"""Chooses the form of quantized weights: held dequantized, or quantized with a method by number of rows.

`model.dequantize: auto` times three of the model's own products at load, on CUDA those of one row first. In
reproducible mode the backend alone decides, because times and memory differ between runs and machines.

On CUDA, products of plain weights are timed too, for the numbers of rows that decode steps may have. Each is
multiplied by the kernel of skinny_gemm.py where that is faster than the library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.model.hooks.even_products import is_plain_linear, list_even, use_table
from mlxrun.model.hooks.product_timing import (
    HELD,
    HOPELESS,
    PLAIN_METHODS,
    PLAIN_WIDTHS,
    WIDTHS,
    ProductTimes,
    StepProduct,
    is_one_row_faster,
    time_plain_products,
    time_products,
)
from mlxrun.model.hooks.quantized_layers import (
    FLAT_ROWS,
    MAX_TRANSIENT,
    MethodTable,
    ProductMethod,
    count_weights,
    describe_quantization,
    hold_dequantized,
    hook_experts,
    hook_products,
    is_expert,
    list_experts,
    list_products,
    list_quantized,
)
from mlxrun.model.hooks.skinny_gemm import MOST_ROWS, can_multiply_packed, count_inputs
from mlxrun.model.machine.decisions import Decision, WeightsInMemory, decide_weights
from mlxrun.model.machine.device import get_backend, get_memory_limit, get_total_memory

log = logging.getLogger(__name__)

PRODUCTS = 3  # whose shapes take most of the work, and which are timed
PLAIN_PRODUCTS = 4  # the same of plain weights, of each shape: more than a GPU's cache holds
WORTH = 0.85  # a method replaces the default one if it takes at most this share of its time
HELD_WORTH = 0.95  # the same for dequantized weights, on average
# The same for the library beside the kernel of plain weights. The kernel does besides what takes launches of
# others in a step, and is not timed with the products.
PLAIN_WORTH = 0.9
# Without timing: MLX's CUDA backend multiplies rows one by one unless they are one matrix, padded to 8 rows.
# 8B in 4 bit on an H200, ms a step: 10.3 with 2 rows one by one, 18.4 with 4, and 16.0 padded.
FIXED_TABLES: Mapping[str, MethodTable] = {
    "cuda": MethodTable(((FLAT_ROWS - 1, "library"), (128, "flat"), (256, "dequantized"))),
    "metal": MethodTable(),
    "cpu": MethodTable(((4, "library"), (8, "dequantized"))),
}
# On CUDA, where the kernel covers the products that take most of the work: it decodes as fast as dequantized
# weights or faster, in a quarter of the memory. 8B in 4 bit on an H200, tokens/s with 1, 8 and 32 rows: 197,
# 1,593 and 3,258, and 191, 874 and 2,792 with weights held dequantized.
PACKED_TABLE = MethodTable(((MOST_ROWS, "packed"), (256, "dequantized")))
# Of experts that stay quantized, by tokens an expert. 128 experts of three weights, 2048 x 768 in 4 bit, on
# an H200, 8 for each token: 64 tokens take 1.4 ms by the library, whose time grows with their number, and 1.9
# by sorted indices with plain weights, which take 0.4 to make; 512 tokens 8.2 and 2.7 + 0.4. Both take as
# long at 8 tokens an expert. A CPU gains little: its `gather_mm` multiplies one token at a time.
EXPERT_TABLES: Mapping[str, MethodTable] = {"cuda": MethodTable(((8, "library"), (9, "dequantized")))}


# Of plain weights, without timing. The kernel reads a weight again for more rows than it takes.
PLAIN_TABLE = MethodTable(((MOST_ROWS, "packed"), (MOST_ROWS + 1, "library")))
PLAIN = "plain "  # before the names of methods among the times of products


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The chosen form.

    `kinds`: of quantized weights, empty if there are none. `held`: they are held dequantized;
    `keeps_experts`: except for experts. `seconds`: time of the measured products together, by method and
    rows; empty if nothing was timed. `unused`: names of weights that the model does not use. `experts`:
    methods of expert layers by tokens an expert, None if they use the library's calls. `reason`: why weights
    have this form, or why they were timed. `plain`: methods of plain weights by rows of a decode step. It is
    None if they were not timed.
    """

    kinds: tuple[str, ...] = ()
    held: bool = False
    keeps_experts: bool = False
    table: MethodTable = field(default_factory=MethodTable)
    seconds: ProductTimes = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    experts: MethodTable | None = None
    reason: str = ""
    plain: MethodTable | None = None

    def describe(self) -> str:
        """One line for logs and `mlxrun doctor`."""
        kinds = ", ".join(self.kinds)
        text = f"{kinds}, multiplied by: {self.table.describe('rows')}"
        if self.held:
            text = f"{kinds}, held dequantized" + (" except for experts" if self.keeps_experts else "")
        if self.experts is not None:
            text += f"; experts by: {self.experts.describe('tokens each')}"
        return text

    def describe_plain(self) -> str:
        """One line about the rows of decode steps; empty if plain weights were not timed."""
        if self.plain is None:
            return ""
        names = {"library": "the library", "packed": "mlxrun's kernel"}
        return f"rows of decode steps are multiplied by: {self.plain.describe('rows', names)}"


PLAIN_WEIGHTS = WeightForm()


def settle_weights(
    model: nn.Module, config: Config, dtype: mx.Dtype, known: ProductTimes | None = None
) -> WeightForm:
    """Give the model's quantized weights their form. `dtype`: of activations, and of dequantized weights.
    `known`: what `time_products` has measured at an earlier start."""
    kinds = tuple(describe_quantization(model))
    if not kinds:
        return PLAIN_WEIGHTS
    backend = get_backend()
    layers, decided = plan_weights(model, config, dtype)
    seconds: ProductTimes = {}
    products = pick_products(model)
    table, held = get_default_table(products, dtype), decided.value == "held"
    if decided.value in ("timed", "timed_methods"):
        may_hold = decided.value == "timed"
        seconds = _select_times(known or {}, plain=False) or time_products(products, table, dtype, may_hold)
        table = choose_table(seconds, table)
        may_gain = backend != "cuda" or "packed" in seconds or is_one_row_faster(seconds)
        held = may_hold and (not may_gain or is_held_faster(seconds))
    if held:
        hold_dequantized(layers, dtype)
    else:
        hook_products(model, table)
    kept = list_experts(model)
    experts = EXPERT_TABLES.get(backend) if kept else None
    if experts is not None:
        hook_experts(kept, experts)
    form = WeightForm(
        kinds, held, held and bool(kept), table, seconds, experts=experts, reason=decided.reason
    )
    log.info("weights: %s", form.describe())
    return form


def settle_plain_products(
    model: nn.Module,
    form: WeightForm,
    products: Sequence[StepProduct],
    dtype: mx.Dtype,
    known: ProductTimes | None = None,
) -> WeightForm:
    """Choose for the layers of `list_even` by which method they multiply so many rows. Returns the form with
    the choice. `products`: of some fused layers, empty if there are none; `known`: as in `settle_weights`."""
    layers = list_even(model)
    if not layers:
        return form
    products = products or [
        StepProduct(layer, (1, count_inputs(layer)))
        for layer in _pick_layers([layer for layer in layers if is_plain_linear(layer)], PLAIN_PRODUCTS)
    ]
    seconds = _select_times(known or {}, plain=True)
    if not seconds:
        seconds = time_plain_products(
            products, lambda method: use_table(layers, MethodTable(((1, method),))), dtype
        )
    table = choose_table(seconds, PLAIN_TABLE, PLAIN_WIDTHS, PLAIN_WORTH)
    use_table(layers, table)
    named = {PLAIN + name: times for name, times in seconds.items()}
    form = replace(form, plain=table, seconds={**form.seconds, **named})
    log.info("plain weights: %s", form.describe_plain())
    return form


def _select_times(known: ProductTimes, *, plain: bool) -> ProductTimes:
    """Those of plain weights by method, or those of quantized ones."""
    if plain:
        return {name: known[PLAIN + name] for name in PLAIN_METHODS if PLAIN + name in known}
    return {name: times for name, times in known.items() if not name.startswith(PLAIN)}


def plan_weights(
    model: nn.Module, config: Config, dtype: mx.Dtype
) -> tuple[list[nn.Module], Decision[WeightsInMemory]]:
    """The layers that would be held dequantized, and whether they are, by sizes alone. ConfigError if the
    config refuses both forms."""
    choice, backend = config.model.dequantize, get_backend()
    # On a GPU, experts decode as fast quantized or faster (measured on CUDA), at a quarter of the memory.
    keeps_experts = choice == "auto" and backend != "cpu"
    layers = [layer for layer in list_quantized(model) if not (keeps_experts and is_expert(layer))]
    # In reproducible mode the choice must not depend on what other processes use just now.
    usual_limit = get_total_memory() if config.engine.reproducible else get_memory_limit()
    limit = config.scheduler.memory_limit or usual_limit
    needed = sum(count_weights(layer) for layer in layers) * dtype.size
    quantizes = next(describe_quantization(model), None) is not None
    decided = decide_weights(
        backend, needed if quantizes else None, limit, choice, config.engine.reproducible
    )
    if decided.value == "refused":
        raise _make_refusal(needed, limit)
    return layers, decided


def _make_refusal(needed: int, limit: int) -> ConfigError:
    """That dequantized weights take more than their share of the memory limit. Reproducible mode chooses no
    other form for that, whose products round otherwise."""
    sizes = f"{format_rounded(needed)}, more than half of the limit of {format_rounded(limit)}"
    return ConfigError(
        f"model.dequantize: with engine.reproducible, auto holds weights dequantized, whatever memory a "
        f"machine has; they take {sizes}: set `never` to keep them quantized, or `always`"
    )


def pick_products(model: nn.Module) -> list[Any]:
    """One layer of each of the shapes that take most of the work."""
    return _pick_layers([layer for layer in list_products(model) if count_weights(layer) <= MAX_TRANSIENT])


def _pick_layers(layers: Iterable[Any], each: int = 1) -> list[Any]:
    """`each` layers of each of the shapes that take most of the work."""
    by_shape: dict[tuple[Any, ...], list[Any]] = {}
    for layer in layers:
        by_shape.setdefault(_get_shape(layer), []).append(layer)
    most = sorted(by_shape.values(), key=lambda alike: -len(alike) * _count_numbers(alike[0]))
    return [layer for alike in most[:PRODUCTS] for layer in alike[-each:]]


def _count_numbers(layer: Any) -> int:
    return int(layer["weight"].shape[0]) * count_inputs(layer)


def _get_shape(layer: Any) -> tuple[Any, ...]:
    form = (getattr(layer, name, None) for name in ("bits", "mode", "group_size"))
    return (*layer["weight"].shape, *form)


def get_default_table(products: Sequence[Any], dtype: mx.Dtype) -> MethodTable:
    """The methods of this backend where nothing is timed. `products`: what `pick_products` has picked."""
    if products and all(can_multiply_packed(layer, dtype) for layer in products):
        return PACKED_TABLE
    return FIXED_TABLES[get_backend()]


def choose_table(
    seconds: Mapping[str, Mapping[int, float]],
    default: MethodTable,
    widths: Iterable[int] = WIDTHS,
    worth: float = WORTH,
) -> MethodTable:
    """The best method without held weights for each number of rows. `default`: the methods where nothing was
    timed. A method replaces its one if it takes at most `worth` of its time."""
    entries: list[tuple[int, ProductMethod]] = []
    for rows in sorted({*widths, *(most for most, _ in default.entries)}):
        times = {m: seconds[m][rows] for m in get_args(ProductMethod) if rows in seconds.get(m, {})}
        usual = best = default.choose(rows)
        if times:
            best = min(times, key=times.__getitem__)
            best = usual if times[best] > worth * times.get(usual, math.inf) else best
        if entries and entries[-1][1] == best:
            entries.pop()
        entries.append((rows, best))
    return MethodTable(tuple(entries))


def is_held_faster(seconds: Mapping[str, Mapping[int, float]]) -> bool:
    """Whether dequantized weights are faster in all, by the geometric mean over the numbers of rows."""
    ratios = []
    for rows in {rows for times in seconds.values() for rows in times}:
        others = [times[rows] for name, times in seconds.items() if name != HELD and rows in times]
        held = seconds.get(HELD, {}).get(rows, math.inf)
        ratios.append(held / min(others) if others else 1 / HOPELESS)
    return bool(ratios) and math.prod(ratios) < HELD_WORTH ** len(ratios)
