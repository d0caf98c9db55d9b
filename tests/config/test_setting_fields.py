"""What is read off the dataclasses of the settings: types, ranges, choices and descriptions."""

from __future__ import annotations

import inspect

from mlxrun.config.setting_fields import describe_class, list_class_fields, list_fields, list_sections
from mlxrun.config.settings import Config, SchedulerSettings


def test_keys_have_their_section_default_and_range() -> None:
    info = list_fields()["scheduler.max_running"]
    assert (info.section, info.key, info.type) == ("scheduler", "max_running", int)
    assert info.default == SchedulerSettings().max_running and info.range.low == 1
    assert list_fields()["version"].section == ""


def test_kinds_of_values() -> None:
    fields = list_fields()
    assert fields["server.api_keys"].is_secret and fields["server.api_keys"].is_mapping
    assert fields["server.allowed_hosts"].is_list and not fields["server.host"].is_list
    assert fields["cache.memory_bytes"].is_bytes and fields["cache.memory_bytes"].optional
    assert fields["log.format"].choices == ("text", "json")


def test_every_section_of_the_config_is_listed() -> None:
    sections = {name for name in Config.__dataclass_fields__ if name not in ("version", "models")}
    assert list_sections().keys() == sections
    assert {info.section for info in list_fields().values()} == sections | {""}


def test_descriptions_are_one_line() -> None:
    assert describe_class(SchedulerSettings) == " ".join((SchedulerSettings.__doc__ or "").split())
    assert [path for path, info in list_fields().items() if "\n" in info.doc] == []


def test_descriptions_are_those_below_the_fields() -> None:
    source = inspect.getsource(SchedulerSettings)
    found = {info.key: info.doc for info in list_class_fields(SchedulerSettings)}
    assert len(found) > 5 and all(doc in " ".join(source.split()) for doc in found.values())
    assert len(set(found.values())) == len(found)
