"""The template for reports has the form that GitHub reads, and names a command that there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from mlxrun.cli.commands.bench import command

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / ".github" / "ISSUE_TEMPLATE" / "machine-report.yml"


def test_the_template_is_a_form() -> None:
    form: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    assert form["name"] in (ROOT / "docs" / "apple-silicon.md").read_text(encoding="utf-8").replace("\n", " ")
    assert {"name", "description", "title", "labels", "body"} == set(form)
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert [each["id"] for each in fields] == ["machine", "report", "output"]
    for each in fields:
        assert each["type"] in ("input", "textarea") and each["attributes"]["label"]
        assert isinstance(each["validations"]["required"], bool)


def test_the_command_exists() -> None:
    """The template and the page name `mlxrun bench report` with an option that it has."""
    for path in (TEMPLATE, ROOT / "docs" / "apple-silicon.md"):
        found = re.findall(r"mlxrun bench report (--[a-z]+) report\.json", path.read_text(encoding="utf-8"))
        assert found == ["--json"]
    shown = CliRunner().invoke(command, ["report", "--help"]).output
    assert "--json" in shown and "--no-families" in shown
