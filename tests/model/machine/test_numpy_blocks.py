"""NumPy computes on the memory of MLX's arrays, block by block."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.machine.numpy_blocks import iterate_blocks, open_rows


@pytest.mark.parametrize("numbers", [1, 4, 8, 9, 100])
def test_what_is_written_into_blocks_is_in_the_array(numbers: int) -> None:
    array = mx.arange(30, dtype=mx.float32).reshape(3, 5, 2) + 0
    rows = open_rows(array)
    assert rows is not None and rows.shape == (15, 2)
    sizes = []
    for block, first, second in iterate_blocks(rows, numbers, scratch=2):
        assert block.shape == first.shape == second.shape and not np.may_share_memory(first, second)
        sizes.append(len(block))
        block += 1
    assert array.reshape(-1).tolist() == [n + 1 for n in range(30)]
    assert sum(sizes) == 15 and set(sizes[:-1]) <= {max(1, numbers // 2)} and 0 < sizes[-1] <= max(sizes)


def test_numbers_that_lie_apart_are_not_opened() -> None:
    array = mx.arange(6, dtype=mx.float32).reshape(2, 3) + 0
    assert open_rows(array.T) is None and open_rows(array[:, :2]) is None
    assert open_rows(mx.contiguous(array.T)) is not None
