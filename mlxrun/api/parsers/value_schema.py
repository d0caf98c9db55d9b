"""A JSON Schema for the parsers: the types that a value may have, and the schemas of members and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        types |= {get_type(option) for option in _find_options([part])} if given is None else set()
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


def get_type(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "string")
