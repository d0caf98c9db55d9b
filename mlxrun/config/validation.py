"""Validates a layer of a config with jsonschema; errors have a position, a key and a suggestion.

No message quotes a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema

from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin
from mlxrun.config.schema import EXTENDS, build_schema
from mlxrun.config.setting_fields import SettingField, find_field, list_fields, list_sections
from mlxrun.config.yaml_source import render_yaml
from mlxrun.core.byte_sizes import parse_bytes
from mlxrun.core.field_errors import find_closest, suggest_word

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
MOST_SUGGESTED = 100  # unknown keys of a layer for which a suggestion is looked for: it takes a millisecond
_SURROGATES = re.compile("[\ud800-\udfff]")  # which stand for bytes that are no text
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def validate_layer(tree: ConfigNode) -> list[ConfigProblem]:
    """Return all problems of one layer, by the JSON Schema and by the ranges of byte sizes."""
    problems, unknown = [], list[_UnknownKey]()
    for error in jsonschema.Draft202012Validator(build_schema()).iter_errors(tree.strip_origins()):
        steps = list(error.absolute_path)
        path, node = ".".join(map(str, steps)), tree.find(steps)
        assert node is not None
        if error.validator == "additionalProperties":
            schema: Any = error.schema
            known = list(schema["properties"])
            unknown += (
                _UnknownKey(child.key_origin or child.origin, path, key, known)
                for key, child in node.value.items()
                if key not in known
            )
        else:
            text = describe_schema_error(error, find_field(steps))
            problems.append(ConfigProblem.at(node.origin, path, text))
    problems += _explain_unknown_keys(unknown)
    problems += _check_sizes(tree, {problem.key for problem in problems})
    return problems + list(_check_texts(tree))


def _check_texts(node: ConfigNode, steps: tuple[str | int, ...] = ()) -> Iterator[ConfigProblem]:
    """Check that texts can be written as UTF-8. The name of a file may have other bytes. `steps`: the place
    of the node in the config."""
    if isinstance(node.value, dict | list):
        inner = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for step, child in inner:
            yield from _check_texts(child, (*steps, step))
    elif isinstance(node.value, str) and _SURROGATES.search(node.value):
        yield ConfigProblem.at(node.origin, ".".join(map(str, steps)), "it is not UTF-8 text")


@dataclass(frozen=True, slots=True)
class _UnknownKey:
    """A key that the mapping at `path` does not have; `known`: those that it has."""

    origin: Origin
    path: str
    key: str
    known: list[str]

    def find_meant(self) -> str | None:
        if self.path in ("", *list_sections()):
            return _find_meant_key(self.key, self.path)
        return find_closest(self.key, self.known)


def _explain_unknown_keys(unknown: list[_UnknownKey]) -> Iterator[ConfigProblem]:
    """Yield their problems, the first ones of the layer with suggestions."""
    ordered = sorted(unknown, key=lambda each: (each.origin.name, each.origin.line, each.origin.column))
    for number, each in enumerate(ordered):
        suggestion = suggest_word(each.find_meant() if number < MOST_SUGGESTED else None)
        if not each.path and each.key in list_fields():  # as --set and `settings` of a model have it
            section, _, key = each.key.partition(".")
            suggestion = suggest_word(f"{section}: {{{key}: ...}}", str)
        name = f"{each.path}.{each.key}" if each.path else each.key
        yield ConfigProblem.at(each.origin, name, f"unknown key{suggestion}")


def _check_sizes(tree: ConfigNode, wrong: set[str]) -> Iterator[ConfigProblem]:
    """Check the ranges of byte sizes that are strings: the schema checks their pattern only."""
    for path, info in list_fields().items():
        node = tree.find(path.split("."))
        if not (info.is_bytes and node and isinstance(node.value, str)) or path in wrong:
            continue
        size, low, high = parse_bytes(node.value), info.range.low, info.range.high
        if low is not None and size < low:
            yield ConfigProblem.at(node.origin, path, f"{node.value!r} is less than {format_number(low)}")
        elif high is not None and size > high:
            yield ConfigProblem.at(node.origin, path, f"{node.value!r} is more than {format_number(high)}")


_RENAMED = {"engine.probe": "load_check"}  # since the last release


def _find_meant_key(key: str, section: str) -> str | None:
    """Return the key that was probably meant: one of this section, else a key of another section."""
    if f"{section}.{key}" in _RENAMED:
        return _RENAMED[f"{section}.{key}"]
    elsewhere = {info.key: path for path, info in list_fields().items() if info.section != section}
    if key in elsewhere:
        return elsewhere[key]
    own = [info.key for info in list_fields().values() if info.section == section]
    others = () if section else (*list_sections(), EXTENDS)
    other = find_closest(key, elsewhere)
    return find_closest(key, [*own, *others]) or (elsewhere[other] if other else None)


def describe_schema_error(error: jsonschema.ValidationError, info: SettingField | None) -> str:
    """Say what is wrong with one value."""
    value: Any = error.instance
    limit: Any = error.validator_value
    shown = "***" if info is not None and info.is_secret else quote_value(value)
    match error.validator:
        case "enum":
            meant = find_closest(value, [choice for choice in limit if isinstance(choice, str)])
            choices = ", ".join(quote_value(choice) for choice in limit)
            return f"{shown} is not one of {choices}{suggest_word(meant, quote_value)}"
        case "type":
            is_model = list(error.absolute_path) == ["model"] and isinstance(value, str)
            meant = f"model.path: {value}" if is_model else None
            last = str(error.absolute_path[-1]) if error.absolute_path else ""
            return _describe_type_error(value, shown, limit, info, last) + suggest_word(meant, str)
        case "pattern":
            return f"{shown} is not a byte size such as 4GB or 512MiB"
        case "minimum":
            return f"{shown} is less than {format_number(limit)}"
        case "maximum":
            return f"{shown} is more than {format_number(limit)}"
        case "minLength":
            return "it is an empty string"
        case "minItems" | "minProperties":
            return "it is empty"
        case "uniqueItems":
            return f"{shown} has an item twice"
        case _:
            return str(error.validator)


def _describe_type_error(
    value: Any, shown: str, wanted: str | list[str], info: SettingField | None, last: str
) -> str:
    """`last`: the innermost key of the value."""
    kinds = [wanted] if isinstance(wanted, str) else wanted
    if info is not None and info.is_bytes:
        kinds = ["integer", *(kind for kind in kinds if kind == "null")]
    expected = " or ".join(_TYPES[kind] for kind in kinds)
    if info is None and "object" in kinds:
        return f"{shown} is not a mapping of keys"
    hint = ""
    if "boolean" in kinds and isinstance(value, str):
        hint = suggest_word(_YAML_1_1.get(value.lower()), str)
    elif "array" in kinds and isinstance(value, str) and shown != "***":
        hint = f" (write {render_yaml([value])})"
    elif "string" in kinds and isinstance(value, int | float) and shown != "***":
        hint = f' (write "{shown}")'
    elif isinstance(value, dict) and last in list_sections():
        hint = f" (write {last}.KEY: VALUE for each key)"
    return f"{shown} is not {expected}{hint}"


def quote_value(value: Any) -> str:
    """Return a value as messages quote it."""
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def format_number(value: float) -> str:
    """Return a bound as text, without the `.0` of an integer."""
    return str(int(value)) if value == int(value) else str(value)
