"""Pages are given to one row at a time, and a row's places in the tables are those of its tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged.page_table import SLACK, PageTable
from mlxrun.model.kv.paged.paged_cache import find_slots, make_sizes


def make_table(window: int | None = None, pages: int = 12) -> PageTable:
    table = PageTable(window)
    table.add_capacity(pages)
    return table


def test_rows_have_pages_of_their_own_and_page_0_is_nobodys() -> None:
    table = make_table()
    table.add_row("a", 2 * PAGE + 1)
    table.add_row("b", PAGE)
    slots = [set(table.list_slots(rid, 0, n).tolist()) for rid, n in (("a", 2 * PAGE + 1), ("b", PAGE))]
    assert len(slots[0]) == 2 * PAGE + 1 and len(slots[1]) == PAGE
    assert not slots[0] & slots[1] and min(slots[0] | slots[1]) >= PAGE
    table.remove_row("a")
    assert table.used == 2  # page 0, and that of b


def test_a_slot_is_found_again_in_the_table_that_the_kernel_reads() -> None:
    table = make_table()
    for rid, length in (("a", 3), ("b", 5 * PAGE - 2)):
        table.add_row(rid, length)
    tables = mx.array(table.list_columns(["b", "a"]), dtype=mx.int32)
    for position in range(0, 5 * PAGE - 2, 97):
        positions = mx.array([position, min(position, 2)], dtype=mx.int32)
        slots, of_values = mx.split(
            find_slots(tables, positions, make_sizes(tables.shape[1], table.capacity)), 2
        )
        assert (of_values - slots).tolist() == [table.capacity * PAGE] * 2
        places = ("b", position), ("a", min(position, 2))
        assert slots.tolist() == [table.list_slots(rid, at, at + 1)[0] for rid, at in places]


def test_the_columns_of_a_row_with_a_window_are_used_again() -> None:
    table = make_table(window=PAGE)
    for length in (9 * PAGE, 10 * PAGE):
        table.add_row(str(length), length)
        tables = mx.array(table.list_columns([str(length)]), dtype=mx.int32)
        at = length - 2
        assert at // PAGE >= tables.shape[1]
        slots, _ = mx.split(
            find_slots(tables, mx.array([at]), make_sizes(tables.shape[1], table.capacity)), 2
        )
        assert slots.tolist() == table.list_slots(str(length), at, at + 1).tolist()


def test_a_row_takes_a_page_when_it_needs_one_and_frees_those_before_its_window() -> None:
    table = make_table(window=PAGE)
    table.add_row("a", PAGE)
    assert table.find_outgrown({"a": PAGE}) == {} and table.find_outgrown({"a": PAGE + 1}) == {"a": PAGE + 1}
    changes = 0
    for length in range(PAGE + 1, 6 * PAGE):
        before = table.list_columns("a"), table.used
        outgrown = table.find_outgrown({"a": length})
        table.extend_row("a", length)
        assert bool(outgrown) == ((table.list_columns("a"), table.used) != before)
        changes += len(outgrown)
        first = length - PAGE
        assert len(table.list_slots("a", first, length)) == PAGE
    assert changes == 5 + 4  # pages that it took, and gave back
    assert table.used <= 1 + 3  # the window's tokens lie in two pages, or three with the slack


def test_a_row_with_a_window_may_give_back_its_newest_tokens() -> None:
    table = make_table(window=PAGE)
    table.add_row("a", 3 * PAGE)
    table.extend_row("a", 4 * PAGE + SLACK - 1)
    kept = 4 * PAGE
    assert len(table.list_slots("a", kept - PAGE, kept)) == PAGE


def test_missing_pages_are_counted_before_rows_come_and_grow() -> None:
    table = make_table(pages=3)
    assert table.count_missing([(PAGE, ()), (2 * PAGE, ())]) == 0
    assert table.count_missing([(PAGE, ()), (2 * PAGE + 1, ())]) == 1
    table.add_row("a", PAGE)
    table.add_row("b", 2 * PAGE)
    assert table.count_missing_for_step({"a": PAGE + 1, "b": 2 * PAGE + 1}) == 2


def test_compacted_pages_keep_their_tokens() -> None:
    table = make_table()
    for rid in "abc":
        table.add_row(rid, 2 * PAGE)
    before = {rid: table.list_slots(rid, 0, 2 * PAGE) for rid in "ac"}
    table.remove_row("b")
    old = np.array(table.compact())
    assert old[0] == 0 and table.capacity == table.used == 5
    for rid in "ac":
        after = table.list_slots(rid, 0, 2 * PAGE)
        np.testing.assert_array_equal(old[after // PAGE] * PAGE + after % PAGE, before[rid])
    with pytest.raises(IndexError):
        table.add_row("d", 1)  # nothing is free until capacity is added


@pytest.mark.parametrize("window", [None, 128, 512])
def test_a_row_of_any_length_finds_the_pages_that_were_counted_for_it(window: int | None) -> None:
    for length in range(1, 5 * PAGE):
        table = PageTable(window)
        table.add_capacity(table.count_missing([(length, ())]))
        table.add_row("a", length)
        table.add_capacity(table.count_missing_for_step({"a": length + 1}))
        table.extend_row("a", length + 1)


KEYS = (b"first", b"second", b"third")


def test_rows_that_begin_alike_share_pages_until_the_last_one_leaves() -> None:
    table = make_table(pages=9)
    assert table.count_needed([(2 * PAGE + 1, KEYS[:2]), (3 * PAGE + 1, KEYS)]) == 3 + 2
    assert table.add_row("a", 2 * PAGE + 1, KEYS[:2]) == 0
    assert table.count_needed([(3 * PAGE + 1, KEYS)] * 2) == 1 + 2
    assert table.add_row("b", 3 * PAGE + 1, KEYS) == 2 * PAGE
    assert table.add_row("c", PAGE, KEYS[:1]) == PAGE  # nothing is its own
    assert table.used == 1 + 3 + 2 and table.shared_tokens == 3 * PAGE
    shared = table.list_slots("a", 0, 2 * PAGE)
    np.testing.assert_array_equal(table.list_slots("b", 0, 2 * PAGE), shared)
    assert not set(table.list_slots("b", 2 * PAGE, 3 * PAGE).tolist()) & set(shared.tolist())
    table.remove_row("a")
    assert table.shared_tokens == PAGE
    assert table.used == 1 + 4 and table.add_row("a", 2 * PAGE, KEYS[:2]) == 2 * PAGE
    for rid in "abc":
        table.remove_row(rid)
    assert table.used == 1 and table.shared_tokens == 0 and table.add_row("d", PAGE + 1, KEYS[:1]) == 0


def test_a_shared_page_is_not_written_by_a_row_that_grows() -> None:
    table = make_table()
    for rid in "ab":
        table.add_row(rid, PAGE, KEYS[:1])
        table.extend_row(rid, PAGE + 1)
    slots = {rid: table.list_slots(rid, 0, PAGE + 1).tolist() for rid in "ab"}
    assert slots["a"][:PAGE] == slots["b"][:PAGE] and slots["a"][PAGE] != slots["b"][PAGE]


def test_shared_pages_are_compacted_once() -> None:
    table = make_table()
    table.add_row("x", 3 * PAGE)
    for rid in "ab":
        table.add_row(rid, 2 * PAGE + 5, KEYS[:2])
    before = {rid: table.list_slots(rid, 0, 2 * PAGE + 5) for rid in "ab"}
    table.remove_row("x")
    old = np.array(table.compact())
    assert table.capacity == table.used == 1 + 2 + 2
    for rid in "ab":
        after = table.list_slots(rid, 0, 2 * PAGE + 5)
        np.testing.assert_array_equal(old[after // PAGE] * PAGE + after % PAGE, before[rid])
    table.add_capacity(2)
    assert table.add_row("c", 3 * PAGE, KEYS) == 2 * PAGE


def test_rows_with_a_window_share_nothing() -> None:
    table = make_table(window=PAGE)
    assert [table.add_row(rid, 3 * PAGE, KEYS) for rid in "ab"] == [0, 0]
    assert not set(table.list_slots("a", 2 * PAGE, 3 * PAGE).tolist()) & set(
        table.list_slots("b", 2 * PAGE, 3 * PAGE).tolist()
    )
