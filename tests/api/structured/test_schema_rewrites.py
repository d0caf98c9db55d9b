"""Closing the objects of schemas: what is closed admits nothing new, and nothing becomes impossible."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from benchmarks.tiny.byte_tokenizer import EOS
from mlxrun.api.prepared import ApiContext
from mlxrun.api.structured import grammar, schema_encoding
from mlxrun.api.structured.grammar import CallPattern, compile_calls, compile_grammar
from mlxrun.api.structured.grammar_checks import ANNOTATIONS
from mlxrun.api.structured.schema_rewrites import (
    LIMIT,
    SHARED,
    bound_integers,
    close_body,
    close_schema,
    close_tools,
)
from mlxrun.config.settings import StructuredSettings
from tests.api.structured.test_grammar import model as model  # a fixture
from tests.api.structured.test_response_format import allows, call, get_context, prepare
from tests.helpers.schema_cases import PERSON

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


INTEGER = {"type": "integer"}
BOTH = {"type": "integer", "minimum": -LIMIT, "maximum": LIMIT}
SAFE = 2**53 - 1  # the largest integer that every JSON parser reads exactly
SNOWFLAKE = 1_975_332_716_112_179_200  # an id of 64 bits, as many APIs have them
TOO_LONG = "9" * 20
STOP = frozenset({EOS})


def find_bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what becomes of a schema of integers within another one: the shared schema."""
    made = bound_integers({"properties": {"a": schema}})
    assert list(made["properties"]["a"]) == ["$ref"]
    found: dict[str, Any] = made[SHARED][made["properties"]["a"]["$ref"].rpartition("/")[2]]
    return found


BOUNDED: dict[str, dict[str, Any]] = {
    "plain": INTEGER,
    "described": {**INTEGER, "description": "how many", "default": 3},
    "a union of types": {"type": ["integer", "null"]},
    "a lower bound only": {**INTEGER, "minimum": 0},
    "an open lower bound": {**INTEGER, "exclusiveMinimum": 0},
    "the flag of draft 4": {**INTEGER, "minimum": 0, "exclusiveMinimum": True},
    "multiples": {**INTEGER, "multipleOf": 5},
}
UNTOUCHED: dict[str, dict[str, Any]] = {
    "bounds of its own": {**INTEGER, "minimum": 0, "maximum": 130},
    "a huge lower bound": {**INTEGER, "minimum": 10**18 * 9},
    "listed values": {**INTEGER, "enum": [1, 10**30]},
    "one value": {**INTEGER, "const": 10**30},
    "a reference beside": {**INTEGER, "$ref": "#/$defs/huge"},
    "parts": {**INTEGER, "allOf": [{"minimum": 10**18}]},
    "numbers": {"type": "number"},
    "numbers and integers": {"type": ["number", "integer"]},
    "strings": {"type": "string"},
    "negation": {"not": INTEGER},
    "exactly one": {"oneOf": [INTEGER, {"type": "null"}]},
}


@pytest.mark.parametrize("schema", BOUNDED.values(), ids=BOUNDED)
def test_an_integer_without_a_bound_gets_one(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert find_bounded(schema) == {key: before[key] for key in before if key not in ANNOTATIONS} | {
        "maximum": LIMIT,
        **({} if {"minimum", "exclusiveMinimum"} & before.keys() else {"minimum": -LIMIT}),
    }
    assert schema == before


@pytest.mark.parametrize("schema", UNTOUCHED.values(), ids=UNTOUCHED)
def test_a_schema_that_says_more_stays_as_it_is(schema: dict[str, Any]) -> None:
    wrapped = {"properties": {"a": schema}, "$defs": {"huge": {"minimum": 10**18}}}
    assert bound_integers(wrapped) == wrapped


def test_equal_integers_share_one_schema() -> None:
    """Each schema of integers costs a part of llguidance's limits: 400 of them, written out, are too many."""
    schema = {"type": "object", "properties": {f"p{i}": dict(INTEGER) for i in range(400)}}
    made = bound_integers(schema)
    assert made[SHARED] == {"0": BOTH}
    assert {json.dumps(each) for each in made["properties"].values()} == {'{"$ref": "#/' + SHARED + '/0"}'}


def test_different_integers_have_different_schemas() -> None:
    factors = [2, 3, 2, 5, 3]
    made = bound_integers(
        {"properties": {f"p{i}": {**INTEGER, "multipleOf": n} for i, n in enumerate(factors)}}
    )
    found = [made[SHARED][each["$ref"].rpartition("/")[2]] for each in made["properties"].values()]
    assert [each["multipleOf"] for each in found] == factors and list(made[SHARED]) == ["0", "1", "2"]


def test_nothing_is_shared_where_references_lead_elsewhere() -> None:
    schema = {"properties": {"a": {"$id": "https://example.com/a", "properties": {"b": INTEGER}}}}
    made = bound_integers(schema)
    assert SHARED not in made and made["properties"]["a"]["properties"]["b"] == BOTH
    assert bound_integers(INTEGER) == BOTH
    assert bound_integers(PERSON) == PERSON


def complete(made: Any, text: str) -> bool:
    """Whether the grammar allows the whole text, and an end behind it."""
    row = made.start((), STOP)
    for byte in text.encode():
        if not row.mask()[byte // 8] >> byte % 8 & 1:
            return False
        row.accept(byte)
    return bool(row.mask()[EOS // 8] >> EOS % 8 & 1) or row.done


NUMBERS = [0.5, -1.5, 1e300, 6.62607015e-34, 5e-324, 0.1 + 0.2, -123456789.000001, 10**18]


@pytest.mark.parametrize("field", [{}, {"minimum": 0.25}])
def test_every_number_that_json_writes_is_allowed_and_its_digits_end(
    model: Any, field: dict[str, Any]
) -> None:
    """With bounds too, which leave fractions endless."""
    made = compile_grammar("json_schema", {"type": "number", **field}, model, param="field")
    for value in NUMBERS:
        text = json.dumps(value)
        if not field or ("e" not in text and value >= 0.25):
            assert complete(made, text), text
    assert count_ones(made, "0.3" if field else "-0.") < 40
    if not field:
        assert count_ones(made, "") < 40 and count_ones(made, "1.5e") == count_ones(made, "1.5e-") == 3


def count_ones(made: Any, begin: str) -> int:
    """How many ones a row writes behind a beginning if it writes them wherever they may come."""
    row = made.start((), STOP)
    for byte in begin.encode():
        row.accept(byte)
    for count in range(100):
        if not row.fork().mask()[ord("1") // 8] >> ord("1") % 8 & 1:
            return count
        row.accept(ord("1"))
    return 100


def test_digits_in_texts_are_not_counted(model: Any) -> None:
    """Nor where nothing else fits."""
    text = compile_grammar("json_schema", {"type": "string"}, model, param="field")
    for begin in ('"0.', '"a\\"0.', '"\\\\ 0.'):
        assert count_ones(text, begin) == 100
    schema = {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.6}
    made = compile_grammar("json_schema", schema, model, param="field")
    assert complete(made, "0.5" + "0" * 40 + "1") and not complete(made, "0.5" + "0" * 20 + "1" * 20)


def test_numbers_of_calls_end_and_free_text_is_left_alone(model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    pattern = CallPattern('{"name": "f", "arguments": ', schema, "}", "tools")
    forced = compile_calls([pattern], model, param="tools")
    assert count_ones(forced, '{"name": "f", "arguments": {"a":0.') < 40
    free = compile_calls([pattern], model, param="tools", opener='{"name"')
    assert count_ones(free, 'pi is "3.') == 100


VALUES = [0, -1, 7, SAFE, -SAFE, SNOWFLAKE, LIMIT, -LIMIT, 10**18]


@pytest.mark.parametrize("field", [{}, {"minimum": 0}, {"description": "an id"}])
def test_every_integer_that_people_use_is_allowed(model: Any, field: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {**INTEGER, **field}, "b": {"anyOf": [INTEGER, {"type": "null"}]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    made = compile_grammar("json_schema", schema, model, param="field")
    for value in VALUES:
        assert complete(made, json.dumps({"a": value, "b": value}, separators=(",", ":"))) is (
            value >= field.get("minimum", value)
        )
    assert complete(made, '{"a":1,"b":null}')
    assert not complete(made, f'{{"a":{TOO_LONG},"b":1}}')
    assert not complete(made, f'{{"a":1,"b":-{TOO_LONG}}}')


def test_an_answer_of_digits_ends(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that writes 9 wherever it may comes to an end; without the bounds it is a later one."""

    def count_digits() -> int:
        schema_encoding.encoded_schemas.clear()
        grammar.compiled_grammars.clear()
        row = compile_grammar("json_schema", INTEGER, model, param="field").start((), STOP)
        nine = ord("9")
        for count in range(100):
            if not row.mask()[nine // 8] >> nine % 8 & 1:
                return count
            row.accept(nine)
        return 100

    assert count_digits() == 18
    monkeypatch.setattr(schema_encoding, "bound_integers", dict)
    assert count_digits() == 25, "as of any number"
    schema_encoding.encoded_schemas.clear()
    grammar.compiled_grammars.clear()


def test_a_schema_of_many_integers_compiles(model: Any) -> None:
    names = [f"p{i}" for i in range(400)]
    for integer in (INTEGER, {"type": "integer", "minimum": 0}):
        schema = {"type": "object", "properties": dict.fromkeys(names, integer), "required": names}
        compile_grammar("json_schema", schema | {"additionalProperties": False}, model, param="field")
