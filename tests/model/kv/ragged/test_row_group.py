"""The masks of a row group, rows that leave it, and the sizes of buffers."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.kv.ragged.row_group import RowGroup, RowKeysValues, round_coarsely


@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 9, 50])
def test_a_groups_mask_is_each_rows_own(window: int | None) -> None:
    """True exactly where a row has tokens, and within the window of the layer."""
    lengths = [1, 2, 3, 5, 8]
    group = RowGroup(9, [None])
    group.ids, group.lengths = [str(n) for n in lengths], [n - 1 for n in lengths]
    group.advance()
    assert group.lengths == lengths
    mask = group.make_mask(8, window)
    assert mask is not None
    wanted = [[8 - place <= min(n, window or n) for place in range(8)] for n in lengths]
    assert mask.squeeze((1, 2)).tolist() == wanted
    assert group.make_mask(8, window) is mask  # made once a step, for all layers


def test_rows_of_one_length_need_no_mask() -> None:
    group = RowGroup(9, [None, 4])
    group.ids, group.lengths = ["a", "b"], [6, 6]
    group.advance()
    assert group.make_mask(7, None) is None
    assert group.make_mask(4, 4) is None
    assert group.make_mask(7, 4) is not None


def test_sizes_are_few_and_have_little_spare() -> None:
    sizes = {round_coarsely(n) for n in range(1, 4096)}
    assert len(sizes) < 50
    assert all(n <= round_coarsely(n) <= 1.25 * n for n in range(1, 4096))
    assert [round_coarsely(n, 8) for n in (1, 8, 9, 100, 1000, 1025)] == [8, 8, 16, 112, 1024, 1280]


ROWS, LENGTH, HEADS, SIZE = 16, 700, 2, 16
BUFFER = ROWS * HEADS * 1024 * SIZE * 4  # bytes of the keys, or of the values, of a layer in float32


def fill_group(layers: int = 2) -> RowGroup:
    """A group of rows whose keys are their numbers, and whose values are those and a half."""
    group = RowGroup(10, [None] * layers)
    for buffer in group.buffers:
        parts = [mx.zeros((1, HEADS, 704, SIZE)) + n for n in range(ROWS)]
        buffer.add_rows([RowKeysValues(part, part + 0.5, LENGTH) for part in parts], LENGTH)
    for n in range(ROWS):
        group.add_row(str(n), LENGTH)
    mx.eval([buffer.view(LENGTH) for buffer in group.buffers])
    return group


@pytest.mark.parametrize(
    "leaving", [[], [15], [0], [2, 5], [*range(8)], [*range(8, 16)], [1, 14], [*range(16)]]
)
def test_rows_that_stay_keep_what_they_have(leaving: list[int]) -> None:
    group = fill_group()
    group.remove_rows(leaving)
    assert sorted(group.ids, key=int) == [str(n) for n in range(ROWS) if n not in leaving]
    assert group.lengths == [LENGTH] * len(group.ids)
    for buffer in group.buffers if group.ids else ():
        keys, values = buffer.view(LENGTH)
        numbers = [float(rid) for rid in group.ids]
        for array, more in ((keys, 0), (values, 0.5)):
            assert array.min(axis=(1, 2, 3)).tolist() == array.max(axis=(1, 2, 3)).tolist()
            assert array.max(axis=(1, 2, 3)).tolist() == [n + more for n in numbers]


def measure_leaving(group: RowGroup, busy: bool = False) -> int:
    """Bytes that a step takes in which two rows leave, besides what is there. `busy`: the device still
    computes something else, so that nothing is read before all has been launched."""
    mx.synchronize()
    matrix = mx.array(np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    if busy:
        mx.async_eval(mx.linalg.svd(matrix, stream=mx.cpu))
    group.remove_rows([0, 2])
    token = mx.ones((ROWS - 2, HEADS, 1, SIZE))
    mx.eval([buffer.append(token, token, LENGTH + 1) for buffer in group.buffers])
    return mx.get_peak_memory() - before


def test_rows_leave_without_a_copy_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only copies of single rows are made. If they are not evaluated before, buffers are copied."""
    assert measure_leaving(fill_group()) < BUFFER
    group = fill_group()
    monkeypatch.setattr(mx, "eval", _skip_once(mx.eval, len(group.buffers)))
    assert measure_leaving(group, busy=True) > BUFFER


def _skip_once(evaluate: Callable[..., None], times: int) -> Callable[..., None]:
    left = [times]

    def skip(*arrays: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            evaluate(*arrays)

    return skip
