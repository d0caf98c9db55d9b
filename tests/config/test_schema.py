"""The JSON Schema agrees with the loader about what is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from mlxrun.config.schema import SCHEMA_FILE, build_schema, render_schema
from mlxrun.config.setting_fields import build_config, list_fields, list_sections, to_plain
from mlxrun.config.settings import Config


def test_the_schema_is_a_schema_and_takes_the_defaults() -> None:
    jsonschema.Draft202012Validator.check_schema(build_schema())
    plain = to_plain(Config())
    jsonschema.validate(plain, build_schema())
    assert build_config(plain) == Config()


def test_every_key_is_described() -> None:
    properties = build_schema()["properties"]
    for info in list_fields().values():
        holder = properties[info.section]["properties"] if info.section else properties
        assert holder[info.key]["description"] == info.doc and info.doc


def test_the_shipped_copy_is_what_is_built() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == render_schema()
    assert json.loads(render_schema()) == build_schema()


@pytest.mark.parametrize(
    "config",
    [
        {"scheduler": None},
        {"extends": ["a.yaml", "b.yaml"]},
        {"cache": {"memory_bytes": "4GB"}},
        {"server": {"api_keys": {"alice": "secret"}}},
    ],
)
def test_what_a_file_may_say(config: dict[str, Any]) -> None:
    jsonschema.validate(config, build_schema())


@pytest.mark.parametrize(
    "config",
    [
        {"no_such_section": {}},
        {"scheduler": {"no_such_key": 1}},
        {"scheduler": {"policy": "random"}},
        {"scheduler": {"max_running": 0}},
        {"server": {"port": 70000}},
        {"cache": {"memory_bytes": "4 apples"}},
        {"extends": ""},
    ],
)
def test_what_a_file_may_not_say(config: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, build_schema())


def test_no_secret_has_a_default_in_the_schema() -> None:
    secrets = [info for info in list_fields().values() if info.is_secret]
    assert secrets
    for info in secrets:
        assert "default" not in build_schema()["properties"][info.section]["properties"][info.key]
    assert list_sections().keys() <= build_schema()["properties"].keys()
