"""What jsonschema finds in a layer of a config, said with position, key and suggestion.

A secret's value never gets into a message.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema

from mlxrun.config.byte_sizes import parse_bytes
from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin, find, plain, problem
from mlxrun.config.schema import EXTENDS, schema_of
from mlxrun.config.setting_fields import FieldInfo, fields_of, sections_of

_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def validate(tree: ConfigNode, root: type) -> list[ConfigProblem]:
    """All problems of one layer."""
    reporter = _Reporter(tree, root)
    validator = jsonschema.Draft202012Validator(schema_of(root))
    for error in validator.iter_errors(plain(tree)):
        reporter.report(error)
    reporter.check_sizes()
    return reporter.problems


class _Reporter:
    """Turns schema errors into problems."""

    def __init__(self, tree: ConfigNode, root: type) -> None:
        self._tree = tree
        self._infos = fields_of(root)
        self._sections = sections_of(root)
        self.problems: list[ConfigProblem] = []

    def report(self, error: jsonschema.ValidationError) -> None:
        """Add what one schema error means."""
        steps = [str(step) for step in error.absolute_path]
        node = find(self._tree, list(error.absolute_path))
        assert node is not None
        if error.validator == "additionalProperties":
            for key, child in node.value.items():
                if not self._is_known(key, ".".join(steps)):
                    self._unknown(key, ".".join(steps), child.key_origin or child.origin)
            return
        info = self._infos.get(".".join(steps[:2])) or self._infos.get(".".join(steps[:1]))
        self._add(node.origin, ".".join(steps), _message(error, info))

    def check_sizes(self) -> None:
        """Ranges of byte sizes that are strings: the schema sees only their pattern."""
        bad = {found.key for found in self.problems}
        for path, info in self._infos.items():
            node = find(self._tree, path.split("."))
            if not (info.is_bytes and node and isinstance(node.value, str)) or path in bad:
                continue
            size = parse_bytes(node.value)
            if info.range.low is not None and size < info.range.low:
                self._add(node.origin, path, f"{node.value!r} is less than {number(info.range.low)}")
            elif info.range.high is not None and size > info.range.high:
                self._add(node.origin, path, f"{node.value!r} is more than {number(info.range.high)}")

    def _add(self, origin: Origin, path: str, message: str) -> None:
        self.problems.append(problem(origin, path, message))

    def _is_known(self, key: str, section: str) -> bool:
        return f"{section}.{key}" in self._infos if section else key in self._top_level()

    def _top_level(self) -> list[str]:
        own = [info.key for info in self._infos.values() if not info.section]
        return [*own, *self._sections, EXTENDS]

    def _unknown(self, key: str, section: str, origin: Origin) -> None:
        path = f"{section}.{key}" if section else key
        meant = self._meant(key, section)
        self._add(origin, path, "unknown key" + _hint(meant and repr(meant)))

    def _meant(self, key: str, section: str) -> str | None:
        """The key that was probably meant: in this section, else a section, else in another section."""
        here = [info.key for info in self._infos.values() if info.section == section]
        elsewhere = {info.key: path for path, info in self._infos.items() if info.section != section}
        if key in elsewhere:
            return elsewhere[key]
        close = _closest(key, here if section else self._top_level())
        far = _closest(key, elsewhere)
        return close or (elsewhere[far] if far else None)


def _message(error: jsonschema.ValidationError, info: FieldInfo | None) -> str:
    """What is wrong with one value."""
    value: Any = error.instance
    limit: Any = error.validator_value
    shown = "***" if info is not None and info.is_secret else show(value)
    match error.validator:
        case "enum":
            meant = _closest(value, [choice for choice in limit if isinstance(choice, str)])
            choices = ", ".join(show(choice) for choice in limit)
            return f"{shown} is not one of {choices}" + _hint(meant and show(meant))
        case "type":
            return _type_message(value, shown, limit, info)
        case "pattern":
            return f"{shown} is not a size such as 4GB or 512MiB"
        case "minimum":
            return f"{shown} is less than {number(limit)}"
        case "maximum":
            return f"{shown} is more than {number(limit)}"
        case "minLength":
            return "an empty string"
        case "uniqueItems":
            return f"{shown} holds an item twice"
        case _:
            return str(error.validator)


def _type_message(value: Any, shown: str, wanted: str | list[str], info: FieldInfo | None) -> str:
    kinds = [wanted] if isinstance(wanted, str) else wanted
    if info is not None and info.is_bytes:
        kinds = ["integer", *(kind for kind in kinds if kind == "null")]
    said = " or ".join(_TYPES[kind] for kind in kinds)
    if info is None and "object" in kinds:
        return f"{shown} is not a mapping of keys"
    hint = ""
    if "boolean" in kinds and isinstance(value, str):
        hint = _hint(_YAML_1_1.get(value.lower()))
    elif "array" in kinds and isinstance(value, str) and shown != "***":
        hint = f" (write [{value}])"
    elif "string" in kinds and isinstance(value, int | float) and shown != "***":
        hint = f' (write "{shown}")'
    return f"{shown} is not {said}{hint}"


def show(value: Any) -> str:
    """A value as messages quote it."""
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number(value: float) -> str:
    """A bound, without the `.0` of a whole number."""
    return str(int(value)) if value == int(value) else str(value)


def _closest(word: Any, words: Iterable[str] | Mapping[str, Any]) -> str | None:
    near = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.7)
    return near[0] if near else None


def _hint(meant: str | None) -> str:
    return f" (did you mean {meant}?)" if meant else ""
