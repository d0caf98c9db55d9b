"""The request's tools, and values typed by their JSON Schema.

Of a schema, parsers need the types that a value may have, and the schemas of members and items. Formats that
tag each argument write values as bare text: the schema says what `3.0` or `[1]` is. JSON says it itself.
There only values that the schema excludes are repaired, such as an array written as a string.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.core.field_errors import get_json_type
from mlxrun.core.limited_json import check_depth, load_json, refuse_constant

_ALIASES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
}
_DEPTH = 16  # of references within a schema


class ValueSchema:
    """One place in a JSON Schema. `types`: those that it admits; `options`: the values of enum and const."""

    def __init__(self, schema: Any, root: Mapping[str, Any] | None = None) -> None:
        self._root = root if root is not None else (schema if isinstance(schema, Mapping) else {})
        self._branches = _find_branches(schema, self._root, _DEPTH)
        self.types = _find_types(self._branches)
        self.options = tuple(_find_options(self._branches))

    def get_member(self, key: str) -> ValueSchema:
        """Return the schema of a member."""
        for part in self._branches:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return ValueSchema(properties[key], self._root)
        for part in self._branches:
            if isinstance(part.get("additionalProperties"), Mapping):
                return ValueSchema(part["additionalProperties"], self._root)
        return ValueSchema({}, self._root)

    def get_items(self) -> ValueSchema:
        """Return the schema of an array's items."""
        for part in self._branches:
            if isinstance(part.get("items"), Mapping):
                return ValueSchema(part["items"], self._root)
        return ValueSchema({}, self._root)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its members, in order. Positional arguments get these names."""
        named = (part["properties"] for part in self._branches if isinstance(part.get("properties"), Mapping))
        return tuple(dict.fromkeys(key for properties in named for key in properties))

    @property
    def is_text_only(self) -> bool:
        """Whether a value can only be a string. Such a value may be written before it is complete."""
        return self.types == {"string"} and all(isinstance(option, str) for option in self.options)

    @property
    def excludes_text(self) -> bool:
        """Whether a string would break the schema."""
        if self.options:
            return not any(isinstance(option, str) for option in self.options)
        return bool(self.types) and "string" not in self.types


def _find_branches(
    schema: Any, root: Mapping[str, Any], depth: int, seen: dict[int, int] | None = None
) -> list[Mapping[str, Any]]:
    """Return the schema and all schemas that it refers to or is composed of. `seen`: those that were listed
    before, by id, with their depths. They are left out, as schemas of a few lines can name each other
    2 ** depth times."""
    seen = {} if seen is None else seen
    if not isinstance(schema, Mapping) or seen.get(id(schema), 0) >= depth:
        return []
    seen[id(schema)] = depth
    found: list[Mapping[str, Any]] = [schema]
    found += _find_branches(resolve_reference(schema.get("$ref"), root), root, depth - 1, seen)
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            for part in parts:
                found += _find_branches(part, root, depth - 1, seen)
    return found


def resolve_reference(reference: Any, root: Any) -> Any:
    """Return what a `$ref` points to in the schema `root`; None if that is not in `root`."""
    place = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and len(step) < 10 and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def _find_types(parts: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    types: set[str] = set()
    for part in parts:
        given = part.get("type")
        named = [given] if isinstance(given, str) else given if isinstance(given, (list, tuple)) else []
        types |= {_ALIASES.get(name.lower(), name.lower()) for name in named if isinstance(name, str)}
        if given is None and "properties" in part:
            types.add("object")
        if given is None and "items" in part:
            types.add("array")
        if part.get("nullable") is True:
            types.add("null")
        types |= {get_json_type(option) for option in _find_options([part])} if given is None else set()
    return frozenset(types)


def _find_options(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values that enum and const admit."""
    options: list[Any] = []
    for part in parts:
        if isinstance(part.get("enum"), (list, tuple)):
            options += part["enum"]
        elif "const" in part:
            options.append(part["const"])
    return options


NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:\.0*)?")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class ToolSchemas:
    """The function tools of a request, in OpenAI's format. Other tools are left out."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._parameters: dict[str, Any] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters") or {}
        self.names = frozenset(self._parameters)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def get_schema(self, name: str) -> ValueSchema:
        """Return the schema of a function's arguments."""
        return ValueSchema(self._parameters.get(name, {}))


def encode_bare_value(text: str, schema: ValueSchema, *, guess: bool = False) -> str:
    """Encode as JSON a value that a model wrote as bare text.

    The most special type that the schema admits and that fits counts, a string last. Numbers stay as they are
    written. If the schema has no types, texts that look like arrays and objects are such. With `guess` this
    holds for numbers and words too. All else is a string.
    """
    types = schema.types
    bare = text.strip()
    if schema.options:
        kinds = sorted(types or {get_json_type(option) for option in schema.options})
        plain = ValueSchema({"type": kinds})
        return _match_option(text, schema) or encode_bare_value(text, plain, guess=guess)
    if types == {"string"}:
        return encode_json(text)
    word = _WORDS.get(bare.lower())
    if word in ("true", "false") and ("boolean" in types or (guess and not types and bare == word)):
        return word
    if word == "null" and (
        "null" in types or (types and "string" not in types) or (guess and not types and bare == word)
    ):
        return word
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare.split(".")[0].lstrip("+") if NUMBER.fullmatch(bare) else _normalize_number(bare)
    if types & {"number", "integer"} or (guess and not types):
        if NUMBER.fullmatch(bare):
            return bare
        if types and _FLOAT.fullmatch(bare):
            return _normalize_number(bare)
    if bare.startswith(("[", "{", '"', "'", "(") if types else ("[", "{")) and (
        not types or types & {"object", "array"}
    ):
        value = _encode_container(bare, schema)
        if value is not None:
            return value
    return encode_json(text)


def is_scalar(text: str) -> bool:
    """Tell whether a bare value is a number or one of JSON's words."""
    bare = text.strip()
    return len(bare) < 100 and (bare.lower() in _WORDS or _FLOAT.fullmatch(bare) is not None)


def repair_string(text: str, schema: ValueSchema) -> str:
    """Encode a string as JSON. If the schema excludes strings, encode the value that the text stands for."""
    return encode_bare_value(text, schema) if schema.excludes_text else encode_json(text)


def encode_json(value: Any) -> str:
    """Encode a value as JSON. Characters are escaped only if there is a lone surrogate."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def repair_value(value: Any, schema: ValueSchema) -> Any:
    """Repair the strings in a parsed value. Where the schema admits only strings, numbers become strings."""
    if isinstance(value, str):
        try:
            return json.loads(repair_string(value, schema))
        except ValueError:  # an integer of thousands of digits
            return value
    if isinstance(value, dict):
        return {key: repair_value(item, schema.get_member(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = schema.get_items()
        return [repair_value(item, items) for item in value]
    if schema.is_text_only and isinstance(value, (int, float)):
        return json.dumps(value)
    return value


def _normalize_number(number: str) -> str:
    """Rewrite a number as JSON allows it: without plus, leading zeros and bare point."""
    if _INTEGER.fullmatch(number):
        return str(int(number.split(".")[0])) if len(number) < 4000 else encode_json(number)
    value = float(number)
    return repr(value) if value - value == 0 else encode_json(number)


def parse_python(text: str) -> ast.Expression:
    """Parse the source of a Python expression, without warnings about unknown escapes. SyntaxError or
    ValueError if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval")


def _parse_literal(text: str) -> Any:
    value = ast.literal_eval(parse_python(text))
    check_depth(value)
    return value


def _encode_container(text: str, schema: ValueSchema) -> str | None:
    """Encode an array or object as JSON, also one that is written as Python, escaped or encoded twice."""
    for read in (_parse_json, _parse_literal, _parse_escaped) if schema.types else (_parse_json,):
        try:
            value = read(text)
            if isinstance(value, str) and schema.types:
                value = _parse_json(value)
            if isinstance(value, tuple):
                value = list(value)
            kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else ""
            if kind and (not schema.types or kind in schema.types):
                return encode_json(repair_value(value, schema))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _parse_json(text: str) -> Any:
    return load_json(text, strict=False, parse_constant=refuse_constant)


def _parse_escaped(text: str) -> Any:
    return _parse_json(_parse_json(f'"{text}"'))


def _match_option(text: str, schema: ValueSchema) -> str | None:
    """Return the member of an enum that the text stands for, as JSON."""
    for form in (text, text.strip()):
        if form in [option for option in schema.options if isinstance(option, str)]:
            return encode_json(form)
    for option in schema.options:
        if not isinstance(option, str) and (
            encode_json(option) == text.strip() or str(option).lower() == text.strip().lower()
        ):
            return encode_json(option)
    return None
