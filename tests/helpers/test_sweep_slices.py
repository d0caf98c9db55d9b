"""Slices of the sweep: each test is in one of them, and all come within their number of days."""

from __future__ import annotations

import datetime

import pytest

from tests.helpers.sweep_slices import is_in_slice, read_slice

TESTS = [f"tests/parity/test_text.py::test_batch[{number}]" for number in range(1000)]
DAY = datetime.date(2026, 1, 30)


def test_each_test_is_in_one_slice_and_slices_are_alike() -> None:
    slices = [[test for test in TESTS if is_in_slice(test, number, 8)] for number in range(1, 9)]
    assert sorted(sum(slices, [])) == sorted(TESTS)
    assert all(80 < len(found) < 170 for found in slices)


def test_days_in_a_row_take_all_slices() -> None:
    days = [DAY + datetime.timedelta(days=number) for number in range(8)]
    assert sorted(read_slice("auto/8", day) for day in days) == [(number, 8) for number in range(1, 9)]
    assert read_slice("3/8", days[0]) == read_slice("3/8", days[5]) == (3, 8)


@pytest.mark.parametrize("text", ["0/8", "9/8", "auto", "x/8"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_slice(text, DAY)
