"""A skinny GEMM: few rows times a weight, quantized or plain, by the kernel `kernels/skinny_gemm.h`.

A row's result does not depend on the rows beside it, nor on their number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kernel_source import make_kernel
from mlxrun.model.machine.device import get_backend

# Rows that a kernel multiplies at most, and the tiles of 16 outputs that a block of it has: more tiles read
# the rows less often, and need more registers. Measured on an H200.
KERNELS = {8: 2, 16: 2, 32: 4, 64: 2}
MOST_ROWS = max(KERNELS)
BITS, GROUPS = (4, 8), (32, 64, 128)
WARPS = 8  # of a block; another number would sum in another order


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


def multiply_few_rows(layer: Any, x: mx.array) -> mx.array:
    """x [rows, D] times the quantized or plain weight [N, D], as [rows, N]. There are at most MOST_ROWS
    rows."""
    rows, outputs, quantized = x.shape[0], layer["weight"].shape[0], "scales" in layer
    most, tiles = next((most, tiles) for most, tiles in KERNELS.items() if rows <= most)
    bits = layer.bits if quantized else 16
    numbers = {"BITS": bits, "TAKEN": 128 // bits, "COLUMNS": most // 8, "TILES": tiles, "WARPS": WARPS}
    names = ["weight", "scales", "biases"] if quantized else ["weight"]
    y: mx.array = compile_kernel(get_backend(), tuple(names))(
        inputs=[x, *(layer[name] for name in names)],
        template=[("T", x.dtype), *numbers.items(), ("GROUP", layer.group_size if quantized else 0)],
        grid=(-(-outputs // (16 * tiles)) * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )[0]
    return y


def multiply_evenly(layer: Any, x: mx.array) -> mx.array:
    """x [..., D] of any number of rows times a plain weight [N, D], as [..., N]. A row has the same bits in
    any company."""
    flat = x.reshape(-1, x.shape[-1])
    parts = [multiply_few_rows(layer, flat[i : i + MOST_ROWS]) for i in range(0, flat.shape[0], MOST_ROWS)]
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).reshape(*x.shape[:-1], -1)


@lru_cache(maxsize=4)
def compile_kernel(backend: str, names: tuple[str, ...]) -> Any:
    """The kernel for a weight of these arrays. It is compiled for each form of weights."""
    quantized = len(names) > 1
    form = "quantized" if quantized else "plain"
    header = f"{kernel_source.GEMM_HEADERS[backend]}\n#define QUANTIZED {quantized:d}\n"
    return make_kernel(
        backend, f"skinny_gemm_{form}", ["x", *names], ["y"], kernel_source.SKINNY_GEMM, header
    )
