"""Bounds the integers of JSON schemas that have no bound of their own.

A grammar of unbounded integers matches any number of digits, and a small model may write digits until
`max_tokens`. LIMIT is a little less than 2**63, which llguidance cannot enforce on both sides.

Each integer schema costs llguidance a part of its limits. So equal ones become references to one schema.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from mlxrun.api.structured.grammar_checks import ANNOTATIONS, HIGH, LOW, is_number, iterate_schemas

Schema = dict[str, Any]

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
    shared: dict[str, Schema] = {}
    for each in schemas:
        bounds = _find_bounds(each) if id(each) not in untouched and _is_plain_integer(each) else {}
        each.update(bounds)
        if bounds and can_share and each is not bounded:
            asserted = {key: each[key] for key in sorted(each.keys() & _ASSERTIONS)}
            name = json.dumps(asserted)
            number = list(shared).index(name) if name in shared else len(shared)
            shared.setdefault(name, asserted)
            each.clear()
            each["$ref"] = f"#/{SHARED}/{number}"
    if shared:
        bounded[SHARED] = {str(i): each for i, each in enumerate(shared.values())}
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
