"""Checks objects of Anthropic's bodies against their schemas. RequestErrors are in Anthropic's words.

`cache_control` is accepted on every object. null counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from mlxrun.api.body_schema import (
    BOOL,
    LIST,
    OBJECT,
    STRING,
    Schema,
    convert_integers,
    format_path,
    raise_schema_error,
)
from mlxrun.api.text.ignored_fields import CACHE_HINT, ECHOED, log_ignored
from mlxrun.core.field_errors import UNKNOWN, check_type, reject, reject_choice, reject_unsupported, shorten

EXTRA = "Extra inputs are not permitted"
_MAX_NAME_LENGTH = 256
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": _MAX_NAME_LENGTH}
TEXTS: Schema = {"type": ["string", "array"]}


class Tagged(dict[str, Any]):
    """The schema of objects of several kinds. The field `tag` names an object's kind. `refused`: known kinds
    that are refused, and why. `echoed`: clients send these objects back as they got them, so unknown fields
    have no effect."""

    def __init__(
        self,
        kinds: Mapping[str, Schema],
        refused: Mapping[str, str] | None = None,
        *,
        tag: str = "type",
        echoed: bool = False,
    ) -> None:
        self.kinds = {kind: {**schema, "additionalProperties": echoed} for kind, schema in kinds.items()}
        self.refused, self.tag = refused or {}, tag
        schemas = [
            {
                **schema,
                "properties": {**schema["properties"], tag: {"const": kind}, "cache_control": OBJECT},
                "required": [tag, *schema["required"]],
            }
            for kind, schema in self.kinds.items()
        ]
        super().__init__(oneOf=schemas)


def check_tagged(value: Any, param: str, schema: Tagged, *, lenient: bool = False) -> dict[str, Any]:
    """Return the given fields of an object of one of the schema's kinds. `lenient`: accept unknown fields of
    `echoed` objects without effect."""
    check_type(value, dict, param)
    kind, where = value.get(schema.tag), f"{param}.{schema.tag}"
    if kind is None:
        reject(where, "Field required", code="missing_field")
    check_type(kind, str, where)
    if kind in schema.refused:
        reject_unsupported(where, f"{kind!r}: {schema.refused[kind]}")
    if kind not in schema.kinds:
        reject_choice(where, kind, [name for name in schema.kinds if name not in schema.refused])
    others = {key: item for key, item in value.items() if key != schema.tag}
    return {schema.tag: kind, **check_fields(others, param, schema.kinds[kind], lenient=lenient)}


def check_fields(value: Any, param: str, schema: Schema, *, lenient: bool = False) -> dict[str, Any]:
    """Return the given fields of an object but `cache_control`. `schema`: one of `object_of`. `lenient`:
    accept additional properties without effect where the schema allows them; else they are refused."""
    given, properties = {}, schema["properties"]
    for key, item in check_type(value, dict, param).items():
        if item is None:
            continue
        if key == "cache_control":
            check_type(item, dict, f"{param}.cache_control")
            log_ignored("cache_control", CACHE_HINT)
        elif key in properties:
            given[key] = check_value(item, f"{param}.{key}", properties[key], lenient)
        elif lenient and schema["additionalProperties"]:
            log_ignored(f"{param}.{key}", ECHOED)
        else:
            reject(f"{param}.{shorten(key)}", EXTRA, code=UNKNOWN)
    for key in schema["required"]:
        if key not in given:
            reject(f"{param}.{key}", "Field required", code="missing_field")
    return given


def check_value(value: Any, param: str, schema: Schema, lenient: bool) -> Any:
    """Return the value, with integers as in convert_integers. RequestError for the first error found."""
    if isinstance(schema, Tagged):
        return check_tagged(value, param, schema, lenient=lenient)
    if type(value) is list and isinstance(schema.get("items"), Tagged):
        items = enumerate(value)
        return [check_tagged(each, f"{param}[{i}]", schema["items"], lenient=lenient) for i, each in items]
    if type(value) is dict and "additionalProperties" in schema:
        return check_fields(value, param, schema, lenient=lenient)
    error = None if _is_valid(value, schema) else next(Draft202012Validator(schema).iter_errors(value), None)
    if error is None:
        return convert_integers(value, schema)
    if error.validator == "const":
        where = format_path(error.absolute_path, param)
        reject_unsupported(where, f"only {json.dumps(error.validator_value)} is supported")
    raise_schema_error(error, param)


def _is_valid(value: Any, schema: Schema) -> bool:
    """Whether a value is certainly valid, without jsonschema: long conversations have thousands of fields."""
    kind = type(value)
    if kind is str:
        is_name = schema is NAME and 0 < len(value) <= _MAX_NAME_LENGTH
        return schema is STRING or schema is TEXTS or is_name
    if kind is list:
        return schema is LIST or schema is TEXTS
    return schema is OBJECT if kind is dict else kind is bool and schema is BOOL
