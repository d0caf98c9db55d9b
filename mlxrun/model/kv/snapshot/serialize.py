"""Arrays as bytes and back: what leaves the engine thread, and what a file brings in.

`serialize_array` waits for the array. `deserialize_array` raises ValueError unless there are exactly the
bytes that the dtype and the shape need.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlxrun.core.step_plan import SerializedTensor

# name in safetensors: dtype here, and the numpy dtype that has as many bytes (numpy has no bfloat16)
_DTYPES: dict[str, tuple[mx.Dtype, str]] = {
    "BOOL": (mx.bool_, "|b1"),
    "U8": (mx.uint8, "|u1"),
    "I8": (mx.int8, "|i1"),
    "U16": (mx.uint16, "<u2"),
    "I16": (mx.int16, "<i2"),
    "U32": (mx.uint32, "<u4"),
    "I32": (mx.int32, "<i4"),
    "U64": (mx.uint64, "<u8"),
    "I64": (mx.int64, "<i8"),
    "F16": (mx.float16, "<f2"),
    "BF16": (mx.bfloat16, "<u2"),
    "F32": (mx.float32, "<f4"),
}
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


def serialize_array(array: mx.array) -> SerializedTensor:
    """The array's bytes. ValueError if safetensors has no name for its dtype."""
    if array.dtype not in _NAMES:
        raise ValueError(f"arrays of {array.dtype} cannot be stored")
    raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return SerializedTensor(_NAMES[array.dtype], tuple(array.shape), np.asarray(raw).tobytes())


def deserialize_array(tensor: SerializedTensor) -> mx.array:
    """The array, in memory of its own."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {tensor.dtype!r}")
    dtype, raw = _DTYPES[tensor.dtype]
    if any(n < 0 for n in tensor.shape):
        raise ValueError(f"impossible shape {tensor.shape}")
    size = math.prod(tensor.shape) * np.dtype(raw).itemsize
    if len(tensor.data) != size:
        raise ValueError(f"{len(tensor.data)} bytes where {tensor.shape} of {tensor.dtype} has {size}")
    array = mx.array(np.frombuffer(tensor.data, raw).reshape(tensor.shape))
    return array.view(dtype) if array.dtype != dtype else array
