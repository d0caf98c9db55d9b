"""docs/config.md has every key once, in its section."""

from __future__ import annotations

from mlxrun.config.setting_fields import list_fields, list_sections
from tools.config_files import INTRO, render_reference


def test_every_section_and_key_is_there_once() -> None:
    text = render_reference()
    assert text.startswith(INTRO)
    for name in list_sections():
        body = text.split(f"## {name}\n")[1].split("\n## ")[0]
        keys = [info.key for info in list_fields().values() if info.section == name]
        assert all(body.count(f"`{key}`") >= 1 for key in keys), name
