"""The request's tools, and values typed by their JSON Schema.

Formats that tag each argument write values as bare text: the schema says what `3.0` or `[1]` is. JSON says it
itself. There only values that the schema excludes are repaired, such as an array written as a string.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.api.parsers.value_schema import ValueSchema, get_type
from mlxrun.core.limited_json import check_depth, load_json

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
    return load_json(text, strict=False, parse_constant=_reject_constant)


def _parse_escaped(text: str) -> Any:
    return _parse_json(_parse_json(f'"{text}"'))


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
    kinds = sorted(schema.types or {get_type(option) for option in schema.options})
    return ValueSchema({"type": kinds})
