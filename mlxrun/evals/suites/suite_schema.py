"""The JSON Schema of suites, made from suite_settings.py.

`schema.json` beside this file is its copy for editors; a test fails when it is stale.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlxrun.config.schema import DIALECT, describe_settings
from mlxrun.evals.suites.suite_settings import Suite

SCHEMA_FILE = Path(__file__).with_name("schema.json")


@cache
def build_suite_schema() -> dict[str, Any]:
    """Build the schema of suite files."""
    return {"$schema": DIALECT, "title": "mlxrun suite", **describe_settings(Suite)}
