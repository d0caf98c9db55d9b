"""Arrays of a row in stacks: exact or in few bits, with the shapes and bytes that were announced; and as
bytes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.core.step_plan import SerializedTensor
from mlxrun.model.kv.snapshot.packing import (
    ArrayLayout,
    StackPacker,
    copy_stacked,
    deserialize_array,
    serialize_array,
)

KEYS = ArrayLayout((1, 2, 5, 32), mx.float32, 0)
WINDOW = ArrayLayout((1, 2, 5, 32), mx.float32, 4)
STATE = ArrayLayout((1, 3, 7), mx.float32, None)


def make_arrays(*layouts: ArrayLayout, tokens: int) -> list[mx.array]:
    return [mx.random.normal(layout.get_shape(tokens)).astype(layout.dtype) for layout in layouts]


def test_layouts_say_the_shape_for_any_number_of_tokens() -> None:
    assert KEYS.get_shape(9) == (1, 2, 9, 32)
    assert WINDOW.get_shape(9) == (1, 2, 4, 32) and WINDOW.get_shape(3) == (1, 2, 3, 32)
    assert STATE.get_shape(9) == (1, 3, 7)


def test_equal_layouts_share_a_stack_and_come_back_in_order() -> None:
    packer = StackPacker([KEYS, STATE, KEYS, WINDOW])
    arrays = make_arrays(KEYS, STATE, KEYS, WINDOW, tokens=9)
    stacks = packer.pack(arrays, 9)
    assert [stack[0].shape[0] for stack in stacks] == [2, 1, 1]
    assert packer.fits(stacks, 9) and not packer.fits(stacks, 8)
    assert packer.count_bytes(9) == sum(a.nbytes for stack in stacks for a in stack)
    back = packer.unstack(packer.dequantize(stacks))
    assert all(mx.array_equal(a, b).item() for a, b in zip(arrays, back, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", [KEYS, KEYS._replace(shape=(1, 4, 5, 8))], ids=["by head", "joined heads"])
def test_few_bits_are_close_and_small(layout: ArrayLayout, bits: int) -> None:
    packer = StackPacker([layout, layout], bits)
    arrays = make_arrays(layout, layout, tokens=9)
    stacks = packer.pack(arrays, 9)
    assert packer.fits(stacks, 9)
    assert packer.count_bytes(9) == sum(a.nbytes for stack in stacks for a in stack)
    assert packer.count_bytes(9) < sum(a.nbytes for a in arrays) * (bits + 2.5) / 32
    for array, back in zip(arrays, packer.unstack(packer.dequantize(stacks)), strict=True):
        assert back.shape == array.shape and back.dtype == array.dtype
        assert mx.abs(array - back).max().item() < (0.05 if bits == 8 else 0.5)


def test_arrays_of_another_shape_or_type_are_refused() -> None:
    packer = StackPacker([KEYS])
    (array,) = make_arrays(KEYS, tokens=9)
    for wrong in (array[:, :, :8], array.astype(mx.float16), mx.concatenate([array, array])):
        with pytest.raises(ValueError, match="should be"):
            packer.pack([wrong], 9)
    with pytest.raises(ValueError, match="not of one row"):
        StackPacker([ArrayLayout((2, 3), mx.float32, None)])


def test_dimensions_that_do_not_divide_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cache.stored_bits: 8 is not possible"):
        StackPacker([ArrayLayout((1, 1, 5, 24), mx.float32, 0)], 8)


@pytest.mark.parametrize("count", [1, 2])
def test_a_copy_shares_no_memory(count: int) -> None:
    """A view would change with the row's buffer, and keep all of it in memory."""
    source = mx.zeros((1, 4))
    copied = copy_stacked([source] * count)
    mx.eval(copied)
    source[:, 1] = 5
    mx.eval(source)
    assert mx.all(copied == 0).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.bool_, mx.int8])
def test_every_dtype_survives_as_bytes(dtype: mx.Dtype) -> None:
    array = mx.array([[0, 1, 3], [250, 7, 1]]).astype(dtype)
    again = deserialize_array(serialize_array(array))
    assert again.dtype == array.dtype and mx.array_equal(again, array).item()
    empty = deserialize_array(SerializedTensor("F32", (0, 3), b""))
    assert empty.shape == (0, 3)
