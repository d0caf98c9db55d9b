"""What is checked of a JSON schema before llguidance sees it."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import _keywords

from mlxrun.api.structured.grammar_checks import (
    MAX_SCHEMAS,
    check_schema,
    check_schema_count,
    iterate_schemas,
)
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
    ({"$schema": ["draft"]}, "field.$schema", "expected string, got array"),
    ({"required": ["a", 1]}, "field.required[1]", "1 is not of type 'string'"),
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


@pytest.mark.parametrize(
    "inner",
    [
        {"properties": {f"p{i}": {} for i in range(MAX_SCHEMAS)}},
        {"anyOf": [True] * MAX_SCHEMAS},
        {"items": {"$defs": {"a": {"prefixItems": [{"not": {}}] * (MAX_SCHEMAS // 2)}}}},
    ],
)
def test_the_number_of_schemas_is_bounded(inner: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="field: has more than 10000 schemas") as caught:
        check_schema_count([inner], "field")
    assert caught.value.code == "invalid_grammar"


def test_all_schemas_of_a_grammar_count_and_nothing_else() -> None:
    half = {"properties": {f"p{i}": {} for i in range(MAX_SCHEMAS // 2 - 1)}, "enum": [{}] * MAX_SCHEMAS}
    check_schema_count([half, half], "field")
    with pytest.raises(RequestError, match="schemas"):
        check_schema_count([half, half, True], "field")


MIXED = [i if i % 2 else f"a{i}" for i in range(100)]


@pytest.mark.parametrize("draft", ["draft-03/schema#", "draft-04/schema#", "draft-07/schema#", None])
@pytest.mark.parametrize("schema", [{"type": MIXED}, {"enum": MIXED}, {"dependencies": {"a": MIXED}}])
def test_values_are_not_compared_each_with_each(
    schema: dict[str, Any], draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(_keywords, "uniq", lambda values: compared.append(values) or True)
    if draft is not None:
        schema = {"$schema": f"http://json-schema.org/{draft}", **schema}
    if "enum" in schema:
        check_schema(schema, "field", strict=True)
    else:
        with pytest.raises(RequestError, match="is not a valid JSON Schema"):
            check_schema(schema, "field", strict=True)
    assert compared == []
