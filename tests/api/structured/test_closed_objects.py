"""Closing the objects of schemas: what is closed admits nothing new, and nothing becomes impossible."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.structured.closed_objects import close_body, close_schema, close_tools
from mlxrun.config.settings import StructuredSettings
from tests.api.structured.test_response_format import allows, call, get_context, prepare

NAME = {"properties": {"name": {"type": "string"}}}
AGE = {"properties": {"age": {"type": "integer"}}}
CLOSED = {"additionalProperties": False}

CASES: dict[str, tuple[Any, Any]] = {
    "an object": ({"type": "object", **NAME}, {"type": "object", **NAME, **CLOSED}),
    "objects in objects": (
        {"properties": {"a": NAME, "b": {"items": AGE}}},
        {"properties": {"a": {**NAME, **CLOSED}, "b": {"items": {**AGE, **CLOSED}}}, **CLOSED},
    ),
    "a property called properties": (
        {"properties": {"properties": {"type": "string"}}},
        {"properties": {"properties": {"type": "string"}}, **CLOSED},
    ),
    "alternatives": (
        {"anyOf": [NAME, AGE, {"type": "null"}]},
        {"anyOf": [{**NAME, **CLOSED}, {**AGE, **CLOSED}, {"type": "null"}]},
    ),
    "a definition": (
        {"$defs": {"n": NAME}, "properties": {"a": {"$ref": "#/$defs/n"}}},
        {"$defs": {"n": {**NAME, **CLOSED}}, "properties": {"a": {"$ref": "#/$defs/n"}}, **CLOSED},
    ),
    "a lone part": (
        {"$defs": {"n": NAME}, "allOf": [{"$ref": "#/$defs/n"}]},
        {"$defs": {"n": {**NAME, **CLOSED}}, "allOf": [{"$ref": "#/$defs/n"}]},
    ),
    "requirements beside": (
        {**NAME, "anyOf": [{"required": ["name"]}, {"required": ["age"]}]},
        {**NAME, "anyOf": [{"required": ["name"]}, {"required": ["age"]}], **CLOSED},
    ),
}
OPEN: dict[str, Any] = {
    "any object": {"type": "object"},
    "no properties": {"type": "object", "properties": {}},
    "it says so": {**NAME, "additionalProperties": True},
    "others have a type": {**NAME, "additionalProperties": {"type": "integer"}},
    "patterns": {**NAME, "patternProperties": {"^x": {}}},
    "unevaluated": {**NAME, "unevaluatedProperties": {}},
    "parts": {"allOf": [NAME, AGE]},
    "a part of its own": {**NAME, "allOf": [AGE]},
    "alternatives of a part": {**NAME, "oneOf": [AGE, {}]},
    "parts of a definition": {"$defs": {"n": NAME}, "allOf": [{"$ref": "#/$defs/n"}, AGE]},
    "a definition beside": {"$defs": {"n": NAME}, "$ref": "#/$defs/n", **AGE},
    "alternatives that parts refer to": {
        "$defs": {"n": {"anyOf": [NAME, {}]}},
        "allOf": [{"$ref": "#/$defs/n"}, AGE],
    },
    "what is excluded": {"not": NAME},
    "a condition": {"if": NAME, "then": AGE},
    "dependent": {**NAME, "dependentSchemas": {"name": AGE}},
    "true": True,
    "not a schema": 5,
    "no such definition": {"$ref": "#/$defs/none/0", "allOf": [{"$ref": "elsewhere"}]},
}


@pytest.mark.parametrize("name", CASES)
def test_objects_are_closed(name: str) -> None:
    given, expected = CASES[name]
    before = copy.deepcopy(given)
    assert close_schema(given) == expected
    assert given == before


@pytest.mark.parametrize("name", OPEN)
def test_what_stays_open(name: str) -> None:
    assert close_schema(OPEN[name]) == OPEN[name]


def test_a_schema_that_is_nested_too_deeply_is_left_to_others() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert close_schema(schema) is schema


@pytest.mark.parametrize("schema", [*(case[0] for case in CASES.values()), *OPEN.values()])
def test_a_closed_schema_admits_a_part_of_the_instances(schema: Any) -> None:
    """And never none where there were some."""
    if not isinstance(schema, (dict, bool)) or "elsewhere" in json.dumps(schema):
        return
    closed = jsonschema.Draft202012Validator(close_schema(schema))
    given = jsonschema.Draft202012Validator(schema)
    instances: list[Any] = [
        {},
        {"name": "x"},
        {"age": 1},
        {"name": "x", "age": 1},
        {"z": 1},
        5,
        None,
        [{"age": 1}],
    ]
    admitted = [instance for instance in instances if given.is_valid(instance)]
    still = [instance for instance in instances if closed.is_valid(instance)]
    assert all(instance in admitted for instance in still)
    assert bool(still) == bool(admitted)


def test_where_bodies_have_schemas() -> None:
    given = {
        "messages": [],
        "guided_json": NAME,
        "structured_outputs": {"json": NAME},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NAME}},
    }
    closed = close_body(given)
    closed_name = {**NAME, **CLOSED}
    assert closed["guided_json"] == closed["structured_outputs"]["json"] == closed_name
    assert closed["response_format"]["json_schema"] == {"name": "x", "schema": closed_name}
    assert close_body({"response_format": {"type": "text"}}) == {"response_format": {"type": "text"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": NAME}}
    bare = {"type": "function", "function": {"name": "g"}}
    assert close_tools([tool, bare]) == [
        {"type": "function", "function": {"name": "f", "parameters": closed_name}},
        bare,
    ]


@pytest.mark.parametrize("close", [True, False])
def test_the_setting_closes_answers_and_calls(close: bool) -> None:
    context: ApiContext = get_context()
    context = replace(
        context, config=replace(context.config, structured=StructuredSettings(close_objects=close))
    )
    schema = {"type": "object", **NAME, "required": ["name"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = prepare(context=context, response_format=wanted).requests[0].grammar
    assert allows(grammar, '{"name":"x"}') is None
    assert (allows(grammar, '{"name":"x","z":1}') is None) is not close
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forced = prepare(context=context, tools=[tool], tool_choice="required").requests[0].grammar
    assert (allows(forced, call("f", '{"name":"x","z":1}')) is None) is not close
    anything = prepare(context=context, response_format={"type": "json_object"}).requests[0].grammar
    assert allows(anything, '{"z":1}') is None
