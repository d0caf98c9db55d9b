"""A config as YAML with descriptions or origins is a config with the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mlxrun.config.annotate import describe_type, format_default, render_template_file, render_with_origins
from mlxrun.config.loading import load_config
from mlxrun.config.setting_fields import list_fields
from mlxrun.config.settings import Config


def test_the_template_says_nothing_but_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mlxrun.yaml"
    path.write_text(render_template_file("schema.json"))
    assert load_config(path).config == Config()
    assert max(map(len, path.read_text().splitlines())) <= 120


def test_every_key_of_the_template_has_its_description_and_type() -> None:
    text = " ".join(render_template_file("schema.json").replace("\n", " ").replace("#", " ").split())
    for info in list_fields().values():
        assert " ".join(info.doc.replace("#", " ").split()) in text
        assert f"{info.key}: {format_default(info)} {describe_type(info)}" in text


def test_values_are_shown_with_their_origins_and_load_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("scheduler:\n  policy: fair\n")
    loaded = load_config(path, environ={"MLXRUN_SERVER__PORT": "9000"}, sets=["log.level=debug"])
    shown = render_with_origins(loaded)
    rows = {line.split("#")[0].strip(): line.split("# ")[-1] for line in shown.splitlines() if ":" in line}
    assert rows["policy: fair"] == "a.yaml:2:11"
    assert rows["port: 9000"] == "MLXRUN_SERVER__PORT"
    assert rows["level: debug"] == "--set log.level"
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load_config(again).config == loaded.config and yaml.safe_load(shown)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("server.port", "integer, 0 to 65535"),
        ("cache.memory_bytes", "bytes, or a size such as 4GB or 512MiB, or null"),
        ("server.allowed_hosts", "list of strings"),
        ("server.api_keys", "mapping of names to secrets, or to keys below it"),
        ("version", "always 1"),
        ("log.format", "text | json"),
    ],
)
def test_types_are_said_in_words(path: str, text: str) -> None:
    assert describe_type(list_fields()[path]) == text
