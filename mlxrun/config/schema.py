"""JSON Schemas (draft 2020-12) of classes of settings, and that of the config file, made from settings.py.

`schema.json` beside this file is its shipped copy, for editors; a test fails when it is stale.
"""

from __future__ import annotations

import json
import types
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from mlxrun.config.setting_annotations import Bytes, Range
from mlxrun.config.setting_fields import SettingField, describe_class, list_class_fields
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import BYTES_PATTERN

SCHEMA_FILE = Path(__file__).with_name("schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = "extends"
EXTENDS_DOC = (
    "The file or files that this one extends, relative to it. Later ones win, and this one wins over all."
)
Json = dict[str, Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


@cache
def build_schema() -> Json:
    """Return the schema of config files. A section may be empty (`model:` with nothing under it)."""
    found = describe_settings(Config, strict=True)
    found["properties"][EXTENDS] = {
        "description": EXTENDS_DOC,
        "type": ["string", "array"],
        "minLength": 1,
        "items": {"type": "string", "minLength": 1},
    }
    return {"$schema": DIALECT, "title": "mlxrun config", **found}


def render_schema() -> str:
    """Return the schema as it is shipped."""
    return json.dumps(build_schema(), indent=2, ensure_ascii=False) + "\n"


def describe_settings(cls: type, *, strict: bool = False) -> Json:
    """Return the schema of a class of settings. `strict`: a text is not empty, and no item is twice in a
    list."""
    infos = list_class_fields(cls)
    required = [info.key for info in infos if info.is_required]
    return {
        "description": describe_class(cls),
        "type": "object",
        **({"required": required} if required else {}),
        "additionalProperties": False,
        "properties": {info.key: _describe_field(info, strict) for info in infos},
    }


def _describe_field(info: SettingField, strict: bool) -> Json:
    found = _describe_type(info.hint, strict) | ({"description": info.doc} if info.doc else {})
    if info.is_required and found.get("type") == "object":
        found["minProperties"] = 1
    if not (info.is_required or info.is_secret or is_dataclass(info.default)):
        found["default"] = info.default
    return found


def _describe_type(hint: Any, strict: bool) -> Json:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]} | ({"minLength": 1} if strict and hint is str else {})
    if is_dataclass(hint):  # without a key that must be given, it may be empty in YAML
        found = describe_settings(cast(type, hint), strict=strict)
        return found if "required" in found else found | {"type": ["object", "null"]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _describe_type(arguments[0], strict) | _describe_marks(*arguments)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        unique = {"uniqueItems": True} if strict else {}
        return {"type": "array", "items": _describe_type(arguments[0], strict)} | unique
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], strict)}
    return _describe_union(arguments, strict and int not in arguments)


def _describe_union(kinds: tuple[Any, ...], strict: bool) -> Json:
    """Bounds apply to numbers, patterns to strings, and properties to mappings: a union needs no `anyOf`."""
    parts = [_describe_type(each, strict) for each in kinds]
    merged = {key: value for part in parts for key, value in part.items()}
    if "enum" in merged:
        return {"enum": [*merged["enum"], None]}
    names = dict.fromkeys(each for part in parts for each in _list_types(part))
    return merged | {"type": [each for each in names if each != "null" or types.NoneType in kinds]}


def _list_types(schema: Json) -> list[str]:
    kinds = schema["type"]
    return kinds if isinstance(kinds, list) else [kinds]


def _describe_marks(hint: Any, *marks: Any) -> Json:
    """Return what the annotations of a type add to its schema."""
    found: Json = {}
    for mark in marks:
        if isinstance(mark, Range):
            bounds = {"minimum": mark.low, "maximum": mark.high}
            found |= {key: bound for key, bound in bounds.items() if bound is not None}
        elif isinstance(mark, Bytes):
            kinds = _list_types(_describe_type(hint, strict=False))
            found |= {"type": [*kinds, "string"], "pattern": BYTES_PATTERN}
    return found
