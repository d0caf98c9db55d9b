"""The JSON Schema of the config file (draft 2020-12), made from settings.py.

`schema.json` beside this file is its shipped copy, for editors; a test fails when it is stale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxrun.config.byte_sizes import BYTES_PATTERN
from mlxrun.config.setting_fields import FieldInfo, Section, fields_of, one_line, sections_of
from mlxrun.config.settings import Config

SCHEMA_FILE = Path(__file__).with_name("schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = "extends"
EXTENDS_DOC = "File or files that this one builds on, relative to it; later ones win, this one last."


def schema_of(root: type = Config) -> dict[str, Any]:
    """The schema of a config class. An empty section (`model:` with nothing under it) is valid."""
    infos = fields_of(root).values()
    sections = sections_of(root).values()
    properties = {info.key: _property(info) for info in infos if not info.section}
    properties[EXTENDS] = {
        "description": EXTENDS_DOC,
        "type": ["string", "array"],
        "minLength": 1,
        "items": {"type": "string", "minLength": 1},
    }
    properties |= {section.name: _section(section, root) for section in sections}
    return {
        "$schema": DIALECT,
        "title": "mlxrun config",
        "description": one_line(root.__doc__ or ""),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def schema_text(root: type = Config) -> str:
    """The schema as it is shipped."""
    return json.dumps(schema_of(root), indent=2, ensure_ascii=False) + "\n"


def _section(section: Section, root: type) -> dict[str, Any]:
    infos = [info for info in fields_of(root).values() if info.section == section.name]
    return {
        "description": section.doc,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {info.key: _property(info) for info in infos},
    }


def _property(info: FieldInfo) -> dict[str, Any]:
    """One key. Bounds only bind numbers and patterns only strings, so a size needs no `anyOf`."""
    found: dict[str, Any] = {"description": info.doc} | _shape(info)
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


def _shape(info: FieldInfo) -> dict[str, Any]:
    """The part of the schema that follows from the type alone."""
    if info.choices:
        return {"enum": list(info.choices)}
    if info.is_list:
        return {"type": "array", "items": {"type": "string", "minLength": 1}, "uniqueItems": True}
    if info.holds_text:
        return {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}
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
