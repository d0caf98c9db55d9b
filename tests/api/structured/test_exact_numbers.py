"""A schema whose numbers doubles cannot hold is refused; the others are enforced exactly."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.structured.exact_numbers import check_numbers
from mlxrun.api.structured.grammar import CallPattern, compile_calls, compile_grammar
from mlxrun.core.errors import RequestError
from tests.api.structured.test_grammar import model as model  # a fixture
from tests.api.structured.test_schema_rewrites import complete

TOP = 2**53
INTEGER = {"type": "integer"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"const": TOP + 1}, "const"),
    ({"enum": [1, TOP + 1]}, "enum[1]"),
    ({"enum": [-TOP - 1]}, "enum[0]"),
    ({"properties": {"a": {"enum": [[{"b": TOP + 1}]]}}}, "properties.a.enum[0][0].b"),
    ({**INTEGER, "minimum": TOP + 1}, "minimum"),
    ({**INTEGER, "maximum": TOP + 1}, "maximum"),
    ({**INTEGER, "exclusiveMinimum": TOP}, "exclusiveMinimum"),
    ({**INTEGER, "exclusiveMaximum": -TOP}, "exclusiveMaximum"),
    ({**INTEGER, "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum"),
    ({**INTEGER, "minimum": TOP, "exclusiveMinimum": True, "$schema": "x"}, "minimum"),
    ({"type": "number", "maximum": 2**60}, "maximum"),
    ({"const": 2**64 - 1}, "const"),
    ({"$ref": "#/x/a", "x": {"a": {"const": -(2**63)}}}, "x.a.const"),  # these ended the process
    ({**INTEGER, "const": -1e20}, "const"),
    ({**INTEGER, "minimum": -1e22, "maximum": -1e21}, "maximum"),
    ({"const": 10**400}, "const"),
]
EXACT: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({"const": TOP}, [TOP], [TOP + 1]),
    ({"enum": [2**62, -(2**60)]}, [2**62, -(2**60)], [2**62 + 1]),
    ({**INTEGER, "minimum": TOP + 2}, [TOP + 2, TOP + 3], [TOP + 1]),
    ({**INTEGER, "exclusiveMaximum": TOP}, [TOP - 1], [TOP]),
    ({**INTEGER, "exclusiveMinimum": -TOP}, [-TOP + 1], [-TOP]),
    ({**INTEGER, "minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [2**63]),
    ({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [2**64]),
    ({**INTEGER, "exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
]


@pytest.mark.parametrize(("schema", "place"), REFUSED)
def test_a_number_that_would_become_another_is_named(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match="cannot be enforced exactly") as caught:
        check_numbers(schema, "field")
    assert caught.value.param == f"field.{place}" and len(str(caught.value)) < 200


@pytest.mark.parametrize(("schema", "allowed", "others"), EXACT)
def test_other_large_integers_are_enforced(
    model: Any, schema: dict[str, Any], allowed: list[int], others: list[int]
) -> None:
    made = compile_grammar("json_schema", schema, model, param="field")
    assert [value for value in allowed + others if complete(made, str(value))] == allowed


def test_schemas_of_answers_and_of_calls_are_checked(model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"const": TOP + 1}}}
    with pytest.raises(RequestError, match=r"field\.properties\.a\.const: 9007199254740993 cannot"):
        compile_grammar("json_schema", schema, model, param="field", strict=False)
    with pytest.raises(RequestError, match=r"tools\[0\]\.properties\.a\.const"):
        compile_calls([CallPattern("", schema, "", "tools[0]")], model, param="tools")


def test_numbers_that_are_no_values_pass() -> None:
    check_numbers({"default": TOP + 1, "examples": [TOP + 1], "const": 0.1, "maximum": 1.5}, "field")
