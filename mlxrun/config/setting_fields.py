"""The settings as data: one SettingField for each key, with its type, range, default and description.

Besides, it builds configs from plain values, which must be valid, and turns them back. Sections are one level
deep.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mlxrun.config.setting_annotations import Bytes, Range, Secret
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import parse_bytes


@dataclass(frozen=True, slots=True)
class SettingField:
    """One key. `type` has no Annotated and no None: int, Literal["a"], tuple[str, ...]."""

    section: str  # "" for a key of the top level
    key: str
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
    def holds_text(self) -> bool:
        """Whether the value is a mapping to strings only."""
        return self.is_mapping and get_args(self.type)[1] is str

    @property
    def item_class(self) -> type | None:
        """The class of a mapping's values that have keys of their own; they may be plain strings too."""
        values = get_args(self.type)[1:] if self.is_mapping else ()
        return next((kind for value in values for kind in get_args(value) if is_dataclass(kind)), None)

    @property
    def is_text(self) -> bool:
        """Whether the value is a string."""
        return self.type is str or (
            bool(self.choices) and all(isinstance(each, str) for each in self.choices)
        )


@dataclass(frozen=True, slots=True)
class SettingSection:
    """One section of the file. `doc`: the docstring of its class, as one line."""

    name: str
    cls: type
    doc: str


@cache
def list_sections() -> Mapping[str, SettingSection]:
    """Return the sections by name, in order."""
    hints = get_type_hints(Config)
    return {
        item.name: SettingSection(item.name, hints[item.name], join_lines(hints[item.name].__doc__ or ""))
        for item in fields(Config)
        if is_dataclass(hints[item.name])
    }


@cache
def list_fields() -> Mapping[str, SettingField]:
    """Return every key by its path, in order."""
    found = _describe_class("", Config)
    for section in list_sections().values():
        found += _describe_class(section.name, section.cls)
    return {info.path: info for info in found}


@cache
def list_item_fields(cls: type) -> tuple[SettingField, ...]:
    """Return the keys of a mapping's values of this class (`SettingField.item_class`). They have no
    section."""
    return tuple(_describe_class("", cls))


def find_field(steps: Sequence[str | int]) -> SettingField | None:
    """Return the innermost key that a place in a config belongs to. For `server.api_keys.alice.role` that is
    `role`, whose section is then `server.api_keys.alice`. None if there is no such key."""
    names = [str(step) for step in steps]
    found = list_fields().get(".".join(names[:2])) or list_fields().get(".".join(names[:1]))
    if found is None or found.item_class is None or len(names) != found.path.count(".") + 3:
        return found
    inner = {info.key: info for info in list_item_fields(found.item_class)}.get(names[-1])
    return None if inner is None else replace(inner, section=".".join(names[:-1]))


def _describe_class(section: str, cls: type) -> list[SettingField]:
    hints = get_type_hints(cls, include_extras=True)
    docs = read_docstrings(cls)
    own = [item for item in fields(cls) if not is_dataclass(hints[item.name])]
    return [_describe_field(section, item, hints[item.name], docs.get(item.name, "")) for item in own]


def _describe_field(section: str, item: Field[Any], hint: Any, doc: str) -> SettingField:
    hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    (kind,) = (each for each in kinds if each is not types.NoneType)  # a key has one type, perhaps optional
    return SettingField(
        section=section,
        key=item.name,
        type=kind,
        optional=types.NoneType in kinds,
        default=item.default if item.default_factory is MISSING else item.default_factory(),
        doc=doc,
        range=next((mark for mark in marks if isinstance(mark, Range)), Range()),
        is_bytes=any(isinstance(mark, Bytes) for mark in marks),
        is_secret=any(isinstance(mark, Secret) for mark in marks),
    )


def read_docstrings(cls: type) -> dict[str, str]:
    """Return the strings under the fields of a class. They are read from its source, as Python does not keep
    them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, below in zip(body.body, body.body[1:], strict=False):
        match item, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = join_lines(text)
    return docs


def join_lines(doc: str) -> str:
    """Return a docstring as one line."""
    return " ".join(doc.split())


HIDDEN = "***"


def build_config(values: dict[str, Any], leave_out: Collection[str] = ()) -> Config:
    """Return the config of plain, valid values. Keys that are in `leave_out`, or not given, have their
    default."""
    arguments: dict[str, dict[str, Any]] = {name: {} for name in ("", *list_sections())}
    for path, info in list_fields().items():
        section = values.get(info.section) if info.section else values
        is_wrong = any(key == path or key.startswith(f"{path}.") for key in leave_out)
        if not is_wrong and isinstance(section, dict) and info.key in section:
            arguments[info.section][info.key] = _convert_value(info, section[info.key])
    sections = {name: section.cls(**arguments[name]) for name, section in list_sections().items()}
    return Config(**arguments[""], **sections)


def _convert_value(info: SettingField, value: Any) -> Any:
    if value is None:
        return None
    if info.is_list:
        return tuple(value)
    if info.is_bytes and isinstance(value, str):
        return parse_bytes(value)
    if info.item_class is not None:
        return {name: _convert_item(info.item_class, item) for name, item in value.items()}
    if info.type in (int, float):
        return info.type(value)  # YAML may have 1.0 for an int, or 1 for a float
    return value


def _convert_item(cls: type, value: Any) -> Any:
    """A value of a mapping: a string as it is, or an object of its class."""
    if isinstance(value, str):
        return value
    infos = [info for info in list_item_fields(cls) if info.key in value]
    return cls(**{info.key: _convert_value(info, value[info.key]) for info in infos})


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
        target[info.key] = list(value) if isinstance(value, tuple) else value
    return result


def _simplify_item(info: SettingField, item: Any) -> Any:
    """A value of a mapping without its secrets and defaults."""
    assert info.item_class is not None
    if isinstance(item, str):
        return HIDDEN if info.is_secret else item
    values = [(inner, getattr(item, inner.key)) for inner in list_item_fields(info.item_class)]
    given = {
        inner.key: HIDDEN if inner.is_secret else value for inner, value in values if value != inner.default
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


def hash_config(config: Config) -> str:
    """Return the sha256 (hex) of a config's canonical JSON. Secrets do not change it."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
