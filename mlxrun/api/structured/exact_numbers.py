"""Refuses the numbers of a schema that llguidance would replace by others: it computes with doubles.

From 2**53 on, a double holds only some of the integers. An answer would then be another integer than the
schema allows. A range that lies below -2**63 ends the process in llguidance. The upper bounds of 64-bit
integers are fine, since llguidance takes 2**63 - 1 for all that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mlxrun.api.structured.grammar_checks import HIGH, LOW
from mlxrun.core.field_errors import reject, shorten

_END = 2**63
_STEPS = {LOW[1]: 1, HIGH[1]: -1}  # from an excluded bound to the first integer that is allowed
_VALUES = ("const", "enum")


def check_numbers(schema: Mapping[str, Any], param: str) -> None:
    """Raise RequestError for a bound, or a number in `const` or `enum`, that cannot be enforced exactly.

    A reference may lead to any object of the schema, so each is checked as if it were a schema."""
    stack: list[tuple[Any, tuple[Any, ...], bool]] = [(schema, (), False)]
    while stack:
        value, path, is_listed = stack.pop()
        if isinstance(value, Mapping):
            if not is_listed:
                _check_bounds(value, param, path)
            for key, each in value.items():
                stack.append((each, (path, f".{shorten(key, 60)}"), is_listed or key in _VALUES))
        elif isinstance(value, list):
            stack.extend((each, (path, f"[{i}]"), is_listed) for i, each in enumerate(value))
        elif is_listed and _is_integral(value) and (abs(value) >= _END or _clamp(value) != value):
            _reject_number(param, path, value)


def _check_bounds(schema: Mapping[str, Any], param: str, path: tuple[Any, ...]) -> None:
    for key in (*LOW, *HIGH):
        bound: Any = schema.get(key)
        if not _is_integral(bound):
            continue
        # Draft 4 has flags that exclude the bound.
        steps = {_STEPS.get(key, 0), *(_STEPS[flag] for flag in _STEPS if schema.get(flag) is True)}
        wrong = any(_clamp(bound, step) != min(max(int(bound) + step, -_END), _END - 1) for step in steps)
        if schema.get("type") != "integer" and not wrong:
            # A range of other numbers has the digits that tell the double from its neighbours, and zeros.
            wrong = abs(bound) < _END and Decimal(repr(float(bound))) != int(bound)
        if wrong or (key in HIGH and bound <= -_END):
            _reject_number(param, (path, f".{key}"), bound)


def _is_integral(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _clamp(value: float, step: int = 0) -> int:
    """What llguidance makes of an integer, and of one beside it: a double, in the range of 64 bits."""
    inside = min(max(value, -2 * _END), 2 * _END)
    return int(min(max(float(inside) + step, -_END), _END - 1))


def _reject_number(param: str, path: tuple[Any, ...], value: float) -> None:
    steps: list[str] = []
    while path:
        path, step = path
        steps.append(step)
    reason = "cannot be enforced exactly: grammars compute with doubles; use a string, or another number"
    reject(param + "".join(reversed(steps)), f"{shorten(str(value), 40)} {reason}")
