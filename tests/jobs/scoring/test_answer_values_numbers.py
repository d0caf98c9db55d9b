"""Numbers within a tolerance."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.jobs.scoring.answer_values import check_tolerance, find_last_number, is_close, parse_number


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "good"),
    [
        (3.2, 3, 0.2, True),
        (3.21, 3, 0.2, False),
        (1.1, 1, 0.1, True),  # although 1.1 - 1 > 0.1 in binary
        (101, 100, "1%", True),
        (99, 100, "1 %", True),
        (101.1, 100, "1%", False),
        (-101, -100, "1%", True),
        (0.001, 0, "50%", False),
        (0.001, 0, 0.001, True),
        (5, 5, 0, True),
        (5.0000000001, 5, 0, False),
        (5.0000000001, 5, None, True),
        (10**15 + 1, 10**15, None, True),
        (10**15 + 1, 10**15, 0.5, False),
        (10**18 + 1, 10**18, 0.5, False),
        (10**18 + 1, 10**18, 1, True),
        (7, "6.5", 0.5, True),
    ],
)
def test_tolerances(got: float, expected: Any, tolerance: Any, good: bool) -> None:
    assert is_close(got, [expected], tolerance) is good
    assert is_close(got, [10**9, expected], tolerance) is good


@pytest.mark.parametrize("value", [-1, True, "1", "x%", "-1%", float("nan"), float("inf"), None, [1]])
def test_what_is_no_tolerance(value: Any) -> None:
    with pytest.raises(ValueError, match="relative"):
        check_tolerance(value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{1{,}234}", 1234),
        (r"$-1\,234\,567$", -1234567),
        ("1\u00a0234 kg", 1234),
        ("1\u2009234.5", 1234.5),
        ("12\u202f345\u202f678", 12345678),
        ("1'234", 1234),
        ("1 234", 234),
        ("0.5\u2009234", 234),
        ("1'23", 23),
        ("1{,}2345", 2345),
    ],
)
def test_marks_between_thousands(text: str, number: float) -> None:
    assert find_last_number(text) == number


def test_finding_and_parsing() -> None:
    assert find_last_number("1, then \N{MINUS SIGN}1,234.5 kg") == -1234.5
    assert find_last_number("none") is None
    assert parse_number(True) is None and parse_number("1e999") is None
    assert parse_number("12345678901234567890") == 12345678901234567890
