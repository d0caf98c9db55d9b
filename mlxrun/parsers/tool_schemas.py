"""The request's tools, and values typed by their JSON Schema.

Formats that tag each argument write values as bare text: the schema says what `3.0` or `[1]` is. Formats of
JSON say it themselves; there only what the schema excludes is repaired (an array written as a string).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:\.0*)?")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
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
    """One place in a JSON Schema: which types it admits, and the schemas below it."""

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
        """The members that it names, in order, by which positional arguments are named."""
        named = (part["properties"] for part in self._branches if isinstance(part.get("properties"), Mapping))
        return tuple(dict.fromkeys(key for properties in named for key in properties))

    @property
    def is_text_only(self) -> bool:
        """Whether a value can only be a string, so that it may be written before it is complete."""
        return self.types == {"string"} and all(isinstance(option, str) for option in self.options)

    @property
    def excludes_text(self) -> bool:
        """Whether a string would break the schema."""
        if self.options:
            return not any(isinstance(option, str) for option in self.options)
        return bool(self.types) and "string" not in self.types


class ToolSchemas:
    """The tools that a request offers, as OpenAI's API has them. Tools that are no functions are left out."""

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
    """Encode a value that a model wrote as bare text as JSON.

    Of the types that the schema admits the most special one that fits counts, a string last; numbers stay as
    they are written. Without types, arrays and objects are what they look like, with `guess` numbers and
    words too; all else is a string.
    """
    types = schema.types
    bare = text.strip()
    if schema.options:
        return _match_option(text, schema) or encode_bare_value(text, _drop_options(schema), guess=guess)
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
        return bare.split(".")[0].lstrip("+") if NUMBER.fullmatch(bare) else _normalise_number(bare)
    if types & {"number", "integer"} or (guess and not types):
        if NUMBER.fullmatch(bare):
            return bare
        if types and _FLOAT.fullmatch(bare):
            return _normalise_number(bare)
    if bare.startswith(("[", "{", '"', "'", "(") if types else ("[", "{")) and (
        not types or types & {"object", "array"}
    ):
        value = _encode_container(bare, schema)
        if value is not None:
            return value
    return encode_json(text)


def repair_string(text: str, schema: ValueSchema) -> str:
    """Encode a string; where the schema excludes strings, what the text stands for."""
    return encode_bare_value(text, schema) if schema.excludes_text else encode_json(text)


def encode_json(value: Any) -> str:
    """Encode a value as JSON without escaping characters, unless there is a lone surrogate."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def repair_value(value: Any, schema: ValueSchema) -> Any:
    """Repair the strings in a parsed value, and turn numbers into strings where the schema asks for these."""
    if isinstance(value, str):
        return json.loads(repair_string(value, schema))
    if isinstance(value, dict):
        return {key: repair_value(item, schema.get_member(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = schema.get_items()
        return [repair_value(item, items) for item in value]
    if schema.is_text_only and isinstance(value, (int, float)):
        return json.dumps(value)
    return value


def _normalise_number(number: str) -> str:
    """Rewrite a number as JSON allows it: without plus, leading zeros and bare point."""
    if _INTEGER.fullmatch(number):
        return str(int(number.split(".")[0])) if len(number) < 4000 else encode_json(number)
    value = float(number)
    return repr(value) if value - value == 0 else encode_json(number)


def parse_python(text: str) -> ast.Expression:
    """Parse the source of a Python expression, without warnings of unknown escapes.
    Raises SyntaxError or ValueError if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval")


def _parse_literal(text: str) -> Any:
    return ast.literal_eval(parse_python(text))


def _encode_container(text: str, schema: ValueSchema) -> str | None:
    """Encode an array or object as JSON, also one that is written as Python or encoded twice."""
    for read in (_parse_json, _parse_literal) if schema.types else (_parse_json,):
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
    return json.loads(text, strict=False, parse_constant=_reject_constant)


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


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


def _drop_options(schema: ValueSchema) -> ValueSchema:
    kinds = sorted(schema.types or {_get_type(option) for option in schema.options})
    return ValueSchema({"type": kinds})


def _find_branches(schema: Any, root: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    """Return the schema and all schemas that it refers to or is composed of."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    found: list[Mapping[str, Any]] = [schema]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found += _find_branches(_resolve_reference(reference, root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            for part in parts:
                found += _find_branches(part, root, depth - 1)
    return found


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(step)
        elif isinstance(place, Sequence) and step.isdigit() and int(step) < len(place):
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
        types |= {_get_type(option) for option in _find_options([part])} if given is None else set()
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


def _get_type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "string")
