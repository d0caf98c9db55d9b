"""Checks request bodies: a field is honoured, or accepted without effect and logged, or refused by name.

A field is accepted without effect if it does not change the content of an answer. Such fields are hints,
labels, storage, billing, and neutral values of unsupported features. An unknown field is an error with a
suggestion. Rules that a JSON schema cannot express are checked where the field is used. Each surface declares
its fields in its `fields.py`; tools/field_reference.py documents them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, cast

from jsonschema import Draft202012Validator, ValidationError

from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.core.field_errors import (
    UNKNOWN,
    get_json_type,
    quote,
    reject,
    reject_unknown,
    reject_unsupported,
    shorten,
    suggest,
)

Schema = dict[str, Any]
Accepted = dict[str, tuple[Schema, str]]  # by field: the values that have no effect, and the reason

ANY: Schema = {}
BOOL: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
LIST: Schema = {"type": "array"}
OBJECT: Schema = {"type": "object"}
TOOLS: Schema = {"type": "array", "maxItems": 1024}
METADATA: Schema = {  # of objects that OpenAI's API stores
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class BodySchema:
    """The body of one endpoint.

    All are by the field's name. `honoured`: the JSON schema. `harmless`: the schema of the values that do not
    change the answer, and the reason. `refused`: the reason why the field is always refused. `elsewhere`: the
    URL of the endpoint that has the field. `ignored`: as `harmless`, but `server.strict_fields` refuses the
    field; a name may be `field.inner`.
    """

    honoured: Mapping[str, Schema]
    harmless: Mapping[str, tuple[Schema, str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, tuple[Schema, str]] = field(default_factory=dict)

    @cached_property
    def validator(self) -> Draft202012Validator:
        return Draft202012Validator({"properties": dict(self.honoured)})

    @property
    def schema(self) -> Schema:
        """The whole body as one JSON schema, for /openapi.json."""
        fields = {name: schema for name, (schema, _) in {**self.harmless, **self.ignored}.items()}
        properties = {name: schema for name, schema in fields.items() if "." not in name} | dict(
            self.honoured
        )
        for name in fields.keys() - properties.keys():
            parent, _, inner = name.partition(".")
            known = properties[parent].get("properties", {})
            properties[parent] = {**properties[parent], "properties": {**known, inner: fields[name]}}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    def check(self, body: Any, *, strict: bool = False) -> dict[str, Any]:
        """Return the given fields; null counts as not given, also in fields that are objects of known fields.
        RequestError if a type or a range is wrong.

        An integer that was written as 2.0 becomes 2. `strict`: refuse the fields of `ignored`."""
        if not isinstance(body, dict):
            reject("body", f"expected an object, got {get_json_type(body)}", code="invalid_type")
        given = {
            key: _drop_nulls(value) if isinstance(value, dict) and self._has_fields(key) else value
            for key, value in _drop_nulls(body).items()
        }
        try:
            if not strict:
                given = self._drop_ignored(given)
            for key, value in given.items():
                self._check_known(key, value, strict)
                _check_count(key, value, self.honoured.get(key, {}))
            _check_finite(given)
            errors = list(self.validator.iter_errors(given))
        except RecursionError:
            reject("body", "is nested too deeply")
        if errors:
            raise_schema_error(min(errors, key=lambda error: format_path(error.absolute_path)))
        return {key: convert_integers(value, self.honoured.get(key, ANY)) for key, value in given.items()}

    def _drop_ignored(self, given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """The fields without those that are accepted and have no effect, which are logged."""
        kept = {}
        for key, value in given.items():
            path = f"{prefix}{key}"
            if path in self.ignored and _is_valid(value, self.ignored[path][0]):
                log_ignored(path, self.ignored[path][1])
            elif prefix and path in self.ignored:
                schema, reason = self.ignored[path]
                reject_unsupported(path, f"only {describe_values(schema)} is supported ({reason})")
            elif path in self._parents and isinstance(value, dict):
                kept[key] = self._drop_ignored(value, f"{path}.")
            else:
                kept[key] = value
        return kept

    def _has_fields(self, key: str) -> bool:
        return key in self._parents or "properties" in self.honoured.get(key, ANY)

    @cached_property
    def _parents(self) -> frozenset[str]:
        """Fields that have fields among `ignored`."""
        return frozenset(name.rpartition(".")[0] for name in self.ignored)

    def _check_known(self, key: str, value: Any, strict: bool) -> None:
        if key in self.honoured:
            return
        if key in self.refused:
            reject_unsupported(key, self.refused[key])
        if key in self.harmless:
            schema, reason = self.harmless[key]
            if not _is_valid(value, schema):
                reject_unsupported(key, f"only {describe_values(schema)} is supported ({reason})")
            log_ignored(key, reason)
            return
        if key in self.elsewhere:
            reject(key, f"belongs to {self.elsewhere[key]}", code=UNKNOWN)
        if key in self.ignored and not strict:
            schema, reason = self.ignored[key]
            reject_unsupported(key, f"only {describe_values(schema)} is supported ({reason})")
        reject_unknown(key, [*self.honoured, *self.harmless, *([] if strict else self.ignored)])


def _drop_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _is_valid(value: Any, schema: Schema) -> bool:
    return bool(Draft202012Validator(schema).is_valid(value))


def convert_integers(value: Any, schema: Schema) -> Any:
    """Return a value that passed its schema. Where the schema has an integer, 2.0 becomes 2."""
    kinds = schema.get("type", ())
    if type(value) is float and "integer" in kinds and "number" not in kinds:
        return int(value)
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties") or ANY
        if fields or others:
            return {key: convert_integers(item, fields.get(key, others)) for key, item in value.items()}
    elif isinstance(value, list) and schema.get("items"):
        return [convert_integers(item, schema["items"]) for item in value]
    return value


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
    """Raise the RequestError for a schema's error; `prefix` is the path of the value that was checked."""
    param = format_path(error.absolute_path, prefix)
    if error.validator == "type":
        expected: Any = error.validator_value
        names = expected if isinstance(expected, str) else " or ".join(expected)
        reject(param, f"expected {names}, got {get_json_type(error.instance)}", code="invalid_type")
    if error.validator == "additionalProperties" and error.validator_value is False:
        schema, instance = cast(Any, error.schema), cast(Any, error.instance)
        extra = next(key for key in instance if key not in schema["properties"])
        reject(
            f"{param}.{shorten(extra)}", f"unknown field{suggest(extra, schema['properties'])}", code=UNKNOWN
        )
    if "propertyNames" in error.absolute_schema_path and error.validator == "pattern":
        reject(param, f"{quote(error.instance)} is not a token id, such as '1234'", code="invalid_value")
    if error.validator == "enum":
        allowed: Any = error.validator_value
        options = ", ".join(json.dumps(option) for option in allowed if option is not None)
        value = error.instance
        shown = json.dumps(shorten(value)) if isinstance(value, str) else f"this {get_json_type(value)}"
        reject(param, f"{shown} is not one of {options}", code="invalid_value")
    reject(param, shorten(error.message), code="invalid_value")


def describe_values(schema: Schema) -> str:
    """Say in words which values a schema accepts. It has one type, constant or enumeration."""
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kinds = schema.get("type", "any value")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def format_path(parts: Iterable[Any], prefix: str = "") -> str:
    """Format jsonschema's list of keys and indices as `a.b[3]`."""
    text = prefix
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
