"""Plain values to frozen dataclasses and back, and the digest of a config. Values are valid here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any, TypeVar

from mlxrun.config.byte_sizes import parse_bytes
from mlxrun.config.setting_fields import FieldInfo, fields_of, sections_of
from mlxrun.config.settings import Config

T = TypeVar("T")
HIDDEN = "***"


def build(root: type[T], values: dict[str, Any], leave_out: Collection[str] = ()) -> T:
    """The config that plain values describe; keys in `leave_out`, and keys not given, have their default."""
    arguments: dict[str, dict[str, Any]] = {name: {} for name in ("", *sections_of(root))}
    for path, info in fields_of(root).items():
        section = values.get(info.section) if info.section else values
        if path not in leave_out and isinstance(section, dict) and info.key in section:
            arguments[info.section][info.key] = _convert(info, section[info.key])
    sections = {name: section.cls(**arguments[name]) for name, section in sections_of(root).items()}
    return root(**arguments[""], **sections)


def _convert(info: FieldInfo, value: Any) -> Any:
    if value is None:
        return None
    if info.is_list:
        return tuple(value)
    if info.is_bytes and isinstance(value, str):
        return parse_bytes(value)
    if info.type in (int, float):
        return info.type(value)  # YAML's 1.0 for an int, 1 for a float
    return value


def to_plain(config: Any) -> dict[str, Any]:
    """The config as JSON-ready dicts, every key, secrets hidden. What manifests and `config show` hold."""
    root = type(config)
    assert is_dataclass(root)
    result: dict[str, Any] = {}
    for info in fields_of(root).values():
        holder = getattr(config, info.section) if info.section else config
        value = getattr(holder, info.key)
        if info.is_secret and value:
            value = dict.fromkeys(value, HIDDEN) if isinstance(value, dict) else HIDDEN
        target = result.setdefault(info.section, {}) if info.section else result
        target[info.key] = list(value) if isinstance(value, tuple) else value
    return result


def config_hash(config: Config) -> str:
    """sha256 of the canonical JSON of a resolved config. A changed secret is the same config."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
