"""Rewrites JSON schemas: closes their objects, and bounds integers that have no bound of their own.

A closed object has no properties but those that are named. Only objects are closed that have `properties` and
say nothing about others. Several schemas may name properties of one object, with `allOf`, `$ref` or
alternatives beside `properties`. Closing one of them would forbid the properties of the others, so they stay
open.

A grammar of unbounded integers matches any number of digits, and a small model may write digits until
`max_tokens`. LIMIT is a little less than 2**63, which llguidance cannot enforce on both sides. Each integer
schema costs llguidance a part of its limits. So equal ones become references to one schema.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxrun.api.parsers.tool_schemas import resolve_reference
from mlxrun.api.structured.grammar_checks import ANNOTATIONS, HIGH, LOW, is_number, iterate_schemas

Schema = dict[str, Any]

# Keywords whose schemas apply to the same instance as the schema that has them.
_LISTS_IN_PLACE = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("not", "if", "then", "else")
_NAMED_IN_PLACE = ("dependentSchemas", "dependencies")
# Keywords that say what other properties may be.
_OPENERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def close_body(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a checked chat body whose response format has closed objects."""
    closed = _close_key(given, "guided_json")
    outputs, wanted = given.get("structured_outputs"), given.get("response_format")
    if isinstance(outputs, dict):
        closed["structured_outputs"] = _close_key(outputs, "json")
    if isinstance(wanted, dict) and isinstance(wanted.get("json_schema"), dict):
        closed["response_format"] = {**wanted, "json_schema": _close_key(wanted["json_schema"], "schema")}
    return closed


def close_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of function tools whose arguments are closed objects."""
    return [{**tool, "function": _close_key(tool["function"], "parameters")} for tool in tools]


def _close_key(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**value, key: close_schema(value[key])} if key in value else dict(value)


def close_schema(schema: Any) -> Any:
    """Return a copy of the schema with closed objects. A value that is no schema is returned as it is:
    compile_grammar refuses it."""
    try:
        closed = copy.deepcopy(schema)
        schemas = [each for _, each in iterate_schemas(closed, "")]
    except RecursionError:
        return schema
    shared = {id(part) for each in schemas for part in _find_shared(each, closed)}
    for each in schemas:
        if id(each) not in shared and _has_properties(each) and not any(key in each for key in _OPENERS):
            each["additionalProperties"] = False
    return closed


def _has_properties(schema: Schema) -> bool:
    return isinstance(schema.get("properties"), dict) and bool(schema["properties"])


def _find_shared(schema: Schema, root: Any) -> list[Schema]:
    """The schemas that describe one object together, of which this is the outermost; empty if it can be told
    which of them names all properties."""
    inner = list(_list_in_place(schema, root))
    if not inner or (not _has_properties(schema) and _is_choice(schema)):
        return []
    found: dict[int, Schema] = {}
    stack = [schema]
    while stack:
        part = stack.pop()
        if id(part) not in found:
            found[id(part)] = part
            stack.extend(_list_in_place(part, root))
    naming = [part for part in found.values() if _has_properties(part)]
    return [] if naming == [schema] else list(found.values())


def _is_choice(schema: Schema) -> bool:
    """Whether exactly one schema in place describes the object: the only one, or one of the alternatives."""
    used = [key for key in (*_LISTS_IN_PLACE, *_IN_PLACE, *_NAMED_IN_PLACE, "$ref") if key in schema]
    return used in (["anyOf"], ["oneOf"], ["$ref"]) or (used == ["allOf"] and len(schema["allOf"]) == 1)


def _list_in_place(schema: Schema, root: Any) -> Iterator[Schema]:
    """The schemas that apply to the same instance as this one."""
    lists = [schema[key] for key in _LISTS_IN_PLACE if isinstance(schema.get(key), list)]
    named = [schema[key].values() for key in _NAMED_IN_PLACE if isinstance(schema.get(key), dict)]
    found = [part for parts in lists for part in parts]
    found += [schema.get(key) for key in _IN_PLACE]
    found += [part for parts in named for part in parts]
    found.append(resolve_reference(schema.get("$ref"), root))
    yield from (part for part in found if isinstance(part, dict))


LIMIT = 9 * 10**18
SHARED = "x-mlxrun-integers"  # the key of the root that holds the shared schemas
_ASSERTIONS = {"type", "multipleOf", "minLength", "maxLength", "pattern", "format", *LOW, *HIGH}
_NAMES = {"$id", "id", "$anchor", "$dynamicAnchor"}  # by which references may find a schema
# A schema below one of these decides which values others match, so a bound might admit more values.
_UNTOUCHED = ("if", "not", "oneOf")


def bound_integers(schema: Schema) -> Schema:
    """Return a copy of a valid schema whose integers are within LIMIT, wherever it gives no bound.

    A schema of integers stays as it is if keywords beside its type list values or refer to other schemas."""
    bounded = copy.deepcopy(schema)
    schemas = [each for _, each in iterate_schemas(bounded, "")]
    # A reference is resolved within the nearest `$id`, where the shared schemas are not.
    can_share = not any(_NAMES & each.keys() for each in schemas[1:])
    untouched = {id(part) for each in schemas for key in _UNTOUCHED for part in _list_parts(each.get(key))}
    shared: dict[str, Schema] = {}  # by name
    names: dict[str, str] = {}  # of the shared schemas, by their JSON
    for each in schemas:
        bounds = _find_bounds(each) if id(each) not in untouched and _is_plain_integer(each) else {}
        each.update(bounds)
        if bounds and can_share and each is not bounded:
            asserted = {key: each[key] for key in sorted(each.keys() & _ASSERTIONS)}
            name = names.setdefault(json.dumps(asserted), str(len(names)))
            shared[name] = asserted
            each.clear()
            each["$ref"] = f"#/{SHARED}/{name}"
    if shared:
        bounded[SHARED] = shared
    return bounded


def _list_parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_plain_integer(schema: Schema) -> bool:
    types = _list_parts(schema.get("type"))
    return "integer" in types and "number" not in types and schema.keys() <= _ASSERTIONS | ANNOTATIONS


def _find_bounds(schema: Schema) -> dict[str, int]:
    """Return the bounds that the schema lacks. A bound of its own beyond LIMIT stays the only one."""
    low = [schema[key] for key in LOW if is_number(schema.get(key))]
    high = [schema[key] for key in HIGH if is_number(schema.get(key))]
    found = {}
    if not high and max(low, default=0) < LIMIT:
        found["maximum"] = LIMIT
    if not low and min(high, default=0) > -LIMIT:
        found["minimum"] = -LIMIT
    return found
