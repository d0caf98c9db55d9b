"""Words for what is wrong with a request: every text names the field and what was expected there.

Paths look like `messages[3].content[1].type`; they are `RequestError.param` and start the message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from mlxrun.errors import RequestError

UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"


def bad(param: str, text: str, *, code: str | None = None) -> RequestError:
    """The error for one field."""
    return RequestError(f"{param}: {text}", param=param, code=code)


def unsupported(param: str, reason: str) -> RequestError:
    """The error for a field that is known, but that mlxrun cannot honour."""
    return bad(param, f"not supported: {reason}", code=UNSUPPORTED)


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def shorten(text: str, most: int = 160) -> str:
    """`text`, cut so that an error about a large value stays readable."""
    return text if len(text) <= most else f"{text[: most - 12]}... ({len(text)})"


def quote(value: Any) -> str:
    """A short quoted form of a value, also of one that is nested too deeply for repr."""
    return repr(shorten(value)) if isinstance(value, str) else kind(value)


def suggest(name: str, options: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing."""
    close = difflib.get_close_matches(name[:80], list(options), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def need(value: Any, wanted: type, param: str) -> Any:
    """`value` if it is of the wanted JSON type, else an error."""
    if type(value) is not wanted:
        raise bad(param, f"expected {kind(wanted())}, got {kind(value)}", code="invalid_type")
    return value


def field_of(value: dict[str, Any], key: str, wanted: type, param: str) -> Any:
    """The field of an object that has to have it, of the wanted JSON type; null is not given."""
    if value.get(key) is None:
        raise bad(f"{param}.{key}", "missing", code="missing_field")
    return need(value[key], wanted, f"{param}.{key}")


def known_keys(value: dict[str, Any], allowed: Iterable[str], param: str) -> None:
    """Refuses the first key that is not allowed, by name."""
    allowed = tuple(allowed)
    for key in value:
        if key not in allowed:
            where = f"{param}.{shorten(key)}"
            raise bad(where, f"unknown field{suggest(key, allowed)}", code=UNKNOWN)


def strings(value: Any, param: str) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, object keys included, with its path. Takes any depth."""
    stack: list[tuple[str, Any]] = [(param, value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str):
            yield path, item
        elif isinstance(item, list):
            stack.extend((f"{path}[{i}]", part) for i, part in reversed(list(enumerate(item))))
        elif isinstance(item, dict):
            for key, part in reversed(list(item.items())):
                stack.append((f"{path}.{shorten(key, 60)}", part))
                stack.append((path, key))
