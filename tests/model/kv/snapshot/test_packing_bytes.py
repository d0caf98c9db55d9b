"""Arrays survive as bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxrun.core.step_plan import SerializedTensor
from mlxrun.model.kv.snapshot.packing import deserialize_array, serialize_array


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.bool_, mx.int8])
def test_every_dtype_survives_as_bytes(dtype: mx.Dtype) -> None:
    array = mx.array([[0, 1, 3], [250, 7, 1]]).astype(dtype)
    again = deserialize_array(serialize_array(array))
    assert again.dtype == array.dtype and mx.array_equal(again, array).item()
    empty = deserialize_array(SerializedTensor("F32", (0, 3), b""))
    assert empty.shape == (0, 3)
