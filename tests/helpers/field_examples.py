"""Values that a schema of a field accepts, for tests that go through the tables of fields."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

from mlxrun.api.body_schema import Schema

_OF_TYPE: dict[str, list[Any]] = {
    "boolean": [True, False],
    "integer": [1, 7],
    "number": [0.5, 3],
    "string": ["low", "x y"],
    "array": [[], ["x"]],
    "object": [{}, {"x": "y"}],
}


def list_examples(schema: Schema) -> list[Any]:
    """Some values that the schema accepts: all of an enumeration, else a few of each of its types."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    kinds = schema.get("type", list(_OF_TYPE))
    values = [value for kind in ([kinds] if isinstance(kinds, str) else kinds) for value in _OF_TYPE[kind]]
    check = Draft202012Validator(schema)
    return [value for value in values if check.is_valid(value)] or _build_objects(schema)


def _build_objects(schema: Schema) -> list[Any]:
    properties = schema.get("properties", {})
    return [{name: list_examples(properties[name])[0] for name in schema.get("required", properties)}]


def set_field(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with a field, which may be `field.inner`."""
    name, _, inner = path.partition(".")
    return {**body, name: {**body.get(name, {}), inner: value} if inner else value}
