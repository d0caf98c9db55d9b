"""`python -m mlxrun.config.generate`: writes every file of the repository that is made from settings.py."""

from __future__ import annotations

from pathlib import Path

from mlxrun.config.annotate import annotated
from mlxrun.config.reference import reference
from mlxrun.config.schema import SCHEMA_FILE, schema_text

REPOSITORY = Path(__file__).parents[2]
SCHEMA_FROM_CONFIGS = "../mlxrun/config/schema.json"


def generated() -> dict[Path, str]:
    """What each generated file should hold."""
    return {
        SCHEMA_FILE: schema_text(),
        REPOSITORY / "configs" / "default.yaml": annotated(SCHEMA_FROM_CONFIGS),
        REPOSITORY / "docs" / "config.md": reference(),
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
