"""JSON in answers, and JSON Schemas."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.jobs.scoring import answer_values
from mlxrun.jobs.scoring.answer_values import MISSING, check_schema, find_json, find_schema_problem

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"name": "Ann", "age": 3}, None),
        ({"name": "ann"}, "$.name: 'ann' does not match '^[A-Z]'"),
        ({"age": 3}, "$: 'name' is a required property"),
        ({"name": "Ann", "age": -1}, "$.age: -1 is less than the minimum of 0"),
        ([], "$: [] is not of type 'object'"),
    ],
)
def test_values_and_schemas(value: Any, problem: str | None) -> None:
    check_schema(PERSON)
    assert find_schema_problem(PERSON, value) == problem


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("x", "must be a JSON Schema"),
        ({"type": "objekt"}, "is not a valid JSON Schema: "),
        ({"properties": {"a": {"pattern": "("}}}, "is not a"),
        ({"anyOf": [{"patternProperties": {"a": {}}}]}, "patternProperties, which is not supported"),
    ],
)
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_schema(schema)


def test_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="refers to 'http://127.0.0.1:9/x.json', which is not in it"):
        find_schema_problem({"$ref": "http://127.0.0.1:9/x.json"}, {})
    assert find_schema_problem({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, "x") is None
    with pytest.raises(ValueError, match="without end"):
        find_schema_problem({"$ref": "#"}, {})


def test_a_slow_pattern_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_values, "SEARCH_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        find_schema_problem({"pattern": "^(a|aa)+$"}, "a" * 200 + "!")


def test_finding_values() -> None:
    assert find_json('x null {"a": 1}', containers_only=False) is None
    assert find_json('x null {"a": 1}', containers_only=True) == {"a": 1}
    assert find_json("x", containers_only=False) is MISSING
