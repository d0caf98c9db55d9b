"""Plain values to config dataclasses and back, and the hash of a config. Values are already valid here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from mlxrun.config.setting_fields import SettingField, list_fields, list_sections
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import parse_bytes

HIDDEN = "***"


def build_config(values: dict[str, Any], leave_out: Collection[str] = ()) -> Config:
    """Return the config of plain values; keys in `leave_out`, and keys not given, have their default."""
    arguments: dict[str, dict[str, Any]] = {name: {} for name in ("", *list_sections())}
    for path, info in list_fields().items():
        section = values.get(info.section) if info.section else values
        if path not in leave_out and isinstance(section, dict) and info.key in section:
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
    if info.type in (int, float):
        return info.type(value)  # YAML may have 1.0 for an int, or 1 for a float
    return value


def to_plain(config: Config) -> dict[str, Any]:
    """Return the config as JSON-ready dicts with every key; secrets are hidden."""
    result: dict[str, Any] = {}
    for info in list_fields().values():
        value = getattr(getattr(config, info.section) if info.section else config, info.key)
        if info.is_secret:
            value = dict.fromkeys(value, HIDDEN)
        target = result.setdefault(info.section, {}) if info.section else result
        target[info.key] = list(value) if isinstance(value, tuple) else value
    return result


def hash_config(config: Config) -> str:
    """Return the sha256 of a config's canonical JSON. Configs that differ in secrets only have one hash."""
    text = json.dumps(to_plain(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
