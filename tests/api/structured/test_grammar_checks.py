"""What is checked of a JSON schema before llguidance sees it."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.structured.grammar_checks import check_schema, iterate_schemas
from mlxrun.core.errors import RequestError

REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "strin"}, "field.type", "Schema: 'strin' is not one of string, number,"),
    ({"properties": {"a": {"minLength": -1}}}, "field.properties.a.minLength", "less than"),
    ({"minimun": 1}, "field.minimun", "did you mean 'minimum'"),
    ({"anyOf": [{}, {"lenght": 1}]}, "field.anyOf[1].lenght", "is not a keyword"),
    ({"$defs": {"a": {"typ": "null"}}}, "field.$defs.a.typ", "is not a keyword"),
    ({"exclusiveMinimum": 2, "maximum": 2.5}, "field.exclusiveMinimum", "cannot be enforced"),
    (
        {"allOf": [{"exclusiveMaximum": 2}, {"minimum": 1.5}]},
        "field.exclusiveMaximum",
        "cannot",
    ),
    ({"minProperties": 2}, "field.minProperties", "cannot be enforced"),
]
LENIENT = ("field.minimun", "field.anyOf[1].lenght", "field.$defs.a.typ")  # unless the schema is strict


@pytest.mark.parametrize(("schema", "param", "reason"), REFUSED)
def test_errors_name_the_keyword_and_the_reason(schema: Any, param: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        check_schema(schema, "field", strict=True)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ") and len(str(caught.value)) < 600
    if param in LENIENT:
        check_schema(schema, "field", strict=False)
    else:
        with pytest.raises(RequestError, match=reason):
            check_schema(schema, "field", strict=False)


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        check_schema(schema, "field", strict=True)


def test_names_of_properties_are_no_keywords() -> None:
    fine = {
        "properties": {"minimun": {"const": {"typ": 1}}},
        "enum": [{"lenght": 1}],
        "x-order": 1,
        "default": {"q": 1},
    }
    check_schema(fine, "field", strict=True)


def test_every_schema_within_a_schema_is_found() -> None:
    schema = {
        "properties": {"properties": {"items": [{}, True]}, "a": {"not": {"const": {"items": {}}}}},
        "$defs": {"x": {"anyOf": [{}, {}]}},
        "additionalProperties": False,
        "enum": [{"properties": {}}],
    }
    assert [path for path, _ in iterate_schemas(schema, "s")] == [
        "s",
        "s.properties.properties",
        "s.properties.properties.items[0]",
        "s.properties.a",
        "s.properties.a.not",
        "s.$defs.x",
        "s.$defs.x.anyOf[0]",
        "s.$defs.x.anyOf[1]",
    ]
