"""Reads JSON of users, clients and models with a limit of its depth.

Libraries fail on deep values at different depths, which also depend on the caller's stack. A value within
MAX_DEPTH passes all of them.
"""

from __future__ import annotations

import json
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
        items = (item for each in found for item in (each.values() if isinstance(each, dict) else each))
        found = [item for item in items if isinstance(item, _CONTAINERS)]
    return bool(found)
