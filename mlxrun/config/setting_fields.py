"""What settings.py declares, as data: one FieldInfo a key, with type, range, default and description.

The schema, the loader, the reference and `config init` all read this. It works on any dataclass of
dataclasses, so that tests can declare their own; sections are one level deep.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mlxrun.config.settings import Bytes, Config, Range, Secret


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One key. `type` is without Annotated and None, such as int, Literal["a"] or tuple[str, ...]."""

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
        """Whether the values of a mapping are strings, and nothing else."""
        return self.is_mapping and get_args(self.type)[1] is str

    @property
    def is_text(self) -> bool:
        """Whether any string without further meaning is a value."""
        return self.type is str or any(isinstance(choice, str) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the file: its class and what that says of itself."""

    name: str
    cls: type
    doc: str


def sections_of(root: type = Config) -> Mapping[str, Section]:
    """The sections of a config class, by name, in order."""
    return _sections(root)


def fields_of(root: type = Config) -> Mapping[str, FieldInfo]:
    """Every key of a config class by its path, in order."""
    return _fields(root)


@cache
def _sections(root: type) -> Mapping[str, Section]:
    hints = get_type_hints(root)
    return {
        item.name: Section(item.name, hints[item.name], one_line(hints[item.name].__doc__ or ""))
        for item in fields(root)
        if is_dataclass(hints[item.name])
    }


@cache
def _fields(root: type) -> Mapping[str, FieldInfo]:
    found = _own_fields("", root)
    for section in _sections(root).values():
        found += _own_fields(section.name, section.cls)
    return {info.path: info for info in found}


def _own_fields(section: str, cls: type) -> list[FieldInfo]:
    hints = get_type_hints(cls, include_extras=True)
    docs = docstrings_of(cls)
    plain = [item for item in fields(cls) if not is_dataclass(hints[item.name])]
    return [_describe(section, item, hints[item.name], docs.get(item.name, "")) for item in plain]


def _describe(section: str, item: Field[Any], hint: Any, doc: str) -> FieldInfo:
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        optional = len(kinds) < len(get_args(hint))
        (hint,) = kinds  # a key has one type, or that and null
    return FieldInfo(
        section=section,
        key=item.name,
        type=hint,
        optional=optional,
        default=item.default if item.default_factory is MISSING else item.default_factory(),
        doc=doc,
        range=next((mark for mark in marks if isinstance(mark, Range)), Range()),
        is_bytes=any(isinstance(mark, Bytes) for mark in marks),
        is_secret=any(isinstance(mark, Secret) for mark in marks),
    )


def docstrings_of(cls: type) -> dict[str, str]:
    """The strings under the fields of a class: Python drops them, the source has them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = one_line(below.value.value)
    return docs


def one_line(doc: str) -> str:
    """A docstring with its line breaks undone."""
    return " ".join(doc.split())
