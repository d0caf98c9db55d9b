"""Checks of a request's grammar that llguidance does not make: its size, and JSON Schemas.

jsonschema needs some 0.2 ms for each schema within a schema, so their number is checked first. It compares
the values of an array each with each. Arrays where it would are checked here, or not at all.

A refusal is a RequestError that names the field. A schema must be valid by its own metaschema. Strict mode
refuses a keyword that no draft knows, since it would have no effect. llguidance refuses the keywords that it
cannot enforce. Two cases that it gets wrong are refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    SchemaError,
)
from jsonschema.validators import create, validator_for

from mlxrun.core.field_errors import check_type, get_json_type, quote, reject, shorten, suggest

MAX_CHARACTERS = 1 << 20  # of a grammar
MAX_SCHEMAS = 10_000  # within the schemas of a grammar: two seconds
MAX_CHOICES = 20_000  # compiled in some 100 ms
MAX_EBNF_CHARACTERS = 1 << 16
MAX_EBNF_RULES = 1_000  # translated in half a second; four times that for twice as many
# The keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = {
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
_MANY = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
# Keywords of all drafts and of OpenAPI that say nothing about an instance.
ANNOTATIONS = {
    *("$anchor", "$comment", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "id"),
    *("contentEncoding", "contentMediaType", "default", "deprecated", "description", "examples", "readOnly"),
    *("title", "writeOnly", "discriminator", "example", "externalDocs", "nullable", "xml"),
}
_DRAFTS = (Draft4Validator, Draft7Validator, Draft201909Validator, Draft202012Validator)
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_TYPES_REASON = f"expected a type or an array of types; the types are {', '.join(_TYPES)}"
_ASSERTIONS = {key for draft in _DRAFTS for key in draft.VALIDATORS} | {"minContains", "maxContains"}
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_KNOWN = _ONE | _MANY | _NAMED | ANNOTATIONS | _ASSERTIONS


def _create_old_validator() -> Any:
    """Make a validator of draft 4 that does not compare the values of `enum`."""
    meta_schema: dict[str, Any] = copy.deepcopy(dict(Draft4Validator.META_SCHEMA))
    del meta_schema["properties"]["enum"]["uniqueItems"]
    return create(meta_schema, Draft4Validator.VALIDATORS)


# Draft 3 is checked as draft 4, which llguidance expects.
_OLD_VALIDATORS = dict.fromkeys((Draft3Validator, Draft4Validator), _create_old_validator())


def check_schema(schema: Any, param: str, strict: bool) -> None:
    """Raise RequestError if the schema is not valid or, if `strict`, has an unknown keyword. Slow: check
    their number with `check_schema_count` first."""
    if isinstance(schema, dict):
        check_type(schema.get("$schema", ""), str, f"{param}.$schema")
    try:
        for path, each in iterate_schemas(schema, param):
            _check_arrays(each, path)
        validator = validator_for(schema, default=Draft202012Validator)
        _OLD_VALIDATORS.get(validator, validator).check_schema(schema)
    except SchemaError as error:
        at = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        reject(param + at, f"is not a valid JSON Schema: {_describe_error(error)}")
    except RecursionError:
        reject(param, "is nested too deeply")
    for path, each in iterate_schemas(schema, param):
        _check_range(each, path)
        _check_count(each, path)
        if strict:
            _check_names(each, path)


def _describe_error(error: SchemaError) -> str:
    if error.validator == "anyOf" and list(error.absolute_path)[-1:] == ["type"]:
        if isinstance(error.instance, str):
            return f"{quote(error.instance)} is not one of {', '.join(_TYPES)}"
        return _TYPES_REASON
    return shorten(error.message)


def check_schema_count(schemas: Iterable[Any], param: str) -> None:
    """Raise RequestError if these schemas, and all schemas within them, are more than MAX_SCHEMAS."""
    count, stack = 0, list(schemas)
    while stack:
        each = stack.pop()
        count += 1
        if isinstance(each, dict):
            stack.extend(inner for _, inner in _iterate_members(each))
        if count + len(stack) > MAX_SCHEMAS:
            text = f"has more than {MAX_SCHEMAS} schemas, those of properties and items included"
            reject(param, text, code="invalid_grammar")


def iterate_schemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the schema and all schemas within it, each with its path."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for where, each in _iterate_members(schema):
        yield from iterate_schemas(each, path + where)


def _iterate_members(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the schemas directly within a schema, each with its path there."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((f".{key}.{name}", each) for name, each in value.items())
        elif key in _MANY and isinstance(value, list):
            yield from ((f".{key}[{i}]", each) for i, each in enumerate(value))
        elif key in _ONE:
            yield f".{key}", value


def _check_arrays(schema: dict[str, Any], path: str) -> None:
    """Check arrays that jsonschema would compare each with each if their values are of several types."""
    types, dependencies = schema.get("type"), schema.get("dependencies")
    if isinstance(types, list) and len(types) > len(_TYPES):
        reject(f"{path}.type", f"is not a valid JSON Schema: {_TYPES_REASON}")
    for name, each in dependencies.items() if isinstance(dependencies, dict) else ():
        if isinstance(each, list) and not all(isinstance(property_name, str) for property_name in each):
            reason = "is not a valid JSON Schema: expected a schema or an array of strings"
            reject(f"{path}.dependencies.{name}", reason)


def _check_names(schema: dict[str, Any], path: str) -> None:
    for key in schema:
        if key not in _KNOWN and not key.startswith("x-"):
            name = f"{path}.{shorten(key, 60)}"
            reject(name, f"is not a keyword of JSON Schema{suggest(key, _KNOWN)}", code="unknown_parameter")


def _check_range(schema: dict[str, Any], path: str) -> None:
    """llguidance accepts an excluded integer if the range ends before the next integer: (2, 2.5]."""
    parts = [schema, *(part for part in schema.get("allOf", ()) if isinstance(part, dict))]
    low = [(p[key], key) for p in parts for key in LOW if is_number(p.get(key))]
    high = [(p[key], key) for p in parts for key in HIGH if is_number(p.get(key))]
    if not low or not high:
        return
    (start, lower), (end, upper) = max(low), min(high)
    for bound, key, open_key in ((start, lower, LOW[1]), (end, upper, HIGH[1])):
        if key == open_key and bound % 1 == 0 and 0 < end - start < 1:
            reject(f"{path}.{key}", f"{bound} cannot be enforced on a range less than 1 wide")


def _check_count(schema: dict[str, Any], path: str) -> None:
    """llguidance counts additional keys that repeat as several, where JSON counts them once."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if least - len(required) > 1:
        reason = f"{least} cannot be enforced; all properties but one must be in 'required'"
        reject(f"{path}.minProperties", reason)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def check_length(length: int, param: str) -> None:
    """Raise RequestError for a grammar of more than MAX_CHARACTERS."""
    if length > MAX_CHARACTERS:
        reject(
            param, f"has {length} characters; at most {MAX_CHARACTERS} are allowed", code="invalid_grammar"
        )


def check_text(value: Any, param: str) -> str:
    """Return the text of a grammar. RequestError if it is no text, empty or too long."""
    text: str = check_type(value, str, param)
    check_length(len(text), param)
    if not text.strip():
        reject(param, "is empty")
    return text


def check_rules(value: Any, param: str) -> str:
    """Return the text of an EBNF grammar without blank lines. RequestError if it is too long or has too many
    rules: the time of its translation grows with their square, and with rules times characters."""
    text = "\n".join(line for line in check_text(value, param).splitlines() if line.strip())
    if len(text) > MAX_EBNF_CHARACTERS:
        limit = f"at most {MAX_EBNF_CHARACTERS} are allowed in EBNF"
        reject(param, f"has {len(text)} characters; {limit}", code="invalid_grammar")
    if (rules := text.count("::=")) > MAX_EBNF_RULES:
        reject(param, f"has {rules} rules; at most {MAX_EBNF_RULES} are allowed", code="invalid_grammar")
    return text


def check_choices(value: Any, param: str) -> list[str]:
    """Return the strings to choose from, each once. RequestError if there are none, or too many."""
    check_type(value, list, param)
    if not value:
        reject(param, "is empty; give at least one string to choose")
    if len(value) > MAX_CHOICES:
        reject(param, f"has {len(value)} strings; at most {MAX_CHOICES} are allowed", code="invalid_grammar")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            reject(f"{param}[{i}]", f"expected string, got {get_json_type(text)}", code="invalid_type")
    return list(dict.fromkeys(value))
