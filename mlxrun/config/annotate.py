"""Renders a config as YAML: each key with its description (`config init`) or its origin (`config show`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.loading import LoadedConfig
from mlxrun.config.schema import EXTENDS, EXTENDS_DOC
from mlxrun.config.setting_fields import (
    SettingField,
    describe_class,
    list_fields,
    list_sections,
    to_plain,
)
from mlxrun.config.sources import escape_references
from mlxrun.config.validation import format_number
from mlxrun.config.yaml_source import render_yaml
from mlxrun.core.byte_sizes import format_bytes

WIDTH = 100


PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}


def render_preset(name: str, schema: str) -> str:
    """Return the config of that name in PRESETS; editors find the JSON Schema at `schema`."""
    return f"{_point_to(schema)}\n{PRESETS[name].read_text(encoding='utf-8')}"


def render_short_file(comment: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a config with these values by section and key, under a comment."""
    lines = [*_wrap_comment(comment, ""), "version: 1"]
    for section, found in values.items():
        lines += [
            "",
            f"{section}:",
            *(f"  {key}: {escape_references(render_yaml(value))}" for key, value in found.items()),
        ]
    return "\n".join(lines) + "\n"


def _point_to(schema: str) -> str:
    return f"# yaml-language-server: $schema={schema}"


def render_template_file(schema: str) -> str:
    """Return every key with its default and description. `schema`: where editors find the JSON Schema."""
    lines = [
        _point_to(schema),
        "# Every key of mlxrun with its default; a file needs only the keys that it changes.",
        "# `mlxrun config check` finds errors, `mlxrun config show` prints where each value comes from.",
    ]
    for info in list_fields().values():
        if not info.section:
            lines += ["", *_explain_field(info)]
    lines += ["", *_wrap_comment(EXTENDS_DOC, ""), f"# {EXTENDS}: base.yaml"]
    for name, cls in list_sections().items():
        lines += ["", *_wrap_comment(describe_class(cls), ""), f"{name}:"]
        for info in list_fields().values():
            if info.section == name:
                lines += _explain_field(info)
    return "\n".join(lines) + "\n"


def render_with_origins(loaded: LoadedConfig) -> str:
    """Return every value in effect, with its origin in a comment. The text is a valid config."""
    values = to_plain(loaded.config)
    rows = list(_list_rows(loaded, values))
    width = min(48, max(len(text) for text, _ in rows))
    head = f"# {loaded.path or 'no file: built-in defaults'}, sha256 {loaded.digest}"
    return "\n".join([head, *(f"{text:<{width}}  # {note}" if note else text for text, note in rows)]) + "\n"


def describe_type(info: SettingField) -> str:
    """Describe the values of a key, as in `integer, 1 to 4096, or null`."""
    if len(info.choices) == 1:
        parts = [f"always {render_yaml(info.choices[0])}"]
    elif info.choices:
        parts = [" | ".join(render_yaml(choice) for choice in info.choices)]
    elif info.is_list:
        parts = ["list of strings"]
    elif info.is_mapping:
        parts = ["mapping of names to secrets" if info.is_secret else "mapping"]
        parts += ["or to keys below it"] if info.item_class else []
    elif info.is_secret:
        parts = ["secret"]
    elif info.is_bytes:
        parts = ["bytes, or a size such as 4GB or 512MiB"]
    else:
        parts = [{str: "string", bool: "true or false", int: "integer", float: "number"}[info.type]]
    low, high = info.range.low, info.range.high
    if low is not None and high is not None:
        parts.append(f"{format_number(low)} to {format_number(high)}")
    elif low is not None and not info.is_bytes:
        parts.append(f"at least {format_number(low)}")
    elif high is not None:
        parts.append(f"at most {format_number(high)}")
    return ", ".join(parts) + (", or null" if info.optional else "")


def format_default(info: SettingField) -> str:
    """Return the default as it is written in a config file."""
    if info.is_bytes and isinstance(info.default, int):
        return format_bytes(info.default)
    return render_yaml(info.default)


def _explain_field(info: SettingField) -> list[str]:
    indent = "  " if info.section else ""
    key = f"{_mark_unset(info, info.default)}{info.key}"
    return [
        *_wrap_comment(info.doc, indent),
        f"{indent}{key}: {format_default(info)}  # {describe_type(info)}",
    ]


def _mark_unset(info: SettingField, value: Any) -> str:
    """What makes a comment of `models` without an entry, which a config has to leave out."""
    return "# " if (info.section, info.key) == ("", "models") and not value else ""


def _wrap_comment(text: str, indent: str) -> list[str]:
    lead = indent + "# "
    wrapper = textwrap.TextWrapper(WIDTH, lead, lead, break_on_hyphens=False, break_long_words=False)
    return wrapper.wrap(text)


def _list_rows(loaded: LoadedConfig, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    section = ""
    for path, info in list_fields().items():
        if info.section != section:
            section = info.section
            yield f"{section}:", ""
        value = values[info.section][info.key] if info.section else values[info.key]
        text = escape_references(render_yaml(value))
        indent = "  " if section else ""
        yield f"{indent}{_mark_unset(info, value)}{info.key}: {text}", str(loaded.origins[path])
