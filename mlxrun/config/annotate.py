"""A config as YAML for people: each key with its meaning (`config init`) or its origin (`config show`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from mlxrun.config.byte_sizes import format_bytes
from mlxrun.config.conversion import HIDDEN, to_plain
from mlxrun.config.interpolate import escape
from mlxrun.config.loading import Loaded
from mlxrun.config.schema import EXTENDS, EXTENDS_DOC
from mlxrun.config.setting_fields import FieldInfo, fields_of, sections_of
from mlxrun.config.validation import number
from mlxrun.config.yaml_source import yaml_text

WIDTH = 100


def annotated(schema: str) -> str:
    """Every key with its default and meaning; `schema` is where editors find the JSON Schema."""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "# Every key of mlxrun with its default; a file needs only what it changes. `mlxrun config check`",
        "# finds mistakes, `mlxrun config show` says which value came from where.",
    ]
    for info in fields_of().values():
        if not info.section:
            lines += ["", *_explained(info)]
    lines += ["", *_comment(EXTENDS_DOC, ""), f"# {EXTENDS}: base.yaml"]
    for section in sections_of().values():
        lines += ["", *_comment(section.doc, ""), f"{section.name}:"]
        for info in fields_of().values():
            if info.section == section.name:
                lines += _explained(info)
    return "\n".join(lines) + "\n"


def with_origins(loaded: Loaded) -> str:
    """Every key as it is in force, with where it came from in a comment; itself a valid config."""
    values = to_plain(loaded.config)
    rows = list(_rows(loaded, values))
    width = min(48, max(len(text) for text, _ in rows))
    head = f"# {loaded.path or 'no file: built-in defaults'}, sha256 {loaded.digest}"
    return "\n".join([head, *(f"{text:<{width}}  # {note}" if note else text for text, note in rows)]) + "\n"


def describe_type(info: FieldInfo) -> str:
    """What may stand there, in a few words: `integer, 1 to 4096, or null`."""
    if len(info.choices) == 1:
        parts = [f"always {yaml_text(info.choices[0])}"]
    elif info.choices:
        parts = [" | ".join(yaml_text(choice) for choice in info.choices)]
    elif info.is_list:
        parts = ["list of strings"]
    elif info.is_mapping:
        parts = ["mapping of names to secrets" if info.is_secret else "mapping"]
    elif info.is_bytes:
        parts = ["bytes, or a size such as 4GB or 512MiB"]
    else:
        parts = [{str: "string", bool: "true or false", int: "integer", float: "number"}[info.type]]
    low, high = info.range.low, info.range.high
    if low is not None and high is not None:
        parts.append(f"{number(low)} to {number(high)}")
    elif low is not None and not info.is_bytes:
        parts.append(f"at least {number(low)}")
    elif high is not None:
        parts.append(f"at most {number(high)}")
    return ", ".join(parts) + (", or null" if info.optional else "")


def default_text(info: FieldInfo) -> str:
    """The default as a config file says it."""
    if info.is_secret and not info.is_mapping:
        return HIDDEN if info.default else "null"
    if info.is_bytes and isinstance(info.default, int):
        return format_bytes(info.default)
    return yaml_text(list(info.default) if info.is_list else info.default)


def _explained(info: FieldInfo) -> list[str]:
    indent = "  " if info.section else ""
    return [*_comment(info.doc, indent), f"{indent}{info.key}: {default_text(info)}  # {describe_type(info)}"]


def _comment(text: str, indent: str) -> list[str]:
    lead = indent + "# "
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _rows(loaded: Loaded, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    section = ""
    for path, info in fields_of().items():
        if info.section != section:
            section = info.section
            yield f"{section}:", ""
        value = values[info.section][info.key] if info.section else values[info.key]
        yield f"{'  ' if section else ''}{info.key}: {escape(yaml_text(value))}", str(loaded.origins[path])
