"""JSON Schemas to try: written by hand, random ones, and those that the jsonschema package ships.

All are valid; the caller counts those that cannot be enforced.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib import resources
from typing import Any

Schema = dict[str, Any]

PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HANDWRITTEN: list[Schema] = [
    PERSON,
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 10}, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "x"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}, {"type": "null"}]},
    {"type": ["string", "integer", "null"], "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"const": {"a": [1, {"b": None}], "c": '\u00e9\n"\\'}},
    {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    },
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
]


def make_random(seed: int) -> Schema:
    """Make a random schema, three levels deep at most, which depends on the seed only."""
    return _schema(random.Random(seed), 3)


def _schema(rng: random.Random, depth: int) -> Schema:
    simple: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _word]
    nested: list[Callable[[random.Random, int], Schema]] = [_object, _object, _array, _tuple, _any_of]
    if depth > 0 and rng.random() < 0.3 + 0.2 * depth:
        return rng.choice(nested)(rng, depth - 1)
    return rng.choice(simple)(rng)


def _string(rng: random.Random) -> Schema:
    low = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-f]+$", "^(yes|no)$", "^\\d{4}-\\d\\d$", "^a[^z]*z$"]),
            },
            {"type": "string", "format": rng.choice(["date", "time", "date-time", "email", "ipv4", "uuid"])},
        ]
    )


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "integer", "exclusiveMinimum": low},
            {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 500},
        ]
    )


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-20, 20)
    return rng.choice(
        [
            {"type": "number"},
            {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 9)},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1.5},
        ]
    )


def _word(rng: random.Random) -> Schema:
    values: list[Any] = ["red", "blue", 1, 2.5, None, True, [1], {"k": "v"}]
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(values, 3)},
            {"const": rng.choice(values)},
            {"type": ["integer", "null"]},
        ]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "a b", 'x"y', "caf\u00e9", "n", "items", "type"], rng.randint(1, 4))
    made: Schema = {"type": "object", "properties": {name: _schema(rng, depth) for name in names}}
    made["required"] = [name for name in names if rng.random() < 0.7]
    made["additionalProperties"] = rng.choice([False, False, {"type": "integer"}])
    return made


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth),
        "minItems": low,
        "maxItems": low + rng.randint(0, 3),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def load_shipped() -> list[Schema]:
    """Load the metaschemas of all drafts, and the schemas of a petstore's API."""
    drafts = resources.files("jsonschema_specifications") / "schemas"
    found = [json.loads((folder / "metaschema.json").read_text()) for folder in drafts.iterdir()]
    petstore = resources.files("jsonschema") / "benchmarks" / "issue232" / "issue.json"
    return [*found, *(case["schema"] for case in json.loads(petstore.read_text()))]
