"""Numbers in answers: finding the last one, and comparing it within a tolerance."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?")
# Thousands apart by LaTeX's comma or thin space, by a no-break or thin space, or by an apostrophe.
_THOUSANDS = re.compile(
    r"(?<![\d.,'])\d{1,3}(?:(?:\{,\}\d{3})+|(?:\\,\d{3})+|(?:[\u00a0\u2009\u202f]\d{3})+|(?:['\u2019]\d{3})+)(?!\d)"
)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_ROUNDING = 1e-9  # relative; the tolerance where none is given


def find_last_number(text: str) -> float | None:
    """The last number in a text, without marks between thousands; None if there is none. A plain space is
    no such mark, as it may separate two numbers."""
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text.replace("\N{MINUS SIGN}", "-"))
    found = _NUMBER.findall(text)
    return parse_number(found[-1]) if found else None


def parse_number(value: Any) -> float | None:
    """A finite number; an integer keeps all its digits."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = value.replace(",", "") if isinstance(value, str) else str(value)
    try:
        if not math.isfinite(float(text)):
            return None
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except (ValueError, OverflowError):
        return None


def check_tolerance(value: Any) -> None:
    """ValueError if a tolerance is neither a number from 0 on (absolute) nor a text such as "1%"."""
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            "must be a number from 0 on, which is absolute, or relative to what is expected: '1%'"
        )


def is_close(got: float, expected: Sequence[Any], tolerance: Any = None) -> bool:
    """Whether a number differs from one of `expected` by no more than the tolerance. None: by at most a
    billionth of the larger one."""
    values = [value for value in map(parse_number, expected) if value is not None]
    if tolerance is None:
        return any(math.isclose(got, value, rel_tol=_ROUNDING, abs_tol=0.0) for value in values)
    return any(abs(got - value) <= _compute_margin(got, value, tolerance) for value in values)


def _compute_margin(got: float, value: float, tolerance: Any) -> float:
    """The absolute margin. It is widened by the rounding of binary fractions: 1.1 is within 0.1 of 1."""
    percent = _PERCENT.fullmatch(tolerance) if isinstance(tolerance, str) else None
    margin = float(percent[1]) / 100 * abs(value) if percent else float(tolerance)
    if isinstance(got, int) and isinstance(value, int):
        return margin * (1 + _ROUNDING)
    return margin * (1 + _ROUNDING) + abs(value) * sys.float_info.epsilon
