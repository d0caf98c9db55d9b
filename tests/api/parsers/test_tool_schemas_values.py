"""What a JSON Schema says of a value, with references, unions and the words that models' tools use."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.parsers.tool_schemas import ValueSchema

ROOT = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/text"},
        "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/text"}},
    },
    "additionalProperties": {"type": "boolean"},
    "$defs": {"text": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "str"}, {"string"}),
        ({"type": "List"}, {"array"}),
        ({"anyOf": [{"type": "number"}, {"oneOf": [{"type": "string"}]}]}, {"number", "string"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"$ref": "#/nowhere"}, set()),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/anyOf/0"}]}, {"number"}),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/anyOf/²"}, {"$ref": "#/anyOf/7"}]}, {"number"}),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/anyOf/" + "9" * 5000}]}, {"number"}),
        ({"$ref": 3}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    assert ValueSchema(schema).types == types


def test_members_and_items() -> None:
    schema = ValueSchema(ROOT)
    assert schema.keys == ("a", "b", "c")
    assert schema.get_member("a").types == {"string"}
    assert schema.get_member("b").types == {"integer", "null"}
    assert schema.get_member("c").get_items().types == {"string"}
    assert schema.get_member("other").types == {"boolean"}
    assert ValueSchema({}).get_member("a").types == set() == ValueSchema({}).get_items().types


def test_an_endless_reference_ends() -> None:
    schema = ValueSchema({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}})
    assert schema.types == set()


def test_references_that_multiply() -> None:
    """Seven levels that each name the next one thirty times are thirty to the power of seven ways down."""
    levels = {
        f"l{at}": {"anyOf": [{"$ref": f"#/$defs/l{at + 1}"} for _ in range(30)], "properties": {f"p{at}": {}}}
        for at in range(7)
    }
    last = {"type": "integer", "properties": {"z": {"type": "string"}}}
    schema = ValueSchema({"$ref": "#/$defs/l0", "$defs": {**levels, "l7": last}})
    assert schema.types == {"object", "integer"}
    assert schema.keys == (*(f"p{at}" for at in range(7)), "z")
    assert schema.get_member("z").types == {"string"}
    assert ValueSchema({"type": "string", "anyOf": [{"$ref": "#"}] * 30}).types == {"string"}


@pytest.mark.parametrize(
    ("schema", "text_only", "excludes"),
    [
        ({"type": "string"}, True, False),
        ({"type": ["string", "null"]}, False, False),
        ({"type": "integer"}, False, True),
        ({"enum": ["a", "b"]}, True, False),
        ({"enum": ["a", 1]}, False, False),
        ({"enum": [1, 2]}, False, True),
        ({}, False, False),
    ],
)
def test_whether_a_value_is_text(schema: Any, text_only: bool, excludes: bool) -> None:
    found = ValueSchema(schema)
    assert (found.is_text_only, found.excludes_text) == (text_only, excludes)
