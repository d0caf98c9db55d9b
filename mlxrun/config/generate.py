"""`python -m mlxrun.config.generate` writes the files of the repository that are made from settings.py."""

from __future__ import annotations

from pathlib import Path

from mlxrun.config.annotate import render_template_file
from mlxrun.config.reference import render_reference
from mlxrun.config.schema import SCHEMA_FILE, render_schema

REPOSITORY = Path(__file__).parents[2]
SCHEMA_FROM_CONFIGS = "../mlxrun/config/schema.json"


def render_files() -> dict[Path, str]:
    """Return the text of each generated file."""
    return {
        SCHEMA_FILE: render_schema(),
        REPOSITORY / "configs" / "default.yaml": render_template_file(SCHEMA_FROM_CONFIGS),
        REPOSITORY / "docs" / "config.md": render_reference(),
    }


if __name__ == "__main__":
    for path, text in render_files().items():
        path.write_text(text, encoding="utf-8")
