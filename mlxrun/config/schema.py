"""The JSON Schema of the config file (draft 2020-12), made from settings.py.

`schema.json` beside this file is its shipped copy, for editors; a test fails when it is stale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxrun.config.setting_fields import (
    SettingField,
    join_lines,
    list_fields,
    list_item_fields,
    list_sections,
)
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import BYTES_PATTERN

SCHEMA_FILE = Path(__file__).with_name("schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = "extends"
EXTENDS_DOC = (
    "The file or files that this one extends, relative to it. Later ones win, and this one wins over all."
)


def build_schema() -> dict[str, Any]:
    """Return the schema of config files. A section may be empty (`model:` with nothing under it)."""
    properties = _build_properties("")
    properties[EXTENDS] = {
        "description": EXTENDS_DOC,
        "type": ["string", "array"],
        "minLength": 1,
        "items": {"type": "string", "minLength": 1},
    }
    for section in list_sections().values():
        properties[section.name] = {
            "description": section.doc,
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": _build_properties(section.name),
        }
    return {
        "$schema": DIALECT,
        "title": "mlxrun config",
        "description": join_lines(Config.__doc__ or ""),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def render_schema() -> str:
    """Return the schema as it is shipped."""
    return json.dumps(build_schema(), indent=2, ensure_ascii=False) + "\n"


def _build_properties(section: str) -> dict[str, Any]:
    return {info.key: _build_property(info) for info in list_fields().values() if info.section == section}


def _build_property(info: SettingField) -> dict[str, Any]:
    """Return the schema of a key. Bounds apply to numbers, patterns to strings: sizes need no `anyOf`."""
    found: dict[str, Any] = {"description": info.doc} | _build_type(info)
    if info.optional and "enum" in found:
        found["enum"] = [*found["enum"], None]
    elif info.optional:
        kinds = found["type"]
        found["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]
    if info.range.low is not None:
        found["minimum"] = info.range.low
    if info.range.high is not None:
        found["maximum"] = info.range.high
    if not info.is_secret:
        found["default"] = list(info.default) if info.is_list else info.default
    return found


def _build_item(cls: type) -> dict[str, Any]:
    """Return the schema of a mapping's values that are strings, or mappings with the keys of a class."""
    return {
        "type": ["string", "object"],
        "minLength": 1,
        "additionalProperties": False,
        "properties": {info.key: _build_property(info) for info in list_item_fields(cls)},
    }


def _build_type(info: SettingField) -> dict[str, Any]:
    """Return the part of the schema that follows from the type alone."""
    if info.choices:
        return {"enum": list(info.choices)}
    if info.is_list:
        return {"type": "array", "items": {"type": "string", "minLength": 1}, "uniqueItems": True}
    if info.holds_text:
        return {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}
    if info.item_class is not None:
        return {"type": "object", "additionalProperties": _build_item(info.item_class)}
    if info.is_mapping:
        return {
            "type": "object",
            "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
        }
    if info.is_bytes:
        return {"type": ["integer", "string"], "pattern": BYTES_PATTERN}
    if info.type is str:
        return {"type": "string", "minLength": 1}
    return {"type": {bool: "boolean", int: "integer", float: "number"}[info.type]}
