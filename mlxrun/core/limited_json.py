"""Reads JSON of users, clients and models with a limit of its depth, and what strict JSON is.

Libraries fail on deep values at different depths, which also depend on the caller's stack. A value within
MAX_DEPTH passes all of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

MAX_DEPTH = 100  # levels of objects and arrays: well below the limits of encoders, templates and schemas
_CONTAINERS = (dict, list)


class NestedTooDeeply(ValueError):
    """A JSON text is nested too deeply to be read."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply: more than {MAX_DEPTH} levels")


class LongNumber(ValueError):
    """A JSON text has an integer with more digits than Python reads."""

    def __init__(self) -> None:
        super().__init__("a number has thousands of digits")


class NotStrict(ValueError):
    """A JSON text has what only Python reads, or what no program reads as it was meant."""


def refuse_constant(name: str) -> Any:
    """The `parse_constant` of json.loads that refuses NaN and infinities, with NotStrict."""
    raise NotStrict(f"{name} is not a JSON number")


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise NotStrict(f"the number {text[:40]} is too large")
    return value


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of json.loads that refuses an object with a key twice, with NotStrict."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise NotStrict(f"the key {twice[:80]!r} occurs twice in one object")
    return found


# Arguments of json.loads for strict JSON: NotStrict for what other programs refuse or read otherwise.
STRICT: dict[str, Any] = {
    "object_pairs_hook": make_object,
    "parse_constant": refuse_constant,
    "parse_float": _parse_float,
}


def load_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text. `hooks`: keyword arguments of json.loads. NestedTooDeeply for a deep text,
    LongNumber for a long integer, another ValueError for one that is not JSON."""
    try:
        value = json.loads(text, **hooks)
    except RecursionError as error:
        raise NestedTooDeeply from error
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        raise LongNumber from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """NestedTooDeeply if a JSON value is nested deeper than MAX_DEPTH."""
    if is_nested_deeper(value, MAX_DEPTH):
        raise NestedTooDeeply


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether objects and arrays are nested deeper than `levels`."""
    found = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(levels):
        if not found:
            return False
        items = (item for each in found for item in (each.values() if isinstance(each, dict) else each))
        found = [item for item in items if isinstance(item, _CONTAINERS)]
    return bool(found)
