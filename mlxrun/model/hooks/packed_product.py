"""The product of few rows and a quantized weight by the kernel of packed_source.py.

A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlxrun.model.hooks import packed_source
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


def multiply_packed(layer: Any, x: mx.array) -> mx.array:
    """x [rows, D] times the quantized weight [N, D], as [rows, N]. There are at most MOST_ROWS rows."""
    rows, outputs = x.shape[0], layer["weight"].shape[0]
    most, tiles = next((most, tiles) for most, tiles in KERNELS.items() if rows <= most)
    numbers = {
        "BITS": layer.bits,
        "GROUP": layer.group_size,
        "TAKEN": 128 // layer.bits,
        "COLUMNS": most // 8,
        "TILES": tiles,
        "WARPS": WARPS,
    }
    y: mx.array = compile_packed(get_backend())(
        inputs=[x, layer["weight"], layer["scales"], layer["biases"]],
        template=[("T", x.dtype), *numbers.items()],
        grid=(-(-outputs // (16 * tiles)) * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )[0]
    return y


@lru_cache(maxsize=2)
def compile_packed(backend: str) -> Any:
    """The kernel. It is compiled for each form of weights when it first runs."""
    make = mx.fast.cuda_kernel if backend == "cuda" else mx.fast.metal_kernel
    return make(
        name="packed_product",
        input_names=["x", "weight", "scales", "biases"],
        output_names=["y"],
        source=packed_source.PACKED,
        header=packed_source.HEADERS[backend],
    )
