"""The settings as data: one SettingField for each key, with its type, range, default and description.

Besides, it builds configs and other classes of settings from plain values, which must be valid, and turns
configs back. Sections of a config are one level deep.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from mlxrun.config.setting_annotations import Bytes, Range, Secret
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import parse_bytes

_UNIONS = (Union, types.UnionType)
_SCALARS = (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One key. `hint`: its annotation. `type`: without Annotated and None, as in int, Literal["a"] and
    tuple[str, ...]. `default`: as JSON has it; MISSING if the key must be given."""

    section: str  # "" for a key of the top level
    key: str
    hint: Any
    type: Any
    optional: bool
    default: Any
    doc: str
    range: Range
    is_bytes: bool
    is_secret: bool

    @property
    def path(self) -> str:
        """`section.key`, as users write it."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def is_required(self) -> bool:
        """Whether the key must be given."""
        return self.default is MISSING

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_list(self) -> bool:
        """Whether the value is a list of strings."""
        return get_origin(self.type) is tuple

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping with free keys."""
        return get_origin(self.type) is dict

    @property
    def item_kinds(self) -> tuple[Any, ...]:
        """The types of a mapping's values; empty for other types."""
        return get_args(get_args(self.type)[1]) if self.is_mapping else ()

    @property
    def item_class(self) -> type | None:
        """The class of a mapping's values that have keys of their own; they may be plain strings too."""
        return next((kind for kind in self.item_kinds if is_dataclass(kind)), None)

    @property
    def is_text(self) -> bool:
        """Whether the value is a string."""
        return self.type is str or (
            bool(self.choices) and all(isinstance(each, str) for each in self.choices)
        )


@cache
def list_sections() -> Mapping[str, type]:
    """Return the class of each section of the file by the section's name, in order."""
    kinds = {info.key: info.type for info in list_class_fields(Config)}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}


@cache
def list_fields() -> Mapping[str, SettingField]:
    """Return every key by its path, in order."""
    found = [info for info in list_class_fields(Config) if info.key not in list_sections()]
    for name, cls in list_sections().items():
        found += [replace(info, section=name) for info in list_class_fields(cls)]
    return {info.path: info for info in found}


@cache
def list_class_fields(cls: type) -> tuple[SettingField, ...]:
    """Return the keys of a class of settings, such as `SettingField.item_class`. They have no section."""
    hints = get_type_hints(cls, include_extras=True)
    docs = read_docstrings(cls)
    return tuple(_describe_field(item, hints[item.name], docs.get(item.name, "")) for item in fields(cls))


def find_field(steps: Sequence[str | int]) -> SettingField | None:
    """Return the innermost key that a place in a config belongs to. For `server.api_keys.alice.role` that is
    `role`, whose section is then `server.api_keys.alice`. None if there is no such key."""
    names = [str(step) for step in steps]
    found = list_fields().get(".".join(names[:2])) or list_fields().get(".".join(names[:1]))
    if found is None or found.item_class is None or len(names) != found.path.count(".") + 3:
        return found
    inner = {info.key: info for info in list_class_fields(found.item_class)}.get(names[-1])
    return None if inner is None else replace(inner, section=".".join(names[:-1]))


def _describe_field(item: Field[Any], hint: Any, doc: str) -> SettingField:
    bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = get_args(bare) if get_origin(bare) in _UNIONS else (bare,)
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return SettingField(
        section="",
        key=item.name,
        hint=hint,
        type=reduce(or_, (each for each in kinds if each is not types.NoneType)),
        optional=types.NoneType in kinds,
        default=_to_json(default),
        doc=doc,
        range=next((mark for mark in marks if isinstance(mark, Range)), Range()),
        is_bytes=any(isinstance(mark, Bytes) for mark in marks),
        is_secret=any(isinstance(mark, Secret) for mark in marks),
    )


def _to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_docstrings(cls: type) -> dict[str, str]:
    """Return the strings under the fields of a class. They are read from its source, as Python does not keep
    them."""
    body = _parse_classes(cls.__module__)[cls.__name__].body
    docs = {}
    for item, below in zip(body, body[1:], strict=False):
        match item, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _join_lines(text)
    return docs


@cache
def _parse_classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module by their names. `inspect` would parse the whole module for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def describe_class(cls: type) -> str:
    """Return the docstring of a class of settings as one line."""
    return _join_lines(cls.__doc__ or "")


def _join_lines(doc: str) -> str:
    return " ".join(doc.split())


HIDDEN = "***"


def build_config(values: dict[str, Any], leave_out: Collection[str] = ()) -> Config:
    """Return the config of plain, valid values. Keys that are in `leave_out`, or not given, have their
    default."""
    kept: dict[str, Any] = {}
    for path, info in list_fields().items():
        section = values.get(info.section) if info.section else values
        is_wrong = any(key == path or key.startswith(f"{path}.") for key in leave_out)
        if not is_wrong and isinstance(section, dict) and info.key in section:
            target = kept.setdefault(info.section, {}) if info.section else kept
            target[info.key] = section[info.key]
    return cast(Config, build_settings(Config, kept))


def build_settings(hint: Any, value: Any) -> Any:
    """Return the value of a type, such as a class of settings, from plain values that fit its schema."""
    if is_dataclass(hint):
        cls, given = cast(type, hint), value or {}
        infos = [info for info in list_class_fields(cls) if info.key in given]
        return cls(**{info.key: build_settings(info.hint, given[info.key]) for info in infos})
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin is Annotated:
        if isinstance(value, str) and any(isinstance(mark, Bytes) for mark in arguments[1:]):
            return parse_bytes(value)
        return build_settings(arguments[0], value)
    if origin in _UNIONS:
        kinds = [each for each in arguments if each is not types.NoneType]
        if len(kinds) > 1:  # of which only lists and mappings have a form of their own
            kinds = [each for each in kinds if isinstance(value, dict | list) and each not in _SCALARS]
        return build_settings(kinds[0], value) if kinds else value
    if origin is tuple and isinstance(value, list):
        return tuple(build_settings(arguments[0], each) for each in value)
    if origin is dict:
        return {key: build_settings(arguments[1], each) for key, each in value.items()}
    return hint(value) if hint in (int, float) else value  # YAML may have 1.0 for an int, or 1 for a float


def list_values(config: Config) -> Iterator[tuple[SettingField, Any]]:
    """Each key with its value."""
    for info in list_fields().values():
        yield info, getattr(getattr(config, info.section) if info.section else config, info.key)


def to_plain(config: Config) -> dict[str, Any]:
    """Return the config as JSON-ready dicts with every key. Secrets are hidden."""
    result: dict[str, Any] = {}
    for info, value in list_values(config):
        if info.item_class is not None:
            value = {name: _simplify_item(info, item) for name, item in value.items()}
        target = result.setdefault(info.section, {}) if info.section else result
        target[info.key] = _to_json(value)
    return result


def _simplify_item(info: SettingField, item: Any) -> Any:
    """A value of a mapping without its secrets and defaults."""
    assert info.item_class is not None
    if isinstance(item, str):
        return HIDDEN if info.is_secret else item
    values = [(inner, _to_json(getattr(item, inner.key))) for inner in list_class_fields(info.item_class)]
    return {
        inner.key: HIDDEN if inner.is_secret else value for inner, value in values if value != inner.default
    }


def hash_config(config: Config) -> str:
    """Return the sha256 (hex) of a config's canonical JSON. Secrets do not change it."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
