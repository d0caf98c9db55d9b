"""The masks of a row group."""

from __future__ import annotations

import pytest

from mlxrun.model.kv.ragged.row_group import RowGroup


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
