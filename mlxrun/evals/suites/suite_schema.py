"""The JSON Schema of suites, made from suite_settings.py; and suites made of plain values.

`schema.json` beside this file is its copy for editors; a test fails when it is stale.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mlxrun.config.schema import DIALECT
from mlxrun.config.setting_fields import join_lines, read_docstrings
from mlxrun.evals.suites.suite_settings import Suite

SCHEMA_FILE = Path(__file__).with_name("schema.json")
Json = dict[str, Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


@cache
def build_suite_schema() -> Json:
    """Build the schema of suite files."""
    return {"$schema": DIALECT, "title": "mlxrun suite", **describe_settings(Suite)}


def list_settings(cls: type) -> list[tuple[Field[Any], Any, str]]:
    """List the fields of a settings class, each with its type and its description."""
    hints, docs = get_type_hints(cls, include_extras=True), read_docstrings(cls)
    return [(each, hints[each.name], docs[each.name]) for each in fields(cls)]


def is_required(item: Field[Any]) -> bool:
    """Whether a setting has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def get_default(item: Field[Any]) -> Any:
    """Return the default of a setting that is not required, as JSON has it."""
    value = item.default if item.default_factory is MISSING else item.default_factory()
    return list(value) if isinstance(value, tuple) else value


def _describe_type(hint: Any) -> Json:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if is_dataclass(hint):
        return describe_settings(hint)  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = {"minimum": arguments[1].low, "maximum": arguments[1].high}
        return _describe_type(arguments[0]) | {key: each for key, each in bounds.items() if each is not None}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _describe_type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1])}
    assert origin in (Union, types.UnionType), hint
    parts = [_describe_type(each) for each in arguments]
    merged = {key: value for part in parts for key, value in part.items()}
    kinds = (part["type"] if isinstance(part["type"], list) else [part["type"]] for part in parts)
    return merged | {"type": list(dict.fromkeys(each for kind in kinds for each in kind))}


def describe_settings(cls: type) -> Json:
    """Build the schema of a settings class."""
    properties = {}
    for item, hint, doc in list_settings(cls):
        properties[item.name] = _describe_type(hint) | {"description": doc}
        if not is_required(item):
            properties[item.name]["default"] = get_default(item)
    required = [item.name for item in fields(cls) if is_required(item)]
    for name in required:
        if properties[name].get("type") == "object":
            properties[name]["minProperties"] = 1
    kind = {"type": "object", "required": required} if required else {"type": ["object", "null"]}
    doc = join_lines(cls.__doc__ or "")
    return {"description": doc, **kind, "additionalProperties": False, "properties": properties}


def build_settings(hint: Any, value: Any) -> Any:
    """Build the value of a type from plain values that fit the schema."""
    if is_dataclass(hint):
        given = value or {}
        hints = get_type_hints(hint)
        built = {name: build_settings(hints[name], each) for name, each in given.items()}
        return hint(**built)  # type: ignore[operator]
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None or not arguments:
        return value
    if origin is Annotated:
        return build_settings(arguments[0], value)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each not in _PLAIN and get_origin(each) is not Literal]
        return build_settings(kinds[0], value) if kinds and isinstance(value, dict | list) else value
    if origin is tuple and isinstance(value, list):
        return tuple(build_settings(arguments[0], each) for each in value)
    if origin is dict:
        return {key: build_settings(arguments[1], each) for key, each in value.items()}
    return value
