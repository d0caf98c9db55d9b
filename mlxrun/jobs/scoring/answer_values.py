"""JSON, numbers and patterns in answers: checks what is expected, finds values and compares them.

Patterns of users are compiled within limits, and searched for a limited time without the GIL.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import regex

from mlxrun.core.limited_json import MAX_DEPTH, is_nested_deeper

SEARCH_SECONDS = 1.0  # for all patterns of a line together
_MOST_REPEATS = 100_000  # of a pattern; `regex` writes "a{1000}" out, so more needs seconds and gigabytes
_REPEAT = re.compile(r"(\)?)\s*\{\s*(\d+)")
_ERRORS = (regex.error, RecursionError, OverflowError, ValueError)


class SearchTimer:
    """The time that is left to search the patterns of one line."""

    def __init__(self) -> None:
        self._end = time.thread_time() + SEARCH_SECONDS  # as `regex` counts: a suspended process takes none

    def search(self, pattern: str, text: str) -> Any:
        """Return the first match of a checked pattern, or None. TimeoutError if the search takes too long."""
        left = max(self._end - time.thread_time(), 1e-3)
        return regex.search(pattern, text, timeout=left, concurrent=True)


def check_pattern(pattern: str) -> Any:
    """Compile a pattern. ValueError with the reason if it is no pattern, or is too long once its repeats are
    written out."""
    try:
        _check_repeats(pattern)
        return regex.compile(pattern)
    except _ERRORS as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def _check_repeats(pattern: str) -> None:
    """A count behind a bracket may multiply all others; so may each count if there can be comments in
    between."""
    length, times = len(pattern), 1
    for bracket, count in _REPEAT.findall(pattern):
        if bracket or "#" in pattern:
            times *= max(1, int(count))
        else:
            length += int(count)
    if length * times > _MOST_REPEATS:
        raise ValueError(f"its repeats make it longer than {_MOST_REPEATS} characters")


_MAX_SHOWN = 64  # levels of a JSON value that is written as `extracted`
_MAX_STARTS = 1000  # positions at which a JSON value is searched; limits the time for "[[[[..."

MISSING = object()  # stands for no value, as null is one


def find_json(text: str, *, containers_only: bool) -> Any:
    """Find the first JSON value in a text, or the first object or array. MISSING if there is none, or if it
    is nested too deeply to be compared."""
    starts = r"[\[{]" if containers_only else r"[\[{\"\-\dtfn]"
    for count, start in enumerate(re.finditer(starts, text)):
        if count == _MAX_STARTS:
            break
        try:
            found, _ = _DECODER.raw_decode(text, start.start())
        except ValueError:
            continue
        except RecursionError:
            return MISSING
        return MISSING if is_nested_deeper(found, MAX_DEPTH) else found
    return MISSING


def _parse_finite(text: str) -> float:
    """ValueError for what is no JSON number, such as NaN, and for what is too large for one."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_float=_parse_finite, parse_constant=_parse_finite)


def limit_depth(value: Any) -> Any:
    """Return the value as a record may have it: None if it is missing, or nested too deeply."""
    return None if value is MISSING or is_nested_deeper(value, _MAX_SHOWN) else value


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and bool(a == b)


def check_schema(schema: Any) -> None:
    """Raise ValueError with the reason if `schema` is not a JSON Schema, or if its patterns cannot be
    searched."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON Schema, which is an object")
    content: Any = schema
    try:
        validator_for(content, default=Draft202012Validator).check_schema(content)
    except SchemaError as error:
        raise ValueError(f"is not a valid JSON Schema: {error.json_path}: {error.message[:200]}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if _has_key(schema, "patternProperties"):  # the library searches these patterns without a limit of time
        raise ValueError("has patternProperties, which is not supported; use propertyNames with a pattern")
    for pattern in _list_patterns(schema):
        check_pattern(pattern)


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, dict) and isinstance(value.get(key), dict):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_key(each, key) for each in items)


def _list_patterns(value: Any) -> Iterator[str]:
    """The patterns in a schema; what only looks like one, in a `const`, is checked too."""
    if isinstance(value, dict) and isinstance(value.get("pattern"), str):
        yield value["pattern"]
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _list_patterns(each)


def find_schema_problem(schema: Any, value: Any) -> str | None:
    """Return why a value does not fit a checked schema; None if it fits. Nothing is fetched. TimeoutError if
    the search of patterns takes too long. ValueError if the schema refers to something outside it, or to
    itself without end."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    timer = SearchTimer()

    def check_text(validator: Any, pattern: str, value: Any, _: Any) -> Iterator[ValidationError]:
        if validator.is_type(value, "string") and timer.search(pattern, value) is None:
            yield ValidationError(f"{value!r} does not match {pattern!r}")

    make: Any = extend
    own = make(validator_for(schema, default=Draft202012Validator), {"pattern": check_text})
    registry: Any = Registry()
    try:
        problem = next(own(schema, registry=registry).iter_errors(value), None)
    except Unresolvable as error:
        raise ValueError(f"the schema refers to {error.ref!r}, which is not in it") from error
    except RecursionError as error:
        raise ValueError("the schema refers to itself without end") from error
    return None if problem is None else f"{problem.json_path}: {problem.message[:200]}"


_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?")
# Thousands apart by LaTeX's comma or thin space, by a no-break or thin space, or by an apostrophe.
_THOUSANDS = re.compile(
    r"(?<![\d.,'])\d{1,3}(?:(?:\{,\}\d{3})+|(?:\\,\d{3})+|(?:[\u00a0\u2009\u202f]\d{3})+|(?:['\u2019]\d{3})+)(?!\d)"
)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_ROUNDING = 1e-9  # relative; the tolerance where none is given


def find_last_number(text: str) -> float | None:
    """Find the last number in a text, without marks between thousands; None if there is none. A plain space
    is no such mark, as it may separate two numbers."""
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text.replace("\N{MINUS SIGN}", "-"))
    found = _NUMBER.findall(text)
    return parse_number(found[-1]) if found else None


def parse_number(value: Any) -> float | None:
    """Parse a finite number; None if the value is none. An integer keeps all its digits."""
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
    """Raise ValueError if a tolerance is neither a number from 0 on (absolute) nor a text such as "1%"."""
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(
            "must be a number from 0 on, which is absolute, or relative to what is expected: '1%'"
        )


def is_close(got: float, expected: Sequence[Any], tolerance: Any = None) -> bool:
    """Whether a number differs from one of `expected` by at most the tolerance. A tolerance of None is a
    billionth of the larger number."""
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
