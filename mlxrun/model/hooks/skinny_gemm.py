"""A skinny GEMM: few rows times a weight, quantized or plain, by the kernel `kernels/skinny_gemm.h`.

A row's result does not depend on the rows beside it, nor on their number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kept_kernels import RESIDENT_BLOCKS
from mlxrun.model.kernels.kernel_source import make_kernel
from mlxrun.model.machine.device import get_backend

# Rows that a kernel multiplies at most, and the most tiles of 16 outputs that a block of it has: more tiles
# read the rows less often, and need more registers. Measured on an H200, as what follows.
KERNELS = {8: 2, 16: 2, 32: 4, 64: 2}
BLOCKS = 128  # of a product at least, or else they have fewer tiles: a GPU has some 130 processors
LIGHT_ROWS, LIGHT_BLOCKS = 8, 512  # the same where a processor has several: of plain weights with few rows
# Tiles whose plain weights a thread reads before it multiplies: with fewer tiles, those of several steps. Of
# quantized weights it reads more numbers at once, and several steps gained nothing.
READ_TILES = 4
MOST_ROWS = max(KERNELS)
BITS, GROUPS = (4, 8), (32, 64, 128)
# Of a block; another number would sum in another order, so only the weight may choose. With few outputs there
# is one block for a processor, which waits less for memory with many warps. A quantized weight with many
# outputs has so many blocks that three of few warps share a processor.
WARPS, MANY_WARPS, FEW_WARPS = 8, 16, 4
FEW_OUTPUTS, MANY_OUTPUTS = 4224, 24576
RESIDENT = {MANY_WARPS: 1, FEW_WARPS: 3}  # blocks that a processor has registers for
WIDE_ROWS = 32  # more than these, and a block has half of many warps, each with the sums of two


def can_multiply_packed(layer: Any, dtype: mx.Dtype) -> bool:
    """Whether the kernel covers a quantized layer and activations of this type."""
    step = 512 // layer.bits  # inputs that four threads read at once
    whole = layer["weight"].shape[-1] * 32 // layer.bits % step == 0
    known = layer.mode == "affine" and layer.bits in BITS and layer.group_size in GROUPS and whole
    return known and get_backend() == "cuda" and layer["scales"].dtype == dtype in (mx.float16, mx.bfloat16)


def can_multiply_plain(layer: Any, dtype: mx.Dtype) -> bool:
    """Whether the kernel covers a layer with a plain weight and activations of this type."""
    weight = layer["weight"]
    whole = weight.ndim == 2 and weight.shape[-1] % 32 == 0
    return whole and get_backend() == "cuda" and weight.dtype == dtype in (mx.float16, mx.bfloat16)


def count_inputs(layer: Any) -> int:
    """Numbers of a row that the layer's weight, quantized or plain, is multiplied by."""
    size: int = layer["weight"].shape[-1]
    return size * 32 // int(layer.bits) if "scales" in layer else size


def multiply_few_rows(
    layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None
) -> mx.array:
    """x [..., D] of at most MOST_ROWS rows times the quantized or plain weight [N, D], as [..., N]. A row may
    also be heads that have D numbers together, [rows, heads, 1, size], whose result is [rows, 1, N]. `gated`:
    the outputs are those of a gate and then those of `up`. The result is silu(gate) * up [..., N / 2], with
    the bits that the kernel `gate.h` makes of the product. `added`, N numbers a row: the result is its sum
    with the product."""
    inputs, quantized = count_inputs(layer), "scales" in layer
    rows, outputs = x.size // inputs, layer["weight"].shape[0] // (1 + gated)
    shape = (*x.shape[:-1], outputs) if x.shape[-1] == inputs else (rows, 1, outputs)
    if x.shape[0] != rows or x.ndim < 3:
        x = x.reshape(rows, 1, inputs)
    most, tiles = next((most, tiles) for most, tiles in KERNELS.items() if rows <= most)
    warps = _choose_warps(layer)
    sets = 2 if warps == MANY_WARPS and most > WIDE_ROWS else 1
    warps //= sets
    least = BLOCKS if quantized or most > LIGHT_ROWS else LIGHT_BLOCKS
    while tiles > 1 + gated and outputs < least * 16 * tiles // (1 + gated):
        tiles //= 2
    own = tiles // (1 + gated) * 16  # outputs of a block
    blocks = -(-outputs // own)
    bits = layer.bits if quantized else 16
    numbers = {"BITS": bits, "TAKEN": 128 // bits, "COLUMNS": most // 8, "TILES": tiles, "WARPS": warps}
    numbers |= {"SETS": sets, "GROUP": layer.group_size if quantized else 0, "SPARE": blocks * own - outputs}
    numbers |= {"AHEAD": 1 if quantized else READ_TILES // tiles}
    names = ("weight", "scales", "biases") if quantized else ("weight",)
    y: mx.array = compile_kernel(get_backend(), names, gated, added is not None, warps)(
        inputs=[x, *(layer[name] for name in names), *([] if added is None else [added])],
        template=[("T", x.dtype), *numbers.items()],
        grid=(blocks * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[x.dtype],
    )[0]
    return y


def _choose_warps(layer: Any) -> int:
    """The warps of a block. None is without a step where there are many."""
    weight = layer["weight"]
    outputs, steps = weight.shape[0], weight.nbytes // weight.shape[0] // 64
    if outputs <= FEW_OUTPUTS and steps >= MANY_WARPS:
        return MANY_WARPS
    return FEW_WARPS if "scales" in layer and outputs >= MANY_OUTPUTS else WARPS


def multiply_evenly(layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None) -> mx.array:
    """`multiply_few_rows` of any number of rows, each of which has the same bits in any company. `added`
    [rows, 1, N]."""
    rows = x.size // count_inputs(layer)
    if rows <= MOST_ROWS:
        return multiply_few_rows(layer, x, gated, added)
    if x.shape[0] != rows:
        return multiply_evenly(layer, x.reshape(rows, -1), gated, added).reshape(*x.shape[:-1], -1)
    parts = []
    for i in range(0, rows, MOST_ROWS):
        own = slice(i, i + MOST_ROWS)
        parts.append(multiply_few_rows(layer, x[own], gated, None if added is None else added[own]))
    return mx.concatenate(parts)


@lru_cache(maxsize=16)
def compile_kernel(
    backend: str, names: tuple[str, ...], gated: bool, adds: bool = False, warps: int = WARPS
) -> Any:
    """The kernel for a weight of these arrays. It is compiled for each form of weights."""
    quantized = len(names) > 1
    form = ("quantized" if quantized else "plain") + "_gated" * gated + "_added" * adds
    header = f"{kernel_source.GEMM_HEADERS[backend]}\n#define QUANTIZED {quantized:d}\n"
    header += f"#define GATED {gated:d}\n#define ADDED {adds:d}\n"
    if warps in RESIDENT:
        header += f"#define {RESIDENT_BLOCKS} {RESIDENT[warps]}\n"
    inputs = ["x", *names, *["added"] * adds]
    return make_kernel(backend, f"skinny_gemm_{form}", inputs, ["y"], kernel_source.SKINNY_GEMM, header)
