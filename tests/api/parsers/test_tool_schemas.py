"""Values typed by the JSON Schema of a tool."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxrun.api.parsers.tool_schemas import (
    ToolSchemas,
    ValueSchema,
    encode_bare_value,
    repair_string,
    repair_value,
)
from tests.helpers.parser_driver import make_tool

ROOT = {"$defs": {"n": {"type": "number"}, "list": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("3", {"type": "string"}, '"3"'),
        (" 3 ", {"type": "string"}, '" 3 "'),
        ("true", {"type": "string"}, '"true"'),
        ("null", {"type": "string"}, '"null"'),
        ('{"a": 1}', {"type": "string"}, '"{\\"a\\": 1}"'),
        ("3", {"type": "number"}, "3"),
        ("3.0", {"type": "number"}, "3.0"),
        ("3.10", {"type": "number"}, "3.10"),
        ("-1.5e-3", {"type": "number"}, "-1.5e-3"),
        (" 3.0\n", {"type": "number"}, "3.0"),
        ("+3", {"type": "number"}, "3"),
        (".5", {"type": "number"}, "0.5"),
        ("5.", {"type": "number"}, "5"),
        ("1_000", {"type": "number"}, '"1_000"'),
        ("nan", {"type": "number"}, '"nan"'),
        ("Infinity", {"type": "number"}, '"Infinity"'),
        ("three", {"type": "number"}, '"three"'),
        ("3.0", {"type": "integer"}, "3"),
        ("3.5", {"type": "integer"}, "3.5"),
        ("12345678901234567890", {"type": "integer"}, "12345678901234567890"),
        ("true", {"type": "boolean"}, "true"),
        ("False", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("null", {"type": "null"}, "null"),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("null", {"type": "integer"}, "null"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string", "nullable": True}, "null"),
        ("3", {"type": ["string", "integer"]}, "3"),
        ("3", {"anyOf": [{"type": "string"}, {"type": "number"}]}, "3"),
        ("x", {"anyOf": [{"type": "string"}, {"type": "number"}]}, '"x"'),
        ("x", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, '"x"'),
        ("[1, 2.0]", {"type": "array"}, "[1, 2.0]"),
        ("[1,2]", {"type": "string"}, '"[1,2]"'),
        ('["1", 2]', {"type": "array", "items": {"type": "integer"}}, "[1, 2]"),
        ("[1, 2]", {"type": "array", "items": {"type": "string"}}, '["1", "2"]'),
        ("['a', None, (1,)]", {"type": "array"}, '["a", null, [1]]'),
        ('"[1, 2]"', {"type": "array"}, "[1, 2]"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("a, b", {"type": "array"}, '"a, b"'),
        ('{"a": "1"}', {"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ("{'a': True}", {"type": "object"}, '{"a": true}'),
        ('{"a": 1}', {"type": "array"}, '"{\\"a\\": 1}"'),
        ("[NaN]", {"type": "array"}, '"[NaN]"'),
        (r"['\d+', 'a']", {"type": "array"}, r'["\\d+", "a"]'),  # an escape of which Python would warn
        ("[" * 5000, {"type": "array"}, json.dumps("[" * 5000)),
        ("fast", {"enum": ["fast", "slow"]}, '"fast"'),
        ("\nfast\n", {"enum": ["fast", "slow"]}, '"fast"'),
        ("2", {"enum": [1, 2, "2x"]}, "2"),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ("True", {"enum": [True, None]}, "true"),
        ("other", {"enum": ["fast", "slow"]}, '"other"'),
        ("7", {"const": 7}, "7"),
        ("3.0", {"$ref": "#/$defs/n"}, "3.0"),
        ('["1.0"]', {"$ref": "#/$defs/list"}, "[1.0]"),
        ("x", {"$ref": "#/$defs/none"}, '"x"'),
        ("x", {"$ref": "https://example.org/x"}, '"x"'),
        ("3", {}, '"3"'),
        ("[3]", {}, "[3]"),
        ('{"a": 3.0}', {}, '{"a": 3.0}'),
        ("(3)", {}, '"(3)"'),
        ("", {"type": "integer"}, '""'),
        ("", {}, '""'),
    ],
)
def test_encode_bare_value(text: str, schema: Any, expected: str) -> None:
    """Numbers stay as written, strings stay strings, arrays and objects are parsed once."""
    assert encode_bare_value(text, ValueSchema(schema, ROOT)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", "3"), ("3.0", "3.0"), ("true", "true"), ("null", "null"), ("x", '"x"'), ("+3", '"+3"')],
)
def test_encode_bare_value_without_a_schema(text: str, expected: str) -> None:
    """Formats whose templates write all but strings as JSON."""
    assert encode_bare_value(text, ValueSchema({}), guess=True) == expected


def test_repair_string() -> None:
    """Where the schema excludes strings, a string becomes what it says; else it stays a string."""
    assert repair_string("[1]", ValueSchema({"type": "array"})) == "[1]"
    assert repair_string("[1]", ValueSchema({"type": ["array", "string"]})) == '"[1]"'
    assert repair_string("[1]", ValueSchema({})) == '"[1]"'
    schema = ValueSchema(
        {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    )
    assert repair_value([{"n": "1"}, {"n": 2}, {"m": "3"}], schema) == [{"n": 1}, {"n": 2}, {"m": "3"}]


def test_a_lone_surrogate_is_valid_utf8() -> None:
    assert encode_bare_value('["\\ud800"]', ValueSchema({"type": "array"})) == '["\\ud800"]'


def test_tools_that_are_no_functions_are_left_out() -> None:
    tools = ToolSchemas(
        [{"type": "web_search"}, {"function": {"name": 3}}, make_tool("a", {}), {"name": "b"}]
    )
    assert tools.names == {"a", "b"}
    assert not ToolSchemas(None)
