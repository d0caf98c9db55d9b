"""Formulas of sums, such as `2 * tp / (2 * tp + fp + fn)`: names, numbers, + - * / **, and five functions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_LONGEST = 500  # characters
_FUNCTIONS = {"exp": 1, "log": 1, "sqrt": 1, "minimum": 2, "maximum": 2}  # of NumPy, by number of arguments
_OPERATORS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.Pow: "power"}


@lru_cache(maxsize=256)
def parse_formula(text: str) -> ast.expr:
    """Parse a formula. ValueError says what in it is none."""
    try:
        if len(text) > _LONGEST:
            raise SyntaxError
        found = ast.parse(text, mode="eval").body
        _check_node(found)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.100} as `aggregate`, which is no formula") from error
    return found


def list_names(text: str) -> list[str]:
    """List the names of a formula. ValueError if it is none."""
    return sorted(_find_names(parse_formula(text)))


def evaluate_formula(text: str, values: Mapping[str, Array]) -> Array:
    """Evaluate a formula of arrays of one shape. What is undefined is NaN or infinite."""
    found: Array = _evaluate(parse_formula(text), values)
    return found


def _check_node(node: ast.expr) -> None:
    """SyntaxError if something is not of a formula."""
    match node:
        case ast.Name():
            children: list[ast.expr] = []
        case ast.Constant(value=value) if type(value) in (int, float):
            children = []
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            children = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            children = [left, right]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            if len(arguments) != _FUNCTIONS[name]:
                raise SyntaxError
            children = arguments
        case _:
            raise SyntaxError
    for child in children:
        _check_node(child)


def _find_names(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.UnaryOp(operand=operand):
            return _find_names(operand)
        case ast.BinOp(left=left, right=right):
            return _find_names(left) | _find_names(right)
        case ast.Call(args=arguments):
            return set().union(*map(_find_names, arguments))
    return set()


def _evaluate(node: ast.expr, values: Mapping[str, Array]) -> Any:
    import numpy as np

    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right):
            return getattr(np, _OPERATORS[type(op)])(_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return getattr(np, name)(*(_evaluate(each, values) for each in arguments))
        case ast.Constant(value=value):
            return np.full_like(next(iter(values.values()), np.zeros(1)), float(value))  # type: ignore[arg-type]
    raise AssertionError(node)
