"""`python -m benchmarks waiting` measures a short prompt behind a long one on both sides."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import command


def test_both_sides_are_measured(tmp_path: Path) -> None:
    sizes = ["--long", "300", "--short", "20", "--turns", "1"]
    done = CliRunner().invoke(command, ["waiting", *sizes, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text())
    assert all(value > 0 for side in found["sides"].values() for value in side.values())
    assert "times alone" in done.output and found["long_processor_ratio"] > 0
