"""JSON in answers: finding the first value, and comparing it with a value or a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from mlxrun.core.limited_json import MAX_DEPTH, is_nested_deeper
from mlxrun.jobs.scoring.timed_regex import SearchTimer, check_pattern

_MAX_SHOWN = 64  # levels of a JSON value that is written as `extracted`
_MAX_STARTS = 1000  # positions at which a JSON value is searched; limits the time for "[[[[..."


class _Missing:
    """Stands for no value, as null is one."""


MISSING = _Missing()


def find_json(text: str, *, containers_only: bool) -> Any:
    """The first JSON value in a text, or its first object or array; MISSING if there is none, or if it is
    nested too deeply to be compared."""
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
    """The value as a record may have it: None if there is none, or if it is nested too deeply."""
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
    """ValueError with the reason if `schema` is not a JSON Schema, or its patterns cannot be searched."""
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
    """Why a value does not fit a checked schema; None if it fits. Patterns are searched for a limited time
    (TimeoutError), and nothing is fetched: ValueError if the schema refers to what is not in it."""
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
