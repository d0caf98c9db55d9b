"""Parses YAML into nodes that know their line and column.

Scalars are read as in YAML 1.2: `no` and `12:30` are strings, `1e-3` is a number. Duplicate keys, merge keys,
tags and keys that are not strings are reported as problems. Wrong syntax and a second document raise
YamlError.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin
from mlxrun.core.limited_json import MAX_DEPTH, NestedTooDeeply

_NUMBER_START = list("-+.0123456789")
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _NUMBER_START),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", _NUMBER_START),
)
_TAG = "tag:yaml.org,2002:"
_SEVERAL_DOCUMENTS = "expected a single document in the stream"  # what PyYAML says of them
MAX_DIGITS = 100  # of an integer
MAX_VALUES = 100_000  # in a config; an alias counts each time that it is used


class _Loader(yaml.SafeLoader):
    """Composes nodes and resolves their tags; it constructs no values."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader` would read back as another type; escapes line breaks."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a scalar node; in double quotes if it would take more than one line."""
        return self.represent_scalar(
            _TAG + "str", data, style=None if data.splitlines() in ([], [data]) else '"'
        )


_Dumper.add_representer(str, _Dumper.represent_str)

for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


class YamlError(Exception):
    """The text is not YAML, or is more than one document. `line` and `column` begin with 1."""

    def __init__(self, line: int, column: int, reason: str, start: str = "this is not YAML: ") -> None:
        super().__init__(f"{start}{reason}")
        self.line = line
        self.column = column


def parse_yaml(text: str, name: str, problems: list[ConfigProblem]) -> ConfigNode:
    """Return the root mapping of a file; an empty mapping for an empty file. YamlError for wrong syntax."""
    start = Origin("file", name, 1, 1)
    root = _compose(text)
    if root is None or root.tag == _TAG + "null":
        return ConfigNode({}, start)
    reader = _Reader(name, None, problems)
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        text = f"the file must be a mapping of keys, and is {kind}"
        problems.append(ConfigProblem.at(reader.get_origin(root), "", text))
        return ConfigNode({}, start)
    return reader.read(root, None, "")


def parse_value(text: str, path: str, origin: Origin, problems: list[ConfigProblem]) -> ConfigNode:
    """Return a value that is not from a file. All its nodes have the given origin."""
    root = _compose(text)
    if root is None:
        return ConfigNode(None, origin, origin)
    return _Reader("", origin, problems).read(root, origin, path)


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar: `8` is an int, `null` is None, most others are strings."""
    try:
        tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return _construct_scalar(tag, text)
    except ValueError:
        return text


def render_yaml(value: Any) -> str:
    """Return a value as one line of YAML that this module reads back as the same value."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise YamlError(1, 1, f"it is {NestedTooDeeply()}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        if error.context == _SEVERAL_DOCUMENTS:
            text = "a second YAML document (---) begins here: only one is allowed"
            raise YamlError(line, column, text, start="") from None
        hint = ""
        if mark and text[max(0, mark.index - 1) : mark.index + 1] == "${":
            hint = " (write quotes around ${NAME} within braces and brackets)"
        reason = error.problem or error.context or "wrong syntax"
        raise YamlError(line, column, reason + hint) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - before.rfind("\n")
        raise YamlError(
            before.count("\n") + 1, column, f"there is a character that is not allowed: {error.reason}"
        ) from None
    return node


def _construct_scalar(tag: str, text: str) -> Any:
    """Return the value of a scalar. ValueError if its tag or its number is not supported."""
    match tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if len(text) <= MAX_DIGITS:
            return int(text, 0 if text[:2] in ("0x", "0o") else 10)
        case "float" if math.isfinite(float(text)):
            return float(text)
        case "str":
            return text
    shown = repr(text) if len(text) <= 40 else f"{text[:40]!r}... ({len(text):,} characters)"
    raise ValueError(f"{shown} cannot be read as {tag.removeprefix(_TAG)}")


class _Reader:
    """Converts composed nodes. `fixed` is the origin of all of them, if they are not from a file."""

    def __init__(self, name: str, fixed: Origin | None, problems: list[ConfigProblem]) -> None:
        self._name = name
        self._fixed = fixed
        self._problems = problems
        self._open: set[int] = set()  # nodes being read: an alias to one of them would be endless
        self._count = 0

    def get_origin(self, node: yaml.Node) -> Origin:
        """Return the position of a node."""
        mark = node.start_mark
        return self._fixed or Origin("file", self._name, mark.line + 1, mark.column + 1)

    def read(self, node: yaml.Node, key: Origin | None, path: str) -> ConfigNode:
        """Return the node with all below it."""
        here = self.get_origin(node)
        self._count += 1
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if self._count > MAX_VALUES:
            raise YamlError(line, column, "too many values: aliases multiply them")
        if len(self._open) >= MAX_DEPTH and not isinstance(node, yaml.ScalarNode):
            raise YamlError(line, column, f"it is {NestedTooDeeply()}")
        if id(node) in self._open:
            self._problems.append(ConfigProblem.at(here, path, "this alias contains itself"))
            return ConfigNode(None, here, key)
        self._open.add(id(node))
        value = self._read_value(node, path)
        self._open.discard(id(node))
        return ConfigNode(value, here, key)

    def _read_value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, None, f"{path}.{i}") for i, child in enumerate(node.value)]
        try:
            return _construct_scalar(node.tag, node.value)
        except ValueError as error:
            self._problems.append(ConfigProblem.at(self.get_origin(node), path, str(error)))
            return node.value

    def _read_mapping(self, node: yaml.MappingNode, path: str) -> dict[str, ConfigNode]:
        found: dict[str, ConfigNode] = {}
        for key_node, value_node in node.value:
            at = self.get_origin(key_node)
            key = key_node.value
            if key_node.tag != _TAG + "str" or not isinstance(key, str):
                shown = repr(key) if isinstance(key, str) else "a list or a mapping"
                self._problems.append(ConfigProblem.at(at, path, f"a key must be a string, not {shown}"))
                continue
            child = f"{path}.{key}" if path else key
            if key == "<<" and not key_node.style:
                message = "YAML 1.2 has no merge keys: write the keys themselves"
                self._problems.append(ConfigProblem.at(at, child, message))
                continue
            if key in found:
                first = found[key].key_origin
                self._problems.append(ConfigProblem.at(at, child, f"this key has a value at {first} already"))
                continue
            found[key] = self.read(value_node, at, child)
        return found
