"""Checks request bodies: every field of an endpoint is honoured, harmless, or refused by name.

`BodySchema.check` returns the fields that were given (null counts as not given); an unknown field is an error
with a suggestion. What a schema cannot express is checked where it is used. The fields themselves are in the
`fields.py` of each surface.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, ValidationError

from mlxrun.text.field_errors import (
    UNKNOWN,
    check_type,
    get_json_type,
    get_required,
    quote,
    reject,
    reject_unsupported,
    shorten,
    suggest,
)

Schema = dict[str, Any]

ANY: Schema = {}
BOOL: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
TOOLS: Schema = {"type": "array", "maxItems": 1024}


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """The schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class BodySchema:
    """The body of one endpoint.

    `honoured`: JSON schema by field. `harmless`: fields that are accepted with values that do not change the
    answer: the schema of those values, and the reason. `refused`: known fields that are always refused, and
    the reason. `elsewhere`: fields of other endpoints, and the URL to which they belong.
    """

    honoured: Mapping[str, Schema]
    harmless: Mapping[str, tuple[Schema, str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def validator(self) -> Draft202012Validator:
        return Draft202012Validator({"properties": dict(self.honoured)})

    @property
    def schema(self) -> Schema:
        """The whole body as one JSON schema, for documents."""
        harmless = {name: schema for name, (schema, _) in self.harmless.items()}
        return {"type": "object", "properties": {**self.honoured, **harmless}, "additionalProperties": False}

    def check(self, body: Any) -> dict[str, Any]:
        """The fields of a body that were given, each of the right type and range."""
        if not isinstance(body, dict):
            reject("body", f"expected an object, got {get_json_type(body)}", code="invalid_type")
        given = {key: value for key, value in body.items() if value is not None}
        try:
            for key, value in given.items():
                self._check_known(key, value)
                _check_count(key, value, self.honoured.get(key, {}))
            _check_finite(given)
            errors = list(self.validator.iter_errors(given))
        except RecursionError:
            reject("body", "is nested too deeply")
        if errors:
            raise_schema_error(min(errors, key=lambda error: format_path(error.absolute_path)))
        return given

    def _check_known(self, key: str, value: Any) -> None:
        if key in self.honoured:
            return
        if key in self.refused:
            reject_unsupported(key, self.refused[key])
        if key in self.harmless:
            schema, reason = self.harmless[key]
            if not Draft202012Validator(schema).is_valid(value):
                reject_unsupported(key, f"only {_describe(schema)} is supported ({reason})")
            return
        if key in self.elsewhere:
            reject(key, f"belongs to {self.elsewhere[key]}", code=UNKNOWN)
        hint = suggest(key, [*self.honoured, *self.harmless])
        reject(shorten(key), f"unknown parameter{hint}", code=UNKNOWN)


def _check_count(name: str, value: Any, schema: Schema) -> None:
    """Counts entries before they are checked: each takes some 40 us, and each error more."""
    if not isinstance(value, list | dict):
        return
    most = schema.get("maxItems" if isinstance(value, list) else "maxProperties")
    if most is not None and len(value) > most:
        reject(name, f"has {len(value)} entries; at most {most} are allowed", code="invalid_value")


def _check_finite(given: dict[str, Any]) -> None:
    """Refuses NaN and infinities, which pass every range of a JSON schema."""
    biases = given.get("logit_bias")
    fields = {f"logit_bias.{key}": value for key, value in biases.items()} if isinstance(biases, dict) else {}
    for key, value in (given | fields).items():
        if isinstance(value, float) and not math.isfinite(value):
            reject(key, "must be a finite number")


def raise_schema_error(error: ValidationError, prefix: str = "") -> NoReturn:
    """Raises the RequestError for what a schema found in the value at the path `prefix`."""
    param = format_path(error.absolute_path, prefix)
    if error.validator == "type":
        expected: Any = error.validator_value
        names = expected if isinstance(expected, str) else " or ".join(expected)
        reject(param, f"expected {names}, got {get_json_type(error.instance)}", code="invalid_type")
    if "propertyNames" in error.absolute_schema_path:
        reject(param, f"{quote(error.instance)} is not a token id, such as '1234'", code="invalid_value")
    if error.validator == "enum":
        allowed: Any = error.validator_value
        options = ", ".join(json.dumps(option) for option in allowed if option is not None)
        value = error.instance
        shown = json.dumps(shorten(value)) if isinstance(value, str) else f"this {get_json_type(value)}"
        reject(param, f"{shown} is not one of {options}", code="invalid_value")
    reject(param, shorten(error.message), code="invalid_value")


def _describe(schema: Schema) -> str:
    if "const" in schema:
        return json.dumps(schema["const"])
    return " or ".join(map(json.dumps, schema["enum"])) if "enum" in schema else f"{schema['type']}"


def format_path(parts: Iterable[Any], prefix: str = "") -> str:
    """`a.b[3]` for jsonschema's list of keys and indices."""
    text = prefix
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Checks function tools, which templates take as they are."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        check_type(tool, dict, where)
        if get_required(tool, "type", str, where) != "function":
            reject_unsupported(f"{where}.type", "only 'function' tools are supported")
        function = get_required(tool, "function", dict, where)
        if not get_required(function, "name", str, f"{where}.function"):
            reject(f"{where}.function.name", "is empty")
        for key, expected in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(key) is not None:
                check_type(function[key], expected, f"{where}.function.{key}")
    return list(tools)
